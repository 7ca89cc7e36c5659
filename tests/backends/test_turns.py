"""How many threads read at once: one, of small objects that come from memory; all, of what a disk is waited for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache_actors.backends import turns as turns_module
from hicache_actors.backends.folder import Folder
from hicache_actors.backends.turns import Turns

SMALL, LARGE = 64 << 10, 1 << 20


def goes_beside(turns: Turns, object_bytes: int, other_bytes: int = SMALL) -> bool:
    """Whether a read can begin while another one runs."""
    begun = threading.Event()

    def read() -> None:
        with turns.turn(1, object_bytes):
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        with turns.turn(1, other_bytes):
            reading = pool.submit(read)
            beside = begun.wait(0.5)
        reading.result()
    assert begun.is_set()
    return beside


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "_PATIENCE_S", 60.0)


def test_at_first_all_go_at_once() -> None:
    assert goes_beside(Turns(), SMALL)


def test_what_comes_from_memory_is_read_by_one() -> None:
    turns = Turns()
    turns.saw(disk=False)
    assert goes_beside(turns, SMALL, LARGE)
    turns.saw(disk=False)
    assert not goes_beside(turns, SMALL)
    turns.saw(disk=False)
    assert goes_beside(turns, LARGE)


def test_what_comes_from_a_disk_is_read_by_all_again() -> None:
    turns = Turns()
    turns.saw(disk=False)
    turns.saw(disk=True)
    assert goes_beside(turns, SMALL)


@pytest.mark.parametrize(("memory_s", "beside"), [(1000.0, False), (-1.0, True)])
def test_a_slow_read_counts_as_a_disk(monkeypatch: pytest.MonkeyPatch, memory_s: float, beside: bool) -> None:
    monkeypatch.setattr(turns_module, "_MEMORY_S", memory_s)
    turns = Turns()
    turns.saw(disk=not beside)
    with turns.turn(1, SMALL):
        pass
    assert goes_beside(turns, SMALL) is beside


def test_nobody_waits_for_a_read_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "_PATIENCE_S", 0.001)
    turns = Turns()
    for _ in range(2):  # who went without a turn gives none back
        turns.saw(disk=False)
        assert goes_beside(turns, SMALL)


def test_threads_that_read_a_folder_get_what_is_theirs(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.open()
    keys = [f"key_{number:02x}" for number in range(64)]
    folder.write_many(keys, [memoryview(key.encode() * 512) for key in keys])

    def read(first: int) -> bool:
        part = keys[first : first + 8]
        buffers = [memoryview(bytearray(3072)) for _ in part]
        lengths = folder.read_many(part, buffers).lengths
        return lengths == [3072] * 8 and [bytes(b) for b in buffers] == [key.encode() * 512 for key in part]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, [*range(0, 64, 8)] * 20))
    folder.close()
