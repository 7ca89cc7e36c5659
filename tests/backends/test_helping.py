"""Two threads at one batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache_actors.backends import helping
from hicache_actors.backends.backend import Stored
from hicache_actors.backends.folder import Folder
from hicache_actors.backends.helping import share

MIB = 1 << 20


def test_alone_all_is_done_here() -> None:
    done: list[int] = []
    items = iter(range(5))
    share(lambda: done.extend(items), None)
    share(lambda: done.append(99), lambda work: None)
    assert done == [0, 1, 2, 3, 4, 99]


def test_who_has_begun_is_waited_for() -> None:
    begun, done = threading.Event(), threading.Event()
    items = iter(range(2))
    who: dict[int, int] = {}

    def work() -> None:
        for item in items:
            who[item] = threading.get_ident()
            if item == 0:
                assert begun.wait(10)
                done.set()
            else:
                begun.set()
                assert done.wait(10)

    with ThreadPoolExecutor(1) as pool:
        share(work, lambda work: pool.submit(work))
    assert sorted(who) == [0, 1]
    assert len(set(who.values())) == 2


def test_who_has_not_begun_is_let_go() -> None:
    never: Future[None] = Future()
    share(lambda: None, lambda work: never)
    assert never.cancelled()


def test_an_error_of_the_helper_is_raised_here() -> None:
    broken: Future[None] = Future()
    broken.set_exception(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        share(lambda: None, lambda work: broken)


def test_a_large_batch_is_written_once_by_two_threads(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.open()
    keys = [f"key_{number:02x}" for number in range(24)]
    buffers = [memoryview(bytes([number]) * (MIB // 4)) for number in range(24)]
    asked: list[Callable[[], None]] = []

    with ThreadPoolExecutor(1) as pool:

        def help(work: Callable[[], None]) -> Future[None]:
            asked.append(work)
            return pool.submit(work)

        written = folder.write_many(keys, buffers, help)
        small = folder.write_many(["small"], [memoryview(b"small")], help)
    assert written.outcomes == [Stored.WRITTEN] * 24
    assert small.outcomes == [Stored.WRITTEN]
    assert len(asked) == 1
    again = [memoryview(bytearray(MIB // 4)) for _ in keys]
    assert folder.read_many(keys, again).lengths == [MIB // 4] * 24
    assert [bytes(buffer) for buffer in again] == [bytes(buffer) for buffer in buffers]
    assert folder.ledger.look().objects == 25
    folder.close()


def test_help_is_worth_asking_for_with_large_batches_while_cores_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helping, "_CORES", 2)
    batches = helping.Batches()

    def help(work: Callable[[], None]) -> Future[None] | None:
        return None

    with batches.one(16 * MIB, help) as first, batches.one(16 * MIB, help) as second:
        assert (first, second) == (help, help)
        with batches.one(16 * MIB, help) as third:
            assert third is None
    with batches.one(MIB, help) as small, batches.one(16 * MIB, None) as alone:
        assert (small, alone) == (None, None)
