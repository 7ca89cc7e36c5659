"""The count of a shared folder against a model: it never says less than the disk holds, and after a scan exactly that."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache_actors.backends import Stored
from hicache_actors.backends.evictor import Evictor, check, unchecked
from hicache_actors.backends.folder import Folder
from hicache_actors.backends.ledger import N_ROWS, N_SHARDS, QUARANTINE, Booking, Ledger, Limits, disk_bytes

CAP_BYTES = 12 * 4096
KEYS = [f"k{i}" for i in range(8)]


def content(key: str, n_bytes: int) -> memoryview:
    return memoryview(random.Random(f"{key} {n_bytes}").randbytes(n_bytes))


def on_disk(root: Path, pattern: str = "objects/*/*") -> int:
    """Bytes of blocks; what vanishes meanwhile is not there."""
    total = 0
    for path in root.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            total += disk_bytes(path.stat().st_size)
    return total


def count_all(folder: Folder) -> list[bool]:
    return [check(folder, row).exact for row in range(N_ROWS)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = opened(tmp_path)
    yield folder
    folder.close()


def opened(root: Path, limits: Limits | None = None) -> Folder:
    folder = Folder(str(root), limits)
    folder.open()
    for row in unchecked(folder):
        check(folder, row)
    return folder


def write(folder: Folder, keys: Sequence[str], n_bytes: int = 5000) -> list[Stored]:
    return folder.write_many(keys, [content(key, n_bytes) for key in keys]).outcomes


def die(folder: Folder) -> None:
    """What a killed process leaves: nothing is settled, its locks are free."""
    os.close(folder.ledger._writers._fd)
    os.close(folder.ledger._fd)


# -- the model --------------------------------------------------------------------------------------------------------


class SharedFolder(RuleBasedStateMachine):
    """Two processes (as two `Folder`s) on one folder, one of which dies and comes back; somebody else interferes."""

    sizes = st.sampled_from([100, 4096, 5000])
    keys = st.sampled_from(KEYS)
    who = st.sampled_from([0, 1])

    @initialize()
    def start(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="hicache-"))
        self.limits = Limits(CAP_BYTES)
        self.folders = [opened(self.root, self.limits) for _ in range(2)]
        self.open: list[tuple[int, Booking, int]] = []  # who, what, bytes reserved
        self.too_low = False  # somebody has added or moved files behind the ledger's back

    def teardown(self) -> None:
        if hasattr(self, "root"):
            for who, booking, _ in self.open:
                self.folders[who].ledger.settle(booking)
            for folder in self.folders:
                folder.close()
            assert list((self.root / "writers").iterdir()) == []
            shutil.rmtree(self.root)

    @rule(who=who, keys=st.lists(keys, max_size=4), n_bytes=sizes)
    def write(self, who: int, keys: list[str], n_bytes: int) -> None:
        written = self.folders[who].write_many(keys, [content(key, n_bytes) for key in keys])
        assert written.error is None
        for i, (key, outcome) in enumerate(zip(keys, written.outcomes, strict=True)):
            assert (outcome is Stored.FAILED) == (i in written.no_room)
            if outcome is not Stored.FAILED:
                assert key in {path.stem for path in self.root.glob("objects/*/*.kv")}

    @rule(who=who, keys=st.lists(keys, min_size=1, max_size=3, unique=True), at=st.integers(0, 2))
    def write_in_vain(self, who: int, keys: list[str], at: int) -> None:
        """A reserve that is given back: the disk fails at one object, and so would the rest."""
        failing = content("full", 5000)
        calls = iter(range(100))

        def write(fd: int, data: memoryview) -> int:
            if next(calls) == at:
                raise OSError(errno.ENOSPC, "no space left")
            return os.pwrite(fd, data, 0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hicache_actors.backends.file_batches.os.write", write)
            self.folders[who].write_many(keys, [failing] * len(keys))

    @rule(who=who, key=keys, n_bytes=sizes)
    def read(self, who: int, key: str, n_bytes: int) -> None:
        buffer = memoryview(bytearray(n_bytes))
        [length] = self.folders[who].read_many([key], [buffer]).lengths
        assert length < 0 or buffer in (content(key, n_bytes), content("full", n_bytes))

    @rule(who=who, keys=st.lists(keys, max_size=3))
    def delete(self, who: int, keys: list[str]) -> None:
        self.folders[who].delete_many(keys)
        assert not {path.stem for path in self.root.glob("objects/*/*.kv")} & set(keys)

    @rule(who=who, key=keys)
    def quarantine(self, who: int, key: str) -> None:
        there = key in {path.stem for path in self.root.glob("objects/*/*.kv")}
        assert self.folders[who].quarantine(key) == there

    @rule(who=who, wanted_bytes=st.integers(1, CAP_BYTES))
    def evict(self, who: int, wanted_bytes: int) -> None:
        evictor = Evictor(self.folders[who])
        assert evictor.elect()
        assert not Evictor(self.folders[1 - who]).elect()
        step = evictor.free(wanted_bytes, max_scans=3 * N_ROWS)
        evictor.resign()
        assert step.exhausted or not step.excess_bytes
        assert step.exhausted <= bool(self.open)  # only what is reserved cannot be evicted

    @precondition(lambda self: len(self.open) < 3)
    @rule(who=who, row=st.integers(0, N_SHARDS - 1), n_bytes=sizes)
    def reserve(self, who: int, row: int, n_bytes: int) -> None:
        before = self.folders[who].ledger.look()
        booking = self.folders[who].ledger.reserve([(row, disk_bytes(n_bytes))])
        fits = before.bytes + before.quarantine_bytes + disk_bytes(n_bytes) <= CAP_BYTES
        assert booking.granted == fits
        self.open.append((who, booking, booking.reserved_bytes))

    @precondition(lambda self: self.open)
    @rule()
    def abort(self) -> None:
        who, booking, _ = self.open.pop(0)
        for row in booking.rows:
            booking.change(row, -booking.reserved_bytes, -1)
        self.folders[who].ledger.settle(booking)

    @rule(who=who)
    def die_and_come_back(self, who: int) -> None:
        die(self.folders[who])
        self.open = [entry for entry in self.open if entry[0] != who]
        self.folders[who] = opened(self.root, self.limits)

    @rule(at=st.integers(0, 7))
    def somebody_removes_a_file(self, at: int) -> None:
        paths = sorted(self.root.glob("objects/*/*.kv"))
        if paths:
            paths[at % len(paths)].unlink()

    @rule(who=who)
    def count(self, who: int) -> None:
        exact = count_all(self.folders[who])
        busy = {row for _, booking, _ in self.open for row in booking.rows}
        assert {row for row, ok in enumerate(exact) if not ok} == busy
        if not busy:
            usage = self.folders[who].ledger.usage
            assert usage.bytes == on_disk(self.root)
            assert usage.objects == len(list(self.root.glob("objects/*/*")))
            assert usage.quarantine_bytes == on_disk(self.root, "quarantine/*")

    @invariant()
    def never_too_low_and_never_beyond_the_cap(self) -> None:
        usage = self.folders[0].ledger.look()
        reserved = sum(n_bytes for _, _, n_bytes in self.open)
        assert usage.bytes >= on_disk(self.root) + reserved
        assert usage.quarantine_bytes >= on_disk(self.root, "quarantine/*")
        assert on_disk(self.root, "objects/*/*") + on_disk(self.root, "quarantine/*") <= CAP_BYTES


SharedFolder.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestSharedFolder = SharedFolder.TestCase


@pytest.mark.slow
def test_shared_folder_at_length() -> None:
    run_state_machine_as_test(SharedFolder, settings=settings(max_examples=500, stateful_step_count=50))


# -- single facts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["delete", "quarantine", "evict", "outside", "torn", "replaced"])
def test_every_way_of_removal_is_counted(tmp_path: Path, folder: Folder, way: str) -> None:
    """Field report B087: a removal that is not counted makes the store full for ever."""
    keys = [f"page{i}" for i in range(20)]
    for _ in range(3):
        assert write(folder, keys) == [Stored.WRITTEN] * 20
        assert folder.ledger.look()[:2] == (20 * 8192, 20)
        if way == "delete":
            folder.delete_many(keys)
        elif way == "quarantine":
            assert all(folder.quarantine(key) for key in keys)
        elif way == "evict":
            for row in range(N_SHARDS):
                folder.evict(row, folder.look(row).items, 0)
        elif way == "outside":
            for path in tmp_path.glob("objects/*/*.kv"):
                path.unlink()
            assert all(count_all(folder))
        elif way == "torn":
            found = folder.read_many(keys, [memoryview(bytearray(4999)) for _ in keys])
            assert found.lengths == [-2] * 20
        else:
            for path in tmp_path.glob("objects/*/*.kv"):
                path.write_bytes(b"torn")
            assert all(count_all(folder))
            assert write(folder, keys) == [Stored.WRITTEN] * 20
            folder.delete_many(keys)
        assert folder.ledger.look()[:2] == (0, 0)
        assert folder.ledger.look().quarantine_bytes == on_disk(tmp_path, "quarantine/*")


def test_a_dead_writer_is_counted_out(tmp_path: Path, folder: Folder) -> None:
    dead = opened(tmp_path)
    write(dead, ["a"])
    dead.ledger.reserve([(3, 8192), (4, 4096)])
    (tmp_path / "objects" / "03" / f".{dead.ledger.instance}.9.tmp").write_bytes(b"half")
    die(dead)
    assert folder.ledger.look()[:2] == (5 * 4096, 3)
    later = opened(tmp_path)
    assert folder.ledger.look()[:2] == (8192, 1)
    assert on_disk(tmp_path) == 8192
    later.close()


def test_what_is_under_way_elsewhere_keeps_a_scan_from_counting(tmp_path: Path, folder: Folder) -> None:
    other = opened(tmp_path)
    booking = other.ledger.reserve([(3, 8192)])
    assert [row for row, exact in enumerate(count_all(folder)) if not exact] == [3]
    assert folder.ledger.look().bytes == 8192
    other.ledger.settle(booking)  # said to be written
    watched = folder.ledger.watch(3)
    other.ledger.settle(other.ledger.reserve([(3, 0)]))  # a change begins and ends during the scan
    assert not folder.ledger.reconcile(3, watched, folder.look(3).counted(), 0)
    assert all(count_all(folder))
    assert folder.ledger.look().bytes == 0
    other.close()


def test_a_folder_without_a_count_is_counted_before_anything_is_added(tmp_path: Path) -> None:
    first = opened(tmp_path)
    write(first, KEYS)
    first.close()
    (tmp_path / "usage").unlink()
    capped = Folder(str(tmp_path), Limits(10 * 8192))
    capped.open()
    assert write(capped, ["more"]) == [Stored.FAILED]
    assert all(check(capped, row).exact for row in unchecked(capped))
    assert write(capped, ["more", "still", "beyond"]) == [Stored.WRITTEN, Stored.WRITTEN, Stored.FAILED]
    capped.close()


def test_a_new_count_takes_over_what_others_change(tmp_path: Path) -> None:
    """Rather too much than too little, until it is quiet."""
    first = opened(tmp_path)
    write(first, ["a", "b"])
    (tmp_path / "usage").unlink()
    rows = [row for row in range(N_SHARDS) if first.look(row).items]
    booking = first.ledger.reserve([(row, 4096) for row in rows])
    assert [row for row, exact in enumerate(count_all(first)) if not exact] == rows
    assert first.ledger.look().bytes == 2 * 8192 + len(rows) * 4096
    first.ledger.settle(booking)
    assert all(count_all(first))
    assert first.ledger.look().bytes == 2 * 8192
    first.close()


def test_somebodys_file_in_the_place_of_the_count(tmp_path: Path) -> None:
    (tmp_path / "usage").write_text("how to use this folder")
    with pytest.raises(FileExistsError, match="not a count of this store"):
        Folder(str(tmp_path)).open()
    assert (tmp_path / "usage").read_text() == "how to use this folder"


def test_a_stopped_process_that_holds_the_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it for ever; what was not counted then is counted with the next change."""
    monkeypatch.setattr("hicache_actors.backends.ledger._LOCK_TIMEOUT_S", 0.01)
    ledger = Ledger(str(tmp_path), Limits())
    ledger.open()
    booking = ledger.reserve([(1, 4096), (2, 4096)])
    stopped = os.open(tmp_path / "usage", os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    booking.change(1, -4096, -1)
    ledger.settle(booking)
    with pytest.raises(TimeoutError, match="held a lock"):
        ledger.reserve([(3, 4096)])
    os.close(stopped)
    assert ledger.look() == (4096, 1, 0)
    ledger.close()


def test_a_writer_that_hangs_is_no_dead_one(tmp_path: Path) -> None:
    """Closing does not give up its lock before its last write has ended."""
    hung = opened(tmp_path)
    booking = hung.ledger.reserve([(3, 4096)])
    hung.close()
    other = opened(tmp_path)
    assert other.ledger.is_alive(hung.ledger.instance)
    hung.ledger.settle(booking)
    assert not other.ledger.is_alive(hung.ledger.instance)
    other.close()
    assert list((tmp_path / "writers").iterdir()) == []


def test_the_quarantine_goes_first(tmp_path: Path) -> None:
    folder = opened(tmp_path, Limits(6 * 8192))
    write(folder, ["a", "b", "c", "d", "e"])
    folder.quarantine("e")
    folder.quarantine("d")
    evictor = Evictor(folder)
    assert evictor.elect()
    step = evictor.free(3 * 8192, max_scans=1000)
    evictor.resign()
    assert step == (0, False, 2, 2 * 8192)
    assert folder.look(QUARANTINE).items == []
    assert folder.leading(["a", "b", "c"]) == 3
    folder.close()
