"""Batches of whole files, read and written: by the native library where there is one, else by one system call after the other.

The native way leaves the interpreter once a batch and not five times a file, so that it neither waits for the others' turns nor
makes them wait.  Where the system can do that, it makes a new file without a name and gives it one when it is whole.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from itertools import count
from typing import Final, NamedTuple, TypeAlias

from hicache_actors.backends.helping import Help, share
from hicache_actors.backends.ledger import N_SHARDS
from hicache_actors.backends.objects import Expected, Verdict, verdicts_of
from hicache_actors.backends.posix import Publisher
from hicache_actors.backends.shards import Identity, is_key, row_of
from hicache_actors.cuda_ext.native import files as native
from hicache_actors.errors import BackendError

MISSING: Final = native.READ_MISSING
TORN: Final = native.READ_TORN  #: there, but of another length than asked for
FAILED: Final = native.READ_FAILED

# Without O_NONBLOCK somebody's pipe under the name of an object would block us for ever.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
NOBODY: Final = Identity(0, 0)  #: of what was not read
_DISK_IS_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class FilesRead(NamedTuple):
    """By position: ``lengths`` read, or MISSING, TORN, FAILED; ``identities``, as tuples, of what was read, or is torn; ``errors``
    of what FAILED; ``verdicts`` on what was read, None on all else and if nothing was expected."""

    lengths: list[int]
    identities: list[tuple[int, int]]
    errors: dict[int, OSError]
    verdicts: list[Verdict | None]


def is_native() -> bool:
    """Whether batches leave the interpreter alone."""
    return native.files() is not None


def read_files(
    paths: Sequence[bytes],
    buffers: Sequence[memoryview],
    touch_before_s: float,
    expected: Expected | None = None,
    help: Help | None = None,
) -> FilesRead:
    """Fill each buffer with a file of exactly its length, and judge it if it should be something.

    A file with an older mtime than ``touch_before_s`` is touched.  ``help`` is of use to the native library alone.
    """
    library = native.files()
    if library is None:
        return _read_one_by_one(paths, buffers, touch_before_s, expected)
    batch = native.Reads(
        library, paths, buffers, int(touch_before_s * 1e9), None if expected is None else expected.names()
    )
    share(batch.run, help)
    lengths = batch.outcomes
    verdicts: list[Verdict | None] = [None] * len(paths)
    if expected is not None:
        verdicts = [*verdicts_of(batch.verdicts)]
    errors: dict[int, OSError] = {}
    if min(lengths, default=0) < 0:
        verdicts = [verdict if length >= 0 else None for length, verdict in zip(lengths, verdicts, strict=True)]
        codes = batch.errors
        errors = {at: _error(codes[at], paths[at]) for at, length in enumerate(lengths) if length == FAILED}
    return FilesRead(lengths, batch.identities, errors, verdicts)


def _read_one_by_one(
    paths: Sequence[bytes], buffers: Sequence[memoryview], touch_before_s: float, expected: Expected | None
) -> FilesRead:
    read = FilesRead([], [], {}, [None] * len(paths))
    for at, (path, buffer) in enumerate(zip(paths, buffers, strict=True)):
        length, identity = FAILED, NOBODY
        try:
            length, identity = _read(path, buffer, touch_before_s)
        except OSError as error:
            read.errors[at] = error
        read.lengths.append(length)
        read.identities.append(identity)
    if expected is not None:
        judged = expected.verify(buffers)  # of what was not read in vain
        read.verdicts[:] = [
            verdict if length >= 0 else None for length, verdict in zip(read.lengths, judged, strict=True)
        ]
    return read


def place(folder: bytes, keys: Sequence[str]) -> tuple[Sequence[int], Sequence[bytes]]:
    """Row and path of each key's object in the shards of ``folder``.  `BackendError` for what is no key.

    Paths are bytes: what is encoded once need not be encoded by every call.
    """
    library = native.files()
    if library is not None:
        placed = library.place(folder, N_SHARDS, keys)
        if not isinstance(placed, int):
            return placed
    for key in keys:
        if not is_key(key):
            raise BackendError(
                f"key {key!r} is no file name: letters, digits, '_', '-', '.', at most 200", retryable=False
            )
    names = [key.encode() for key in keys]
    rows = [*map(row_of, names)]
    return rows, [b"%s/%02x/%s.kv" % (folder, row, name) for row, name in zip(rows, names, strict=True)]


def count_leading(paths: Sequence[bytes], help: Help | None = None) -> int:
    """How many of the paths, from the front, are regular files that are not empty.  OSError if that cannot be seen."""
    library = native.files()
    if library is None:
        return next((at for at, path in enumerate(paths) if length_of(path) <= 0), len(paths))
    batch = native.Lookups(library, paths)
    share(batch.run, help)
    if batch.error:
        raise _error(batch.error, paths[batch.leading])
    return batch.leading


def length_of(path: bytes) -> int:
    """Of a regular file; of anything else MISSING."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return MISSING
    return found.st_size if stat.S_ISREG(found.st_mode) else MISSING


class Made(Enum):
    """What became of one file that was to be made."""

    WRITTEN = native.WRITE_WRITTEN
    EXISTS = native.WRITE_EXISTS  #: something has its name; the temporary file stays, whole
    NO_FOLDER = native.WRITE_NO_FOLDER  #: nothing has been made
    FAILED = native.WRITE_FAILED  #: nothing is left of it
    SKIPPED = native.WRITE_SKIPPED  #: the disk is full


class NewFile(NamedTuple):
    """``temporary`` is in the same folder as ``path``."""

    temporary: bytes
    path: bytes
    buffer: memoryview


class NewFiles(NamedTuple):
    """A batch of them.  Temporary files are called ``<temporary><number>.tmp``, with numbers from ``first`` on."""

    paths: Sequence[bytes]
    buffers: Sequence[memoryview]
    temporary: bytes
    first: int

    def one(self, at: int) -> NewFile:
        path = self.paths[at]
        temporary = b"%s%d.tmp" % (self.temporary, self.first + at)
        return NewFile(os.path.join(os.path.dirname(path), temporary), path, self.buffers[at])


Outcome: TypeAlias = tuple[Made, OSError | None]


def make_file(file: NewFile, publisher: Publisher) -> Outcome:
    """Write a temporary file (0600) and give it its name, unless something has that."""
    try:
        fd = os.open(file.temporary, _CREATE, 0o600)
    except FileNotFoundError:
        return Made.NO_FOLDER, None
    except OSError as error:
        return Made.FAILED, error
    try:
        try:
            done = os.write(fd, file.buffer)
            while done < len(file.buffer):
                done += os.write(fd, file.buffer[done:])
        finally:
            os.close(fd)
    except OSError as error:
        unlink(file.temporary)
        return Made.FAILED, error
    return publish(file, publisher)


class Making:
    """A batch of files being made.  Several threads may `work` at it at once; after all have returned it has `outcomes`.

    If something is ``expected``, each is sealed before it is written, as the object of that number.
    """

    def __init__(
        self, files: NewFiles, publisher: Publisher, expected: Expected | None, numbers: Sequence[int]
    ) -> None:
        self._files, self._publisher = files, publisher
        self._expected, self._numbers = expected, numbers
        self._waiting = iter(range(len(files.paths)))  # a step of it is one step for all threads
        self._outcomes: list[Outcome] = [(Made.SKIPPED, None)] * len(files.paths)
        self._full = False
        self._native: native.Writes | None = None
        library = native.files()
        if library is not None:
            names = None if expected is None else expected.names()
            self._native = native.Writes(library, *files, names, numbers)

    def work(self) -> None:
        if self._native is not None:
            self._native.run()
            return
        for at in self._waiting:
            if not self._full:
                file = self._files.one(at)
                if self._expected is not None:
                    self._expected.seal(file.buffer, self._numbers[at])
                self._outcomes[at] = outcome = make_file(file, self._publisher)
                error = outcome[1]
                self._full = self._full or (error is not None and error.errno in _DISK_IS_FULL)

    def outcomes(self) -> list[Outcome]:
        if self._native is None:
            return self._outcomes
        codes = self._native.outcomes
        if codes.count(native.WRITE_WRITTEN) == len(codes):
            return [(Made.WRITTEN, None)] * len(codes)
        return [*map(self._outcome, count(), codes, self._native.errors)]

    def _outcome(self, at: int, code: int, error: int) -> Outcome:
        if code == native.WRITE_NO_RENAME:
            return publish(self._files.one(at), self._publisher)
        return Made(code), _error(error, self._files.paths[at]) if code == native.WRITE_FAILED else None


def touch(file: int | bytes) -> os.stat_result | None:
    """Say that it was used.  Whoever may read a file need not be allowed to touch it."""
    with suppress(OSError):
        os.utime(file)
        return os.stat(file)
    return None


def unlink(path: bytes) -> bool:
    """-> whether it was there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def identity_of(found: os.stat_result) -> Identity:
    return Identity(found.st_mtime_ns, found.st_ino)


def publish(file: NewFile, publisher: Publisher) -> Outcome:
    """Give a temporary file that is whole its name, unless something has that."""
    try:
        return Made.WRITTEN if publisher.publish(file.temporary, file.path) else Made.EXISTS, None
    except OSError as error:
        unlink(file.temporary)
        return Made.FAILED, error


def _read(path: bytes, buffer: memoryview, touch_before_s: float) -> tuple[int, Identity]:
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return MISSING, NOBODY
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return MISSING, NOBODY  # a link or a socket: not ours
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return MISSING, NOBODY  # not ours
        length = len(buffer)
        if found.st_size != length:
            return TORN, identity_of(found)
        done = os.readv(fd, (buffer,))
        while done < length:
            n_bytes = os.readv(fd, (buffer[done:],))
            if n_bytes == 0:
                return TORN, identity_of(found)  # cut off while we read
            done += n_bytes
        if found.st_mtime < touch_before_s:
            found = touch(fd) or found
        return done, identity_of(found)
    finally:
        os.close(fd)


def _error(code: int, path: bytes) -> OSError:
    return OSError(code, os.strerror(code), os.fsdecode(path))
