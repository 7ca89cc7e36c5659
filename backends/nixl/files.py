"""``nixl:///folder``: a file for each object, written and read through NIXL's POSIX plugin.

::

    <root>/<shard>/<key>.kv               one object; <shard> is two hex digits of a hash of the key
    <root>/<shard>/.<instance>.<n>.tmp    an object being written

Names, lengths and removal are ours, by system calls; NIXL moves the bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import secrets
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.nixl.agent import Agent, Item, Verb, nixl_api, span_of
from hicache_actors.backends.nixl.options import IO, FilesOptions
from hicache_actors.backends.posix import make_folder
from hicache_actors.backends.shards import SHARDS, is_key, row_of
from hicache_actors.backends.urls import FIELD
from hicache_actors.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

_ALIGNED: Final = 4096
_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_SUFFIX: Final = ".kv"
_ABANDONED_S: Final = 3600.0  #: a temporary file that nobody has written to for so long has lost its writer


class NixlFiles(Backend):
    """Files in the shards of one folder that processes may share, folders 0700 and files 0600.

    A write goes to a temporary file that gets its name when it is whole.  A file of another length than is asked for is a miss, and
    is written anew.  The folder has no cap and nothing is evicted: a full disk refuses objects, one by one.

    The host memory is registered once (`register_memory`); other buffers for the time of a call.  With ``direct`` what is aligned
    goes past the page cache, and the rest, or what the file system refuses, through it (counted as ``buffered``).
    """

    scope = "host"

    def __init__(self, url: str, workers: Workers) -> None:
        self.url = url
        self.options = FilesOptions.parse(url)
        nixl_api()  # missing is said before anything is opened
        self._workers = workers
        self._agent: Agent | None = None
        self._instance, self._numbers = secrets.token_hex(8), itertools.count()
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        await self._workers.run(self._open)

    async def register_memory(self, memory: memoryview) -> None:
        await self._workers.run(self._opened().register, memory)

    async def close(self) -> None:
        self._agent = None

    async def exists(self, keys: Sequence[str]) -> int:
        lengths = await self.lengths(keys)
        return next((at for at, length in enumerate(lengths) if not length), len(keys))

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        found, error = await self._workers.run(self._read, keys, buffers)
        self._counts["hits"] += sum(found)
        self._counts["misses"] += len(found) - sum(found)
        if error is not None and not any(found):
            raise BackendError(f"{self.url}: read: {error}") from error
        return found

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        outcomes, error = await self._workers.run(self._write, keys, buffers)
        self._counts["written"] += outcomes.count(Stored.WRITTEN)
        self._counts["present"] += outcomes.count(Stored.PRESENT)
        self._counts["failed"] += outcomes.count(Stored.FAILED)
        if error is not None and outcomes.count(Stored.FAILED) == len(outcomes):
            raise BackendError(f"{self.url}: write: {error}") from error
        return outcomes

    async def delete(self, keys: Sequence[str]) -> int:
        return await self._workers.run(lambda: sum(_unlink(self._path(key)) for key in keys))

    async def quarantine(self, key: str) -> bool:
        removed = await self.delete([key]) > 0
        self._counts["quarantined"] += removed
        return removed

    async def lengths(self, keys: Sequence[str]) -> list[int | None]:
        return await self._workers.run(lambda: [_length(self._path(key)) for key in keys])

    async def keys(self) -> AsyncIterator[str]:
        for folder in self._folders():
            for name in await self._workers.run(_names, folder):
                key = name.removesuffix(_SUFFIX)
                if key != name and is_key(key):
                    yield key

    def stats(self) -> Mapping[str, int | float | str]:
        agent = self._agent
        return {"io": self.options.io, "registered_bytes": agent.registered_bytes if agent else 0, **self._counts}

    # -- in threads ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        options = self.options
        queues = {f"use_{io}": "true" if io == options.io else "false" for io in IO}
        try:
            for folder in self._folders():
                make_folder(folder)
                _sweep(folder)
        except OSError as error:
            raise ConfigError(FIELD, self.url, f"the folder cannot be used: {error}") from error
        try:
            self._agent = Agent("POSIX", queues)
            self._try_out()
        except (BackendError, OSError) as error:
            self._agent = None
            others = [io for io in IO if io != options.io]
            raise ConfigError(
                FIELD, self.url, f"io={options.io}{', direct=1' * options.direct} does not work here: {error}",
                allowed=f"io={' or io='.join(others)}", fix="take another io, or leave direct out",
            ) from error  # fmt: skip

    def _try_out(self) -> None:
        """A page there and back: containers forbid io_uring, and file systems refuse direct I/O, where nobody would see it."""
        flags = _DIRECT if self.options.direct else 0
        page = mmap.mmap(-1, _ALIGNED)
        page[:8] = secrets.token_bytes(8)
        expected, path = page[:], self._temporary(self._path("probe"))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600)
        try:
            item = Item(memoryview(page), fd)
            written = self._opened().transfer("WRITE", [item])
            page[:] = bytes(_ALIGNED)
            if written != [True] or self._opened().transfer("READ", [item]) != [True] or page[:] != expected:
                raise BackendError("a page that was written does not come back")
        finally:
            os.close(fd)
            os.unlink(path)

    def _read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> tuple[list[bool], OSError | None]:
        """-> found, and the last failure that is more than a missing file."""
        found, failure = [False] * len(keys), None
        with contextlib.ExitStack() as stack:
            at_hand: list[int] = []
            items: list[Item] = []
            for at, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
                try:
                    fd = self._open_file(self._path(key), os.O_RDONLY | os.O_NOFOLLOW, buffer)
                    stack.callback(os.close, fd)
                    status = os.fstat(fd)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError as error:
                    failure = error
                    self._counts["failed"] += 1
                    continue
                if stat.S_ISREG(status.st_mode) and status.st_size == len(buffer):
                    at_hand.append(at)
                    items.append(Item(buffer, fd))
            for at, ok in zip(at_hand, self._transfer("READ", items), strict=True):
                found[at] = ok
                self._counts["failed"] += not ok
        return found, failure

    def _write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> tuple[list[Stored], OSError | None]:
        """-> outcomes, and the last failure."""
        outcomes, failure = [Stored.FAILED] * len(keys), None
        with contextlib.ExitStack() as stack:
            under_way: list[tuple[int, str, str]] = []
            items: list[Item] = []
            for at, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
                path = self._path(key)
                if _length(path) == len(buffer):
                    outcomes[at] = Stored.PRESENT
                    continue
                try:
                    temporary = self._temporary(path)
                    fd = self._create(temporary, buffer)
                    stack.callback(os.close, fd)
                except OSError as error:
                    failure = error
                    continue
                stack.callback(_unlink, temporary)  # what has got its name is not there any more
                under_way.append((at, temporary, path))
                items.append(Item(buffer, fd))
            for (at, temporary, path), item, ok in zip(under_way, items, self._transfer("WRITE", items), strict=True):
                try:
                    if not ok or os.fstat(item.place).st_size != len(item.buffer):
                        raise OSError("NIXL reports an error; a full disk is the likely one")
                    os.replace(temporary, path)
                    outcomes[at] = Stored.WRITTEN
                except OSError as error:
                    failure = error
        return outcomes, failure

    def _transfer(self, verb: Verb, items: Sequence[Item]) -> list[bool]:
        """Once more through the page cache what failed past it."""
        agent = self._opened()
        done = agent.transfer(verb, items)
        again = []
        for at, item in enumerate(items):
            flags = fcntl.fcntl(item.place, fcntl.F_GETFL) if not done[at] and _DIRECT else 0
            if flags & _DIRECT:
                fcntl.fcntl(item.place, fcntl.F_SETFL, flags & ~_DIRECT)
                again.append(at)
        if again:
            self._counts["buffered"] += len(again)
            retried = agent.transfer(verb, [items[at] for at in again])
            for at, ok in zip(again, retried, strict=True):
                done[at] = ok
        return done

    def _create(self, temporary: str, buffer: memoryview) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            return self._open_file(temporary, flags, buffer)
        except FileNotFoundError:  # somebody has removed the folder
            make_folder(os.path.dirname(temporary))
            return self._open_file(temporary, flags, buffer)

    def _open_file(self, path: str, flags: int, buffer: memoryview) -> int:
        flags |= os.O_CLOEXEC
        if self.options.direct:
            if _is_aligned(buffer):
                try:
                    return os.open(path, flags | _DIRECT, 0o600)
                except OSError:  # what is wrong with the file itself shows below
                    if flags & os.O_CREAT:
                        _unlink(path)  # it may have been made before the flag was refused
            self._counts["buffered"] += 1
        return os.open(path, flags, 0o600)

    def _folders(self) -> Iterator[str]:
        return (os.path.join(self.options.root, shard) for shard in SHARDS)

    def _path(self, key: str) -> str:
        if not is_key(key):
            raise BackendError(f"{self.url}: {key!r} is no name of a file", retryable=False)
        return os.path.join(self.options.root, SHARDS[row_of(key.encode())], key + _SUFFIX)

    def _temporary(self, path: str) -> str:
        return os.path.join(os.path.dirname(path), f".{self._instance}.{next(self._numbers)}.tmp")

    def _opened(self) -> Agent:
        if self._agent is None:
            raise BackendError(f"{self.url}: closed", retryable=False)
        return self._agent


def _is_aligned(buffer: memoryview) -> bool:
    address, length = span_of(buffer)
    return address % _ALIGNED == 0 and length % _ALIGNED == 0


def _length(path: str) -> int | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _sweep(folder: str) -> None:
    """Remove what writers that have died were writing."""
    for name in _names(folder):
        path = os.path.join(folder, name)
        if name.startswith(".") and name.endswith(".tmp"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.stat(path).st_mtime > _ABANDONED_S:
                    os.unlink(path)
