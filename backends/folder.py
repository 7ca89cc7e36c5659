"""The blocking half of `FileBackend`: one folder of objects, through plain system calls.  Every function may run in any thread.

::

    <root>/objects/<shard>/<key>.kv               one object; <shard> is two hex digits of a hash of the key
    <root>/objects/<shard>/.<instance>.<n>.tmp    an object being written, where it needs a name before it is whole
    <root>/quarantine/<key>.<time_ns>.bad         bad objects, the newest `QUARANTINE_KEEP` of them, to be looked at
    <root>/usage, <root>/writers/<instance>       what the folder holds, and who is changing it (`ledger`)
    <root>/evictor                                locked by the one process that evicts (`evictor`)

Whatever else lies in the root or in one of its folders is not ours: it is neither read nor removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

from hicache_actors.backends.backend import Stored
from hicache_actors.backends.file_batches import (
    FAILED,
    TORN,
    FilesRead,
    Made,
    Making,
    NewFile,
    NewFiles,
    Outcome,
    count_leading,
    identity_of,
    is_native,
    make_file,
    place,
    read_files,
    unlink,
)
from hicache_actors.backends.helping import Batches, Help, share
from hicache_actors.backends.ledger import QUARANTINE, Booking, Ledger, Limits, disk_bytes
from hicache_actors.backends.objects import Expected, Verdict
from hicache_actors.backends.posix import Publisher, make_folder
from hicache_actors.backends.presence import TOUCH_AFTER_S, absent, is_still, length_of
from hicache_actors.backends.shards import SHARDS, Identity, Item, Scan, keys_in, scan
from hicache_actors.backends.turns import Turns
from hicache_actors.cuda_ext.native.buffers import pick, sizes
from hicache_actors.memory.shapes import BATCH_PAGES

QUARANTINE_KEEP: Final = 64
_WORTH_HELP_LOOKUPS: Final = 128

T = TypeVar("T")


class Found(NamedTuple):
    """Outcome of `read_many`: per key the length read, or MISSING, TORN (it has been quarantined), FAILED; which files were read;
    the last error; per key what was found of what was expected, None if that was nothing, or the object was not read."""

    lengths: list[int]
    identities: dict[str, tuple[int, int]]
    error: OSError | None
    verdicts: list[Verdict | None]


class Written(NamedTuple):
    """``no_room``: the positions, in order, of what did not fit under the folder's limits."""

    outcomes: list[Stored]
    no_room: list[int]
    error: OSError | None


class Folder:
    batch_pages = BATCH_PAGES  #: see `Backend.batch_pages`

    def __init__(self, root: str, limits: Limits | None = None) -> None:
        self.root = root
        self.ledger = Ledger(root, limits or Limits())
        self._objects = os.fsencode(os.path.join(root, "objects"))
        self._shards = [b"%s/%s" % (self._objects, shard.encode()) for shard in SHARDS]
        self._quarantine = os.fsencode(os.path.join(root, "quarantine"))
        self._instance = self.ledger.instance.encode()
        self._publisher = Publisher()
        self._turns = Turns(lambda: not is_native())
        self._number = 0  # of the next temporary file
        self._numbering = threading.Lock()
        self._batches = Batches()

    def open(self) -> None:
        """Make what is missing; OSError where this process cannot write, or the file system has no locks."""
        for folder in (*self._shards, self._quarantine):
            make_folder(os.fsdecode(folder))
        self.ledger.open()

    def close(self) -> None:
        """Idempotent."""
        self.ledger.close()

    # -- objects ------------------------------------------------------------------------------------------------------

    def leading(self, keys: Sequence[str], help: Help | None = None) -> int:
        """Length of the leading run of ``keys`` that are there; of many with another thread's ``help``."""
        paths = place(self._objects, keys)[1]
        if len(paths) < _WORTH_HELP_LOOKUPS:
            return count_leading(paths)
        return count_leading(paths, help) if count_leading(paths[:1]) else 0

    def lengths(self, keys: Sequence[str]) -> list[int | None]:
        """Bytes of each object; None where there is none."""
        return [*map(length_of, place(self._objects, keys)[1])]

    def read_many(
        self,
        keys: Sequence[str],
        buffers: Sequence[memoryview],
        expected: Expected | None = None,
        help: Help | None = None,
        *,
        touch: bool = True,
    ) -> Found:
        """Without ``touch`` it counts as no use.  A large batch is read with another thread's ``help``."""
        object_bytes = len(buffers[0]) if buffers else 0
        touch_before_s = time.time() - TOUCH_AFTER_S if touch else 0.0
        with (
            self._turns.turn(len(keys), object_bytes),
            self._batches.one(object_bytes * len(keys), help) as helper,
        ):
            return self._read_all(keys, buffers, expected, touch_before_s, helper)

    def write_many(
        self,
        keys: Sequence[str],
        buffers: Sequence[memoryview],
        help: Help | None = None,
        expected: Expected | None = None,
        numbers: Sequence[int] | None = None,
    ) -> Written:
        """Store what is not there yet, in order, as far as there is room; a large batch with another thread's ``help``.

        If something is ``expected``, what is written is sealed as the objects of these ``numbers``; of all, if they are not given.
        """
        rows, paths = place(self._objects, keys)
        costs = [*map(disk_bytes, sizes(buffers).tolist())]
        outcomes = [Stored.FAILED] * len(keys)
        try:
            missing = absent(paths, buffers, outcomes)
            if not missing:
                return Written(outcomes, [], None)
            booking = self.ledger.reserve([(rows[i], costs[i]) for i in missing])
        except OSError as error:
            return Written(outcomes, [], error)
        granted, no_room = missing[: booking.granted], missing[booking.granted :]
        if len(granted) < len(keys):
            paths, buffers = [paths[i] for i in granted], pick(buffers, granted)
        files = self._new_files(paths, buffers)
        last_error: OSError | None = None
        try:
            numbers = range(len(keys)) if numbers is None else numbers
            with self._batches.one(booking.reserved_bytes, help) as helper:
                outcomes_made = self._make(files, expected, [numbers[i] for i in granted], helper)
            for at, (i, made) in enumerate(zip(granted, outcomes_made, strict=True)):
                if made[0] is Made.WRITTEN:
                    outcomes[i] = Stored.WRITTEN
                    continue
                row = rows[i]
                outcomes[i], failure = self._stored(files.one(at), row, made, booking)
                last_error = failure or last_error
                if outcomes[i] is not Stored.WRITTEN:
                    booking.change(row, -costs[i], -1)
        finally:
            self.ledger.settle(booking)
        return Written(outcomes, no_room, last_error)

    def delete_many(self, keys: Sequence[str]) -> int:
        rows, paths = place(self._objects, keys)
        booking = self.ledger.reserve([(row, 0) for row in rows])
        try:
            return sum(self._remove(path, row, booking) for row, path in zip(rows, paths, strict=True))
        finally:
            self.ledger.settle(booking)

    def quarantine(self, key: str, identity: Identity | None = None) -> bool:
        """Rename the object out of sight -> whether there was one.

        With ``identity`` only that very file: a good one that was written under the name meanwhile stays.
        """
        [row], [path] = place(self._objects, [key])
        if not is_still(path, identity):
            return False
        target = b"%s/%s.%d.bad" % (self._quarantine, key.encode(), time.time_ns())
        booking = self.ledger.reserve([(row, 0), (QUARANTINE, 0)])
        try:
            try:
                moved = os.stat(path, follow_symlinks=False)
                _with_folder(self._quarantine, lambda: os.rename(path, target))
            except FileNotFoundError:
                return False
            # If it is not there any more, somebody who made room in the quarantine took it at once, and has booked its going.
            with suppress(FileNotFoundError):
                moved = os.stat(target, follow_symlinks=False)
            if identity is not None and identity_of(moved) != identity:
                self._put_back(target, path)  # exchanged in the instant between look and rename
                return False
            for row, sign in zip(booking.rows, (-1, 1), strict=True):
                booking.change(row, sign * disk_bytes(moved.st_size), sign)
        finally:
            self.ledger.settle(booking)
        self._trim_quarantine()
        return True

    # -- shards -------------------------------------------------------------------------------------------------------

    def keys(self, row: int) -> list[str]:
        """The objects of one shard."""
        return keys_in(os.fsdecode(self._shards[row]), row)

    def look(self, row: int) -> Scan:
        """Scan one shard, or the quarantine."""
        return scan(os.fsdecode(self._folder_of(row)), row, self.ledger.is_alive)

    def remove_orphans(self, row: int, names: Iterable[str]) -> int:
        """Temporary files of dead writers -> how many.  Nothing is given back: whoever scans counts what is left."""
        return sum(unlink(self._file(row, name)) for name in names)

    def evict(self, row: int, victims: Sequence[Item], oldest_left_ns: int) -> tuple[int, int]:
        """Remove files of one shard that nobody has used since the scan -> how many, and how many bytes.

        ``oldest_left_ns``: mtime of the oldest that stays.
        """
        n_objects = n_bytes = 0
        booking = self.ledger.reserve([(row, 0)])
        try:
            for victim in victims:
                path = self._file(row, victim.name)
                if is_still(path, victim.identity) and unlink(path):
                    n_objects += 1
                    n_bytes += disk_bytes(victim.n_bytes)
            booking.oldest[row] = oldest_left_ns
        finally:
            booking.change(row, -n_bytes, -n_objects)
            self.ledger.settle(booking)
        return n_objects, n_bytes

    # -- how bytes move: to be overridden -----------------------------------------------------------------------------

    def _make(
        self, files: NewFiles, expected: Expected | None, numbers: Sequence[int], help: Help | None
    ) -> Sequence[Outcome]:
        """Write temporary files and give them their names; what is ``expected`` is sealed before, by its number."""
        making = Making(files, self._publisher, expected, numbers)
        share(making.work, help)
        return making.outcomes()

    def _read_files(
        self,
        paths: Sequence[bytes],
        buffers: Sequence[memoryview],
        touch_before_s: float,
        expected: Expected | None,
        help: Help | None,
    ) -> FilesRead:
        """See `read_files`."""
        return read_files(paths, buffers, touch_before_s, expected, help)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _read_all(
        self,
        keys: Sequence[str],
        buffers: Sequence[memoryview],
        expected: Expected | None,
        touch_before_s: float,
        help: Help | None,
    ) -> Found:
        read = self._read_files(place(self._objects, keys)[1], buffers, touch_before_s, expected, help)
        if min(read.lengths, default=0) >= 0:
            return Found(read.lengths, dict(zip(keys, read.identities, strict=True)), None, read.verdicts)
        identities: dict[str, tuple[int, int]] = {}
        for at, (key, identity) in enumerate(zip(keys, read.identities, strict=True)):
            if read.lengths[at] >= 0:
                identities[key] = identity
            elif read.lengths[at] == TORN:
                try:
                    self.quarantine(key, Identity._make(identity))
                except OSError as caught:
                    read.lengths[at], read.errors[at] = FAILED, caught
        last_error = read.errors[max(read.errors)] if read.errors else None
        return Found(read.lengths, identities, last_error, read.verdicts)

    def _folder_of(self, row: int) -> bytes:
        return self._quarantine if row == QUARANTINE else self._shards[row]

    def _file(self, row: int, name: str) -> bytes:
        return os.path.join(self._folder_of(row), os.fsencode(name))

    def _new_files(self, paths: Sequence[bytes], buffers: Sequence[memoryview]) -> NewFiles:
        with self._numbering:
            first, self._number = self._number, self._number + len(paths)
        return NewFiles(paths, buffers, b".%s." % self._instance, first)

    def _stored(self, file: NewFile, row: int, made: Outcome, booking: Booking) -> tuple[Stored, OSError | None]:
        """What became of an object whose file has been made, or not; deals with what is rare."""
        outcome, error = made
        try:
            if outcome is Made.NO_FOLDER:
                make_folder(os.fsdecode(self._shards[row]))
                outcome, error = make_file(file, self._publisher)
            if outcome is Made.NO_FOLDER:
                raise FileNotFoundError(errno.ENOENT, "the folder has gone again", file.path)
            if outcome is Made.EXISTS:
                return self._replace_torn(file, row, booking), None
            return (Stored.WRITTEN if outcome is Made.WRITTEN else Stored.FAILED), error
        except OSError as caught:
            return Stored.FAILED, caught

    def _replace_torn(self, file: NewFile, row: int, booking: Booking) -> Stored:
        """Something has the name of ``file``: PRESENT if it is whole.  OSError if it is not ours."""
        try:
            try:
                found = os.stat(file.path, follow_symlinks=False)
            except FileNotFoundError:  # gone again
                os.rename(file.temporary, file.path)
                return Stored.WRITTEN
            if not stat.S_ISREG(found.st_mode):
                raise FileExistsError(errno.EEXIST, "something that is not ours has this name", file.path)
            if found.st_size != len(file.buffer):
                os.rename(file.temporary, file.path)
                booking.change(row, -disk_bytes(found.st_size), -1)
                return Stored.WRITTEN
        except BaseException:
            unlink(file.temporary)
            raise
        unlink(file.temporary)
        return Stored.PRESENT

    def _remove(self, path: bytes, row: int, booking: Booking) -> bool:
        try:
            found = os.stat(path, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                return False  # not ours
            os.unlink(path)
        except FileNotFoundError:
            return False
        booking.change(row, -disk_bytes(found.st_size), -1)
        return True

    def _put_back(self, target: bytes, path: bytes) -> None:
        with contextlib.suppress(FileExistsError):  # yet another good one has come
            os.link(target, path)
        os.unlink(target)

    def _trim_quarantine(self) -> None:
        items = self.look(QUARANTINE).items
        by_time = sorted(items, key=lambda item: int(item.name.rsplit(".", 2)[1]))
        if len(by_time) > QUARANTINE_KEEP:
            self.evict(QUARANTINE, by_time[:-QUARANTINE_KEEP], 0)


def _with_folder(folder: bytes, attempt: Callable[[], T]) -> T:
    """Folders are made when they are needed, and again when somebody removed them."""
    try:
        return attempt()
    except FileNotFoundError:
        make_folder(os.fsdecode(folder))
        return attempt()
