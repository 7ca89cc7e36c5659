"""Slots in the native library: by threads and by io_uring, what is moved is the same."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hicache_actors.cuda_ext.native import slots as native
from hicache_actors.cuda_ext.native.buffers import address
from hicache_actors.cuda_ext.native.digests import names
from hicache_actors.cuda_ext.native.library import library

LOADED = library()
pytestmark = pytest.mark.skipif(LOADED is None, reason="the native library is not in use here")

Run = Callable[[native.Moving], None]
PAGE = 4096


@pytest.fixture
def slots() -> native.Slots:
    assert LOADED is not None
    return native.Slots(LOADED)


def by_threads(call: native.Moving) -> None:
    threads = [threading.Thread(target=call.move) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def rings(slots: native.Slots) -> native.Rings:
    rings = native.Rings(slots)
    try:
        rings.move(slots.moving([], [], writes=False, fd=-1, memory=0, request_bytes=1, names=None, numbers=[]))
    except OSError as error:
        pytest.skip(f"this kernel gives no io_uring: {error}")
    return rings


@pytest.fixture(params=["one thread", "threads", "io_uring"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "io_uring":
        found: native.Rings = request.getfixturevalue("rings")
        return found.move
    return by_threads if request.param == "threads" else native.Moving.move


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "slots", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def memory(n_pages: int) -> memoryview:
    return memoryview(mmap.mmap(-1, n_pages * PAGE))


def move(
    slots: native.Slots, run: Run, fd: int, pieces: Sequence[tuple[int, memoryview]], *, writes: bool
) -> native.Moving:
    call = slots.moving(
        [buffer for _, buffer in pieces], [at for at, _ in pieces], writes=writes, fd=fd, memory=0,
        request_bytes=5 * PAGE, names=None, numbers=range(len(pieces)),
    )  # fmt: skip
    run(call)
    return call


def test_what_is_written_is_read_wherever_the_buffers_lie(slots: native.Slots, run: Run, fd: int) -> None:
    chance = random.Random(3)
    for _ in range(20):
        places = sorted(chance.sample(range(200), 120))
        whole, back = memory(200), memory(200)
        whole[:] = chance.randbytes(200 * PAGE)
        where = chance.sample(
            range(200), 120
        )  # so that some neighbours in the file are neighbours in memory, and most are not
        if chance.random() < 0.5:
            where.sort()
        for target, writes in ((whole, True), (back, False)):
            pieces = [
                (at * PAGE, target[page * PAGE : (page + 1) * PAGE]) for at, page in zip(places, where, strict=True)
            ]
            move(slots, run, fd, pieces, writes=writes).check()
        for page in where:
            assert back[page * PAGE : (page + 1) * PAGE] == whole[page * PAGE : (page + 1) * PAGE]
        for at, page in zip(places, where, strict=True):
            assert os.pread(fd, PAGE, at * PAGE) == whole[page * PAGE : (page + 1) * PAGE]


def test_a_file_that_ends_too_early_is_an_error(slots: native.Slots, run: Run, fd: int) -> None:
    os.ftruncate(fd, 3 * PAGE + 100)
    target = memory(8)
    call = move(slots, run, fd, [(at * PAGE, target[at * PAGE : (at + 1) * PAGE]) for at in range(8)], writes=False)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        call.check()
    assert bytes(target[: 3 * PAGE]) == bytes(3 * PAGE)


def test_a_descriptor_that_is_closed_is_an_error(slots: native.Slots, run: Run, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "read-only", os.O_RDONLY | os.O_CREAT)
    target = memory(64)
    call = move(slots, run, fd, [(2 * at * PAGE, target[at * PAGE : (at + 1) * PAGE]) for at in range(64)], writes=True)
    os.close(fd)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        call.check()


def test_objects_are_sealed_and_judged_on_the_way(slots: native.Slots, run: Run, fd: int) -> None:
    n_bytes, count = 3 * PAGE, 40
    said = names(b"n" * 16, [bytes([page]) * 32 for page in range(count // 2)], [7, 1])
    source, back = memory(3 * count), memory(3 * count)
    source[:] = random.Random(4).randbytes(len(source))
    numbers = list(reversed(range(count)))
    verdicts = []
    for target, writes in ((source, True), (back, False)):
        if not writes:
            os.pwrite(fd, b"?", 5 * n_bytes + 5000)
        call = slots.moving(
            [target[at * n_bytes : (at + 1) * n_bytes] for at in range(count)], [at * n_bytes for at in range(count)],
            writes=writes, fd=fd, memory=0, request_bytes=1 << 17, names=said, numbers=numbers,
        )  # fmt: skip
        run(call)
        call.check()
        verdicts = call.verdicts
    assert verdicts == [2 if at == 5 else 0 for at in range(count)]
    assert back[n_bytes * 6 :] == source[n_bytes * 6 :]


def test_an_object_without_room_for_a_header_is_refused(slots: native.Slots, run: Run, fd: int) -> None:
    said = names(b"n" * 16, [b"h" * 32], [0])
    call = slots.moving([memory(1)[:4095]], [0], writes=True, fd=fd, memory=0, request_bytes=1, names=said, numbers=[0])
    with pytest.raises(ValueError, match="object 0"):
        native.Moving.move(call)
    assert os.fstat(fd).st_size == 0


def test_memory_is_copied(slots: native.Slots) -> None:
    place, source = memory(64), memory(64)
    source[:] = random.Random(5).randbytes(len(source))
    pieces = [source[at * PAGE : (at + 1) * PAGE] for at in range(64)]
    call = slots.moving(
        pieces, [(63 - at) * PAGE for at in range(64)], writes=True, fd=-1, memory=address(place), request_bytes=1,
        names=None, numbers=range(64),
    )  # fmt: skip
    by_threads(call)
    assert all(place[(63 - at) * PAGE : (64 - at) * PAGE] == piece for at, piece in enumerate(pieces))


def test_what_the_page_cache_has_is_read_and_nothing_else(slots: native.Slots, fd: int) -> None:
    n_bytes, count = 5 * PAGE, 60
    source = random.Random(6).randbytes(n_bytes * count)
    os.pwrite(fd, source, 0)

    def from_cache() -> list[bool]:
        target = memory(5 * count)
        target[:] = b"." * len(target)
        call = slots.moving(
            [target[at * n_bytes : (at + 1) * n_bytes] for at in range(count)], [at * n_bytes for at in range(count)],
            writes=False, fd=fd, memory=0, request_bytes=1 << 17, names=None, numbers=range(count), from_cache=True,
        )  # fmt: skip
        by_threads(call)
        try:
            call.check()
        except OSError as error:
            pytest.skip(f"this kernel does not tell: {error}")
        here = [verdict != native.NOT_CACHED for verdict in call.verdicts]
        for at, is_here in enumerate(here):
            part = slice(at * n_bytes, (at + 1) * n_bytes)
            assert bytes(target[part]) == (source[part] if is_here else b"." * n_bytes)
        return here

    if not any(from_cache()):
        pytest.skip("a layered file system, where the pages are another file's")
    assert all(from_cache())
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if all(from_cache()):
        pytest.skip("this file system is in memory")
    assert not any(from_cache()), "looking brought something in"
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no more than what is read
    for at in range(7, 20, 2):
        os.pread(fd, n_bytes, at * n_bytes)
    os.pread(fd, PAGE, 40 * n_bytes)  # a part is not enough
    here = from_cache()
    assert all(here[7:20:2])
    assert not any(here[25:])


def test_a_descriptor_that_is_closed_has_no_page_cache(slots: native.Slots, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "gone", os.O_RDWR | os.O_CREAT)
    os.close(fd)
    call = slots.moving(
        [memory(1)], [0], writes=False, fd=fd, memory=0, request_bytes=1, names=None, numbers=[0], from_cache=True
    )
    call.move()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        call.check()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        slots.write_out(fd, 0)


def test_queues_are_used_again(slots: native.Slots, rings: native.Rings, fd: int) -> None:
    os.ftruncate(fd, 16 * PAGE)
    target = memory(16)
    pieces = [(at * PAGE, target[at * PAGE : (at + 1) * PAGE]) for at in range(0, 16, 2)]
    for _ in range(200):
        move(slots, rings.move, fd, pieces, writes=False).check()
    assert len(rings._idle) == 1
