"""First touch in native threads: all of it is touched, nothing of it is changed, and it stops when it shall."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_actors.cuda_ext.native.hostmem import HostMemoryCalls, Touching
from hicache_actors.cuda_ext.native.library import library

LOADED = library()
pytestmark = pytest.mark.skipif(LOADED is None, reason="the native library is not in use here")
NBYTES = 64 << 20


@pytest.fixture
def calls() -> HostMemoryCalls:
    assert LOADED is not None
    return HostMemoryCalls(LOADED)


@pytest.fixture
def mapping() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        yield mapping


def address_of(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def resident_bytes(address: int) -> int:
    """Of the mapping that begins there, by what the kernel says."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        bounds = line.split()[0].split("-")
        if len(bounds) == 2 and int(bounds[0], 16) <= address < int(bounds[1], 16):
            return next(int(row.split()[1]) * 1024 for row in lines if row.startswith("Rss:"))
    raise AssertionError("no such mapping")


def test_all_is_touched(calls: HostMemoryCalls, mapping: mmap.mmap) -> None:
    address = address_of(mapping)
    before = resident_bytes(address)
    touching = Touching(calls, address, NBYTES, 3)
    assert touching.reach(NBYTES // 2)
    assert touching.done_bytes >= NBYTES // 2
    assert touching.reach(NBYTES)
    assert touching.done_bytes == NBYTES
    assert resident_bytes(address) - before >= NBYTES * 9 // 10
    assert not any(np.frombuffer(mapping, np.uint8)[:: 4096 // 2])
    touching.stop()
    touching.stop()
    assert touching.reach(NBYTES)
    assert touching.done_bytes == NBYTES


def test_what_lies_before_a_border_is_touched_when_it_says_so(calls: HostMemoryCalls, mapping: mmap.mmap) -> None:
    address = address_of(mapping)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    touching = Touching(calls, address, NBYTES, 3)
    page = mmap.PAGESIZE
    for part in range(1, 9):
        end = NBYTES * part // 8
        assert touching.reach(end)
        assert all(bits & 1 for bits in resident_pages(address, end // page)), f"part {part}"
    touching.stop()


def resident_pages(address: int, pages: int) -> bytes:
    """mincore(2): the lowest bit of each byte says whether a page has memory."""
    found = ctypes.create_string_buffer(pages)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(pages * mmap.PAGESIZE), found) == 0
    return found.raw


def test_what_is_written_meanwhile_stays(calls: HostMemoryCalls, mapping: mmap.mmap) -> None:
    data = np.frombuffer(mapping, np.uint8)
    touching = Touching(calls, address_of(mapping), NBYTES, 2)
    pattern = np.arange(NBYTES, dtype=np.uint32).view(np.uint8)[:NBYTES]
    data[:] = pattern
    assert touching.reach(NBYTES)
    touching.stop()
    assert np.array_equal(data, pattern)
    del data


def test_it_stops_while_somebody_waits(calls: HostMemoryCalls, mapping: mmap.mmap) -> None:
    touching = Touching(calls, address_of(mapping), NBYTES, 1)
    waiter = threading.Thread(target=touching.reach, args=(NBYTES,))
    waiter.start()
    touching.stop()
    waiter.join(30.0)
    assert not waiter.is_alive()
    assert touching.done_bytes <= NBYTES


def test_memory_that_is_not_there_is_an_error(calls: HostMemoryCalls) -> None:
    mapping = mmap.mmap(-1, NBYTES)
    address = address_of(mapping)
    mapping.close()
    touching = Touching(calls, address, NBYTES, 1)
    with pytest.raises(OSError, match="first touch"):
        touching.reach(1)
    touching.stop()
    assert not touching.reach(1)


def test_memory_is_bound_to_a_node(calls: HostMemoryCalls, mapping: mmap.mmap) -> None:
    address = address_of(mapping)
    calls.bind(address, NBYTES, 0)
    [policy] = [
        line.split()[1]
        for line in Path("/proc/self/numa_maps").read_text().splitlines()
        if line.split()[0] == f"{address:08x}" or line.split()[0] == f"{address:x}"
    ]
    assert policy == "bind:0"
    with pytest.raises(OSError, match="mbind"):
        calls.bind(address, NBYTES, 1000)
    with pytest.raises(OSError, match="no NUMA node 5000"):
        calls.bind(address, NBYTES, 5000)
