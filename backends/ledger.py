"""What a folder holds, counted by all processes that share it.

``<root>/usage`` has one row per shard (and one for the quarantine): bytes, objects, a lower bound of the oldest mtime, and a
number that every change raises.  It is read and written under its lock, which is held for microseconds.

Whoever adds objects first *reserves* their bytes and *settles* when it is done, giving back what it did not use; whoever
removes objects reserves nothing, removes, and gives back.  So the rows never say less than the disk holds, and a cap is never
passed.  Between the two the rows count as being changed (see `writers`).  A writer that died in between has left them too high:
they are marked for a scan.  A scan sets a row only if nobody changed it meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from hicache_actors.backends.posix import lock, make_folder, unlock
from hicache_actors.backends.writers import Writers

N_SHARDS: Final = 64
QUARANTINE: Final = N_SHARDS  #: the row of the quarantine
N_ROWS: Final = N_SHARDS + 1

NEW: Final = -2  #: in the place of an oldest mtime: never counted, the row may say too little
STALE: Final = -1  #: ... a writer died over it, the row may say too much
NOTHING: Final = 2**63 - 1  #: ... the shard is empty

_BLOCK_BYTES: Final = 4096
_LOCK_TIMEOUT_S: Final = 2.0
_CLOCK_SLACK_NS: Final = 20_000_000  # the kernel stamps files with a clock that ticks every few ms
_MAGIC_BYTES: Final = b"HICUSAGE"
_MAGIC: Final = int.from_bytes(_MAGIC_BYTES, sys.byteorder)
_HEAD: Final = 2  # magic, next row of the rolling check
_BYTES, _OBJECTS, _OLDEST, _CHANGES = (_HEAD + i * N_ROWS for i in range(4))
_LEDGER_BYTES: Final = 8 * (_HEAD + 4 * N_ROWS)


def disk_bytes(n_bytes: int) -> int:
    """What a file of ``n_bytes`` costs on the disk: whole blocks."""
    return -(-n_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


class Limits(NamedTuple):
    """For the whole folder, over all processes.  None: no cap."""

    max_bytes: int | None = None
    min_free_bytes: int = 0


class Usage(NamedTuple):
    """Objects and their bytes on the disk, as the ledger has them; the quarantine's bytes count for a cap as well."""

    bytes: int
    objects: int
    quarantine_bytes: int


class Counted(NamedTuple):
    """One row as a scan found it."""

    bytes: int
    objects: int
    oldest_ns: int


class Booking:
    """Changes under way: ``granted`` of the items asked for.  Any thread may `change` it; give it to `Ledger.settle` in the end."""

    def __init__(self, items: Sequence[tuple[int, int]]) -> None:
        self.granted = len(items)
        self.rows = [row for row, _ in items]
        self.reserved_bytes = sum(n_bytes for _, n_bytes in items)
        self.changes: list[tuple[int, int, int]] = []  # row, bytes, objects
        self.oldest: dict[int, int] = {}  # row: lower bound after the change

    def change(self, row: int, n_bytes: int, n_objects: int) -> None:
        """Count ``n_bytes`` (already in blocks, negative for what is gone) when the booking is settled."""
        self.changes.append((row, n_bytes, n_objects))


class Ledger:
    """Any thread; every call may block for the time of a lock (OSError after 2 s).  Follows the folder when it is removed or
    exchanged while running."""

    def __init__(self, root: str, limits: Limits) -> None:
        self.limits = limits
        self.usage = Usage(0, 0, 0)  #: as of the last call of this process
        self.uncounted = False  #: some rows are NEW: nothing may be added under a cap
        self._path = os.path.join(root, "usage")
        self._writers = Writers(root, N_ROWS)
        self._mutex = threading.Lock()
        self._fd = -1
        self._inode = (0, 0)
        self._reserved_bytes = 0  # not yet settled
        self._unsettled: list[Booking] = []
        self._closing = False

    # -- life ---------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a life of its own, and mark what dead writers left behind."""
        with self._transaction() as ledger:
            for instance, rows in self._writers.dead():
                for row in rows:
                    if ledger[_OLDEST + row] != NEW:
                        ledger[_OLDEST + row] = STALE
                os.pwrite(self._fd, ledger, 0)  # marked before the reason to mark is gone
                self._writers.forget(instance)

    def close(self) -> None:
        """Idempotent.  A write that hangs keeps our lock until it ends, so that nobody takes its file for an orphan."""
        with self._mutex:
            self._closing = True
            self._leave()

    @property
    def instance(self) -> str:
        return self._writers.instance

    def is_alive(self, instance: str) -> bool:
        """Does the writer of that name live?"""
        return self._writers.is_alive(instance)

    # -- changes ------------------------------------------------------------------------------------------------------

    def reserve(self, items: Sequence[tuple[int, int]]) -> Booking:
        """Begin changes of rows: (row, bytes to be added) each, 0 bytes for a removal.

        Grants the leading items that fit under the limits, and charges them at once.
        """
        with self._transaction() as ledger:
            room = self._room(ledger)
            granted = 0
            for _, n_bytes in items:
                room -= n_bytes
                if room < 0 < n_bytes:
                    break
                granted += 1
            booking = Booking(items[:granted])
            self._writers.begin(booking.rows, needed=booking.reserved_bytes > 0)
            self._reserved_bytes += booking.reserved_bytes
            now_ns = time.time_ns() - _CLOCK_SLACK_NS
            for row, n_bytes in items[:granted]:
                ledger[_CHANGES + row] += 1
                if n_bytes:
                    ledger[_BYTES + row] += n_bytes
                    ledger[_OBJECTS + row] += 1
                    if ledger[_OLDEST + row] > now_ns:
                        ledger[_OLDEST + row] = now_ns
        return booking

    def settle(self, booking: Booking) -> None:
        """End the changes of a booking.  Never raises: what cannot be written now is written with the next call."""
        with self._mutex:
            self._unsettled.append(booking)
        with contextlib.suppress(OSError), self._transaction():
            pass  # every transaction begins with what is unsettled

    # -- counting -----------------------------------------------------------------------------------------------------

    def look(self) -> Usage:
        with self._transaction():
            pass
        return self.usage

    def excess(self, wanted_bytes: int) -> int:
        """How many bytes must go before ``wanted_bytes`` more may come."""
        with self._transaction() as ledger:
            return max(0, wanted_bytes - self._room(ledger))

    def oldest(self) -> list[int]:
        """By row: lower bound of its oldest mtime (ns), or NEW, STALE, NOTHING."""
        with self._transaction() as ledger:
            return ledger[_OLDEST:_CHANGES].tolist()

    def next_row(self) -> int:
        """Rows in turn, over all processes."""
        with self._transaction() as ledger:
            row = ledger[1] % N_ROWS
            ledger[1] = row + 1
            return row

    def watch(self, row: int) -> int | None:
        """To be called before a scan of a row -> what to show to `reconcile`; None while somebody changes it."""
        with self._transaction() as ledger:
            return None if self._writers.are_changing(row) else ledger[_CHANGES + row]

    def reconcile(self, row: int, watched: int | None, found: Counted, now_ns: int) -> bool:
        """Set a row to what a scan found that began at ``now_ns`` -> whether it was quiet enough to be exact.

        Otherwise only a NEW row takes it over, on top of what is charged: rather too much than too little.
        """
        with self._transaction() as ledger:
            quiet = watched is not None and ledger[_CHANGES + row] == watched
            if quiet:
                ledger[_BYTES + row], ledger[_OBJECTS + row] = found.bytes, found.objects
                ledger[_OLDEST + row] = found.oldest_ns
            else:
                if ledger[_OLDEST + row] == NEW:
                    ledger[_BYTES + row] += found.bytes
                    ledger[_OBJECTS + row] += found.objects
                ledger[_OLDEST + row] = min(found.oldest_ns, now_ns - _CLOCK_SLACK_NS)
            return quiet

    # -- parts --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[array[int]]:
        if not self._mutex.acquire(timeout=_LOCK_TIMEOUT_S):
            raise TimeoutError("the ledger of this process is busy")
        try:
            self._lock()
            try:
                ledger = self._load()
                self._settle_all(ledger)
                before = ledger[:]
                yield ledger
                if ledger != before:
                    os.pwrite(self._fd, ledger, 0)
                n_bytes = ledger[_BYTES:_OBJECTS]
                quarantine_bytes = n_bytes.pop()
                self.usage = Usage(sum(n_bytes), sum(ledger[_OBJECTS : _OBJECTS + N_SHARDS]), quarantine_bytes)
                self.uncounted = NEW in ledger[_OLDEST:_CHANGES]
            finally:
                unlock(self._fd)
                if self._closing:
                    self._leave()
        finally:
            self._mutex.release()

    def _lock(self) -> None:
        """Lock the ledger that is there now, which need not be the one of the last call."""
        moved = False
        while True:
            if self._fd < 0:
                moved = True
                make_folder(os.path.dirname(self._path))
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                found = os.fstat(self._fd)
                self._inode = found.st_dev, found.st_ino
            lock(self._fd, _LOCK_TIMEOUT_S)
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(self._path)
                if (found.st_dev, found.st_ino) == self._inode:
                    break
            os.close(self._fd)
            self._fd = -1
        try:
            self._writers.claim(anew=moved)
        except BaseException:
            unlock(self._fd)
            raise

    def _load(self) -> array[int]:
        ledger = array("q")
        data = os.pread(self._fd, _LEDGER_BYTES, 0)
        if len(data) == _LEDGER_BYTES:
            ledger.frombytes(data)
            if ledger[0] == _MAGIC:
                return ledger
        if data.strip(b"\0") and not data.startswith(_MAGIC_BYTES):  # empty or cut off by a power failure it is ours
            raise FileExistsError(
                errno.EEXIST, "not a count of this store; once it is removed, all is counted anew", self._path
            )
        ledger = array("q", bytes(_LEDGER_BYTES))
        ledger[0] = _MAGIC
        for row in range(N_ROWS):
            ledger[_OLDEST + row] = NEW
        os.pwrite(self._fd, ledger, 0)
        return ledger

    def _settle_all(self, ledger: array[int]) -> None:
        if not self._unsettled:
            return
        for booking in self._unsettled:
            for row in booking.rows:
                ledger[_CHANGES + row] += 1
            now_ns = time.time_ns() - _CLOCK_SLACK_NS
            for row, n_bytes, n_objects in booking.changes:
                self._add(ledger, row, n_bytes, n_objects, now_ns)
            for row, oldest_ns in booking.oldest.items():
                ledger[_OLDEST + row] = oldest_ns
        os.pwrite(self._fd, ledger, 0)
        for booking in self._unsettled:
            self._writers.end(booking.rows)
            self._reserved_bytes -= booking.reserved_bytes
        self._unsettled.clear()

    def _add(self, ledger: array[int], row: int, n_bytes: int, n_objects: int, now_ns: int) -> None:
        """What others did to the folder may have made a row too low: it never becomes negative."""
        ledger[_BYTES + row] = max(0, ledger[_BYTES + row] + n_bytes)
        ledger[_OBJECTS + row] = max(0, ledger[_OBJECTS + row] + n_objects)
        if n_objects > 0:
            ledger[_OLDEST + row] = min(ledger[_OLDEST + row], 0 if row == QUARANTINE else now_ns)

    def _room(self, ledger: array[int]) -> int:
        """Bytes that may be added; negative if there is too much already."""
        room = NOTHING
        if self.limits.max_bytes is not None:
            uncounted = NEW in ledger[_OLDEST:_CHANGES]
            room = -1 if uncounted else self.limits.max_bytes - sum(ledger[_BYTES:_OBJECTS])
        if self.limits.min_free_bytes:
            disk = os.fstatvfs(self._fd)
            free_bytes = disk.f_bavail * disk.f_frsize - self._reserved_bytes
            room = min(room, free_bytes - self.limits.min_free_bytes)
        return room

    def _leave(self) -> None:
        if self._writers.leave() and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
