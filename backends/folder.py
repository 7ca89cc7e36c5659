"""The blocking half of `FileBackend`: one folder of objects, through plain system calls.  Every function may run in any thread.

::

    <root>/objects/<shard>/<key>.kv         one object; <shard> is two hex digits of a hash of the key
    <root>/tmp/<instance>/<key>.<n>.tmp     an object being written; the folder is locked while its instance lives
    <root>/quarantine/<key>.<time_ns>.bad   bad objects, the newest `QUARANTINE_KEEP` of them, to be looked at

Whatever else lies in the root or in one of its folders is not ours: it is neither read nor removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple, TypeVar

from xxhash import xxh32_intdigest

from hicache_actors.backends.backend import Stored
from hicache_actors.errors import BackendError

MISSING: Final = -1
TORN: Final = -2  #: there, but of another length than asked for; it has been quarantined
FAILED: Final = -3

QUARANTINE_KEEP: Final = 64

_SHARDS: Final = frozenset(f"{shard:02x}" for shard in range(256))
_KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_OBJECT: Final = ".kv"
_TEMPORARY: Final = re.compile(rf"{_KEY.pattern}\.[0-9]+\.tmp")
_QUARANTINED: Final = re.compile(rf"{_KEY.pattern}\.([0-9]+)\.bad")

T = TypeVar("T")


class Found(NamedTuple):
    """Outcome of `read_many`: per key the length read, or MISSING, TORN, FAILED; and the last error of the disk."""

    lengths: list[int]
    error: OSError | None


class Written(NamedTuple):
    outcomes: list[Stored]
    error: OSError | None


class Shard(NamedTuple):
    """Outcome of `scan`: lengths by key; ``torn`` empty files have been quarantined."""

    lengths: dict[str, int]
    torn: int


class Folder:
    def __init__(self, root: str) -> None:
        self.root = root
        self._objects = os.path.join(root, "objects")
        self._all_temporary = os.path.join(root, "tmp")
        self._quarantine = os.path.join(root, "quarantine")
        self._temporary = ""
        self._lock_fd = -1
        self._numbers = count()

    # -- life ---------------------------------------------------------------------------------------------------------

    def open(self) -> int:
        """Make what is missing, lock a temporary folder of our own, remove what crashed writers left -> how many files."""
        for path in (self.root, self._objects, self._all_temporary, self._quarantine):
            os.makedirs(path, 0o700, exist_ok=True)
        self._claim()
        return sum(self._remove_orphans(name) for name in os.listdir(self._all_temporary))

    @property
    def is_open(self) -> bool:
        return self._lock_fd >= 0

    def close(self) -> None:
        """Idempotent.  What a hung writer still has under way stays, for the next `open` to remove."""
        if self.is_open:
            os.close(self._lock_fd)
            self._lock_fd = -1
            with contextlib.suppress(OSError):
                os.rmdir(self._temporary)

    def _claim(self) -> None:
        while True:
            self._temporary = os.path.join(self._all_temporary, secrets.token_hex(8))
            os.mkdir(self._temporary, 0o700)
            self._lock_fd = os.open(self._temporary, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks: then nobody removes orphans there
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            if os.path.isdir(self._temporary):
                return
            os.close(self._lock_fd)  # another instance took it for an orphan before it was locked

    def _remove_orphans(self, instance: str) -> int:
        path = os.path.join(self._all_temporary, instance)
        if path == self._temporary:
            return 0
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            return 0  # not a folder, or gone: not ours
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            orphans = [name for name in os.listdir(fd) if _TEMPORARY.fullmatch(name)]
            for name in orphans:
                os.unlink(name, dir_fd=fd)
            os.rmdir(path)
        except OSError:
            return 0  # its instance lives, or somebody else keeps files there
        finally:
            os.close(fd)
        return len(orphans)

    # -- objects ------------------------------------------------------------------------------------------------------

    def leading(self, keys: Sequence[str]) -> dict[str, int]:
        """Lengths of the leading run of ``keys`` that are there."""
        lengths: dict[str, int] = {}
        for key in keys:
            length = self._length(key)
            if length <= 0:
                break
            lengths[key] = length
        return lengths

    def read_many(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Found:
        lengths: list[int] = []
        error: OSError | None = None
        for key, buffer in zip(keys, buffers, strict=True):
            try:
                length = self._read(self._path(key), buffer)
                if length == TORN:
                    self.quarantine(key)
            except OSError as caught:
                length, error = FAILED, caught
            lengths.append(length)
        return Found(lengths, error)

    def write_many(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Written:
        outcomes = [Stored.FAILED] * len(keys)
        error: OSError | None = None
        for i, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            try:
                outcomes[i] = self._write(key, buffer)
            except OSError as caught:
                error = caught
                if caught.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                    break  # the rest would fail alike
        return Written(outcomes, error)

    def delete_many(self, keys: Sequence[str]) -> int:
        return sum(self._unlink(self._path(key)) for key in keys)

    def quarantine(self, key: str) -> bool:
        """Rename the object out of sight -> whether there was one."""
        target = os.path.join(self._quarantine, f"{key}.{time.time_ns()}.bad")
        path = self._path(key)
        try:
            os.rename(path, target)
        except FileNotFoundError:
            if not os.path.lexists(path):
                return False
            os.makedirs(self._quarantine, 0o700, exist_ok=True)
            os.rename(path, target)
        self._trim_quarantine()
        return True

    def shards(self) -> list[str]:
        """The shards that hold anything yet."""
        return sorted(_SHARDS.intersection(os.listdir(self._objects)))

    def scan(self, shard: str) -> Shard:
        """The objects of one shard; an empty file is what a power failure makes of a fresh one."""
        lengths: dict[str, int] = {}
        torn = 0
        with _entries(os.path.join(self._objects, shard)) as entries:
            for entry in entries:
                key = entry.name.removesuffix(_OBJECT)
                if not self._is_object(entry, shard, key):
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed while we look
                    lengths[key] = entry.stat(follow_symlinks=False).st_size
        for key in [key for key, length in lengths.items() if length == 0]:
            del lengths[key]
            torn += self.quarantine(key)
        return Shard(lengths, torn)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise BackendError(
                f"key {key!r} is no file name: letters, digits, '_', '-', '.', at most 200", retryable=False
            )
        return os.path.join(self._objects, _shard(key), key + _OBJECT)

    def _length(self, key: str) -> int:
        try:
            found = os.stat(self._path(key), follow_symlinks=False)
        except FileNotFoundError:
            return MISSING
        return found.st_size if stat.S_ISREG(found.st_mode) else MISSING

    def _read(self, path: str, buffer: memoryview) -> int:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return MISSING
        except OSError as error:
            if error.errno == errno.ELOOP:
                return MISSING  # a link: not ours
            raise
        try:
            found = os.fstat(fd)
            if stat.S_ISDIR(found.st_mode):
                return MISSING  # not ours
            if stat.S_ISREG(found.st_mode) and found.st_size != len(buffer):
                return TORN
            done = 0
            while done < len(buffer):
                n_bytes = os.preadv(fd, [buffer[done:]], done)
                if n_bytes == 0:
                    return TORN  # cut off while we read
                done += n_bytes
            return done
        finally:
            os.close(fd)

    def _write(self, key: str, buffer: memoryview) -> Stored:
        path = self._path(key)
        if self._length(key) == len(buffer):
            return Stored.PRESENT
        temporary = os.path.join(self._temporary, f"{key}.{next(self._numbers)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        fd = _with_folder(self._temporary, lambda: os.open(temporary, flags, 0o600))
        try:
            try:
                done = 0
                while done < len(buffer):
                    done += os.pwritev(fd, [buffer[done:]], done)
            finally:
                os.close(fd)
            _with_folder(os.path.dirname(path), lambda: os.rename(temporary, path))
        except BaseException:
            self._unlink(temporary)
            raise
        return Stored.WRITTEN

    def _unlink(self, path: str) -> bool:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def _is_object(self, entry: os.DirEntry[str], shard: str, key: str) -> bool:
        return (
            entry.name.endswith(_OBJECT)
            and _KEY.fullmatch(key) is not None
            and _shard(key) == shard
            and entry.is_file(follow_symlinks=False)
        )

    def _trim_quarantine(self) -> None:
        matches = map(_QUARANTINED.fullmatch, os.listdir(self._quarantine))
        ours = sorted((int(match[1]), match[0]) for match in matches if match)
        for _, name in ours[:-QUARANTINE_KEEP]:
            self._unlink(os.path.join(self._quarantine, name))


def _shard(key: str) -> str:
    return f"{xxh32_intdigest(key.encode()) & 0xFF:02x}"


def _with_folder(folder: str, attempt: Callable[[], T]) -> T:
    """Folders are made when they are needed, and again when somebody removed them."""
    try:
        return attempt()
    except FileNotFoundError:
        os.makedirs(folder, 0o700, exist_ok=True)
        return attempt()


@contextlib.contextmanager
def _entries(path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
    try:
        entries = os.scandir(path)
    except (FileNotFoundError, NotADirectoryError):
        yield iter(())
        return
    with entries:
        yield entries
