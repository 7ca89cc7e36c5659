"""``slab://`` through the page cache and past it, at once: what one way has written, every other way reads."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_actors.backends import Stored
from hicache_actors.backends.slab import SlabBackend, medium, page_cache
from hicache_actors.backends.slab.store_file import NAME
from hicache_actors.cuda_ext.native import slots as native
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import content

pytestmark = pytest.mark.anyio

OBJECT_BYTES = 16 << 10

# Overwrites objects by one way, and reads what others have written by theirs; ends with 1 if one of them is not what it should be.
HAMMER = """
import asyncio, hashlib, mmap, os, random, sys
from hicache_actors.backends.objects import Expected, Verdict
from hicache_actors.backends.slab import SlabBackend
from hicache_actors.runtime.workers import Workers

async def main(url, seed, rounds, n_bytes):
    chance = random.Random(seed)
    workers = Workers("hammer", 4)
    backend = SlabBackend(url, workers)
    await backend.open()
    verdicts = []

    async def work(number):
        memory = memoryview(mmap.mmap(-1, 8 * n_bytes))  # aligned, as the slots of a host tier are
        buffers = [memory[at * n_bytes : (at + 1) * n_bytes] for at in range(8)]
        memory[:] = chance.randbytes(len(memory))
        for _ in range(rounds):
            names = chance.sample(range(60), 8)
            keys, hashes = [f"k{name}" for name in names], [hashlib.sha256(b"%d" % name).digest() for name in names]
            expected = Expected(b"n" * 16, hashes)
            if chance.random() < 0.5:
                memory[8192 : 8192 + 4096] = chance.randbytes(4096)  # another content under the same key
                await backend.delete(keys[:4])
                await backend.write_sealed(keys, buffers, expected)
            else:
                verdicts.extend(await backend.read_checked(keys, buffers, expected))
            if chance.random() < 0.1:
                fd = os.open(f"{backend.options.folder}/objects.slab", os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    await asyncio.gather(*map(work, range(3)))
    await backend.close()
    workers.close(20.0)
    print(verdicts.count(Verdict.OK), backend.stats().get("io"), flush=True)
    sys.exit(not {*verdicts} <= {None, Verdict.OK})

url, seed, rounds, n_bytes = sys.argv[1:]
asyncio.run(main(url, int(seed), int(rounds), int(n_bytes)))
"""


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("slab", 4)
    yield workers
    assert workers.close(20.0) == ()


def aligned(count: int) -> list[memoryview]:
    """As the slots of a host tier are."""
    memory = np.zeros(count * OBJECT_BYTES + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return [memory.data[start + at * OBJECT_BYTES : start + (at + 1) * OBJECT_BYTES] for at in range(count)]


def full(count: int) -> tuple[list[str], list[memoryview]]:
    keys, buffers = [f"k{at}" for at in range(count)], aligned(count)
    for key, buffer in zip(keys, buffers, strict=True):
        buffer[:] = content(key, OBJECT_BYTES)
    return keys, buffers


def test_processes_that_go_different_ways_never_read_what_is_not_there(tmp_path: Path) -> None:
    options = ["", "&direct=off"]
    if _allows_direct(tmp_path):
        options += ["&direct=on", "&direct=on&io=threads"]
    running = [
        subprocess.Popen(
            [
                sys.executable, "-c", HAMMER, f"slab://{tmp_path}/store?gb=0.0012{option}", str(seed), "150",
                str(OBJECT_BYTES),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, option in enumerate(options)
    ]  # fmt: skip
    said = [process.communicate()[0].split() for process in running]
    assert [process.returncode for process in running] == [0] * len(options)
    assert all(int(found) > 100 for found, _ in said)


async def test_short_objects_are_read_from_the_page_cache_and_past_it(workers: Workers, tmp_path: Path) -> None:
    backend = SlabBackend(f"slab://{tmp_path}/store?gb=0.01", workers)
    await backend.open()
    keys, data = full(64)
    assert list(await backend.write(keys, data)) == [Stored.WRITTEN] * 64
    io = backend.stats()["io"]
    assert io in ("both", "direct", "buffered")
    back = aligned(64)
    assert await backend.read(keys, back) == [True] * 64
    assert back == data
    fd = os.open(tmp_path / "store" / NAME, os.O_RDONLY)
    os.fsync(fd)
    for part in (0, 500_000):  # nothing is there; or the first half
        os.posix_fadvise(fd, part, 0, os.POSIX_FADV_DONTNEED)
        back = aligned(64)
        assert await backend.read(keys, back) == [True] * 64
        assert back == data
        os.pread(fd, 1 << 20, 0)
    os.close(fd)
    await backend.close()


async def test_long_objects_go_past_the_page_cache(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(medium, "SHORT_BYTES", OBJECT_BYTES)
    backend = SlabBackend(f"slab://{tmp_path}/store?gb=0.01", workers)
    await backend.open()
    assert list(await backend.write(*full(4))) == [Stored.WRITTEN] * 4
    assert backend.stats()["io"] == ("direct" if _allows_direct(tmp_path) else "buffered")
    await backend.close()


async def test_a_kernel_that_does_not_tell_what_it_has_is_not_asked_again(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native.slots()
    if library is None or not _allows_direct(tmp_path):
        pytest.skip("short objects do not go through the page cache here")
    real = native.Moving.check

    def check(call: native.Moving) -> None:
        if call.batch.from_cache:
            raise OSError(errno.ENOSYS, "planted")
        real(call)

    monkeypatch.setattr(native.Moving, "check", check)
    backend = SlabBackend(f"slab://{tmp_path}/store?gb=0.01", workers)
    await backend.open()
    keys, data = full(8)
    assert list(await backend.write(keys, data)) == [Stored.WRITTEN] * 8
    assert backend.stats()["io"] == "direct"
    assert os.strerror(errno.ENOSYS) in str(backend.stats()["why_direct"])
    back = aligned(8)
    assert await backend.read(keys, back) == [True] * 8
    assert back == data
    await backend.close()


async def test_what_is_written_does_not_wait_in_memory_until_it_is_a_tenth_of_it(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Semaphore(0)
    real = native.Slots.write_out

    def write_out(slots: native.Slots, fd: int, offset: int) -> None:
        real(slots, fd, offset)
        begun.release()

    monkeypatch.setattr(native.Slots, "write_out", write_out)
    monkeypatch.setattr(page_cache, "_WRITE_OUT_BYTES", 4 * OBJECT_BYTES)
    backend = SlabBackend(f"slab://{tmp_path}/store?gb=0.01", workers)
    await backend.open()
    keys, data = full(32)
    for at in range(0, 32, 2):
        await backend.write(keys[at : at + 2], data[at : at + 2])
    if backend.stats()["io"] != "both":
        pytest.skip("short objects do not go through the page cache here")
    for _ in range(8):
        assert begun.acquire(timeout=20.0)
    assert not begun.acquire(blocking=False)
    await backend.close()


def _allows_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True
