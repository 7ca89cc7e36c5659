"""``file:///absolute/folder``: one file per object, plain form."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple

import aiofiles.os

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.folder import FAILED, MISSING, TORN, Folder
from hicache_actors.backends.urls import FIELD, parse_url
from hicache_actors.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_FINAL: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG}
)


class FileBackend(Backend):
    """Objects in the shards of one folder (see `hicache_actors.backends.folder`), found again after a restart.

    A write goes to a temporary file that is renamed when it is whole; nothing is synced, for the checksum of an object tells
    what a power failure left of it.  An object of another length than the reader asks for is a miss and is quarantined.
    Folders are made 0700 and files 0600.

    A batch is one hop to a worker thread, both ways.  Sizes are known from a scan at `open`, so `exists` costs a hop only for
    keys that are not known to be there.  Other processes may share the folder: their objects are found by `exists` and
    `read`, but nobody counts or evicts for all of them.

    A read or write raises `BackendError` if the disk failed and no object came through; otherwise failed objects are
    answered one by one and counted.
    """

    def __init__(self, url: str, workers: Workers) -> None:
        path = parse_url(url, "file", host=False).path
        if path.strip("/") == "":
            raise ConfigError(FIELD, url, "names no folder", allowed="file:///absolute/path")
        self.scope = "host"
        self.url = url
        self._folder = Folder(os.path.normpath(path))
        self._workers = workers
        self._executor = _Lent(workers)
        self._lengths: dict[str, int] = {}  # what is known to be there; only the loop's thread touches it
        self._bytes = 0
        self._counts: Counter[str] = Counter()
        self._last_error = ""

    async def open(self) -> None:
        try:
            self._counts["orphans_removed"] += await self._admin(self._folder.open)
        except OSError as error:
            raise self._refusal(error) from error
        with self._errors("open"):
            for shard in await self._admin(self._folder.shards):
                found = await self._admin(self._folder.scan, shard)
                self._learn(found.lengths)
                self._count_torn(found.torn)

    async def close(self) -> None:
        if self._folder.is_open:
            await self._admin(self._folder.close)

    async def exists(self, keys: Sequence[str]) -> int:
        known = next((i for i, key in enumerate(keys) if key not in self._lengths), len(keys))
        if known == len(keys):
            return known
        with self._errors("exists"):
            found = await self._workers.run(self._folder.leading, keys[known:])
        self._learn(found)
        return known + len(found)

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        lengths, error = await self._workers.run(self._folder.read_many, keys, buffers)
        found = [length >= 0 for length in lengths]
        self._learn({key: length for key, length in zip(keys, lengths, strict=True) if length >= 0})
        self._forget(key for key, length in zip(keys, lengths, strict=True) if length < 0)
        self._counts["hits"] += sum(found)
        self._counts["misses"] += lengths.count(MISSING)
        self._count_torn(lengths.count(TORN))
        self._note("read", lengths.count(FAILED), error, fatal=not any(found))
        return found

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        outcomes, error = await self._workers.run(self._folder.write_many, keys, buffers)
        self._learn({key: len(buffer) for key, buffer, done in zip(keys, buffers, outcomes, strict=True) if done})
        self._counts["written"] += outcomes.count(Stored.WRITTEN)
        self._counts["present"] += outcomes.count(Stored.PRESENT)
        self._note("write", outcomes.count(Stored.FAILED), error, fatal=not any(outcomes))
        return outcomes

    async def delete(self, keys: Sequence[str]) -> int:
        self._forget(keys)
        with self._errors("delete"):
            return await self._admin(self._folder.delete_many, keys)

    async def quarantine(self, key: str) -> bool:
        self._forget([key])
        with self._errors("quarantine"):
            moved = await self._admin(self._folder.quarantine, key)
        self._counts["quarantined"] += moved
        return moved

    async def clear(self) -> None:
        with self._errors("clear"):
            for shard in await self._admin(self._folder.shards):
                found = await self._admin(self._folder.scan, shard)
                await self.delete(list(found.lengths))

    async def keys(self) -> AsyncIterator[str]:
        with self._errors("keys"):
            shards = await self._admin(self._folder.shards)
        for shard in shards:
            with self._errors("keys"):
                found = await self._admin(self._folder.scan, shard)
            for key in found.lengths:
                yield key

    def stats(self) -> Mapping[str, int | float | str]:
        counts = dict(self._counts)
        return {"objects": len(self._lengths), "bytes": self._bytes, "last_error": self._last_error, **counts}

    # -- parts --------------------------------------------------------------------------------------------------------

    async def _admin(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        result: T = await aiofiles.os.wrap(fn)(*args, executor=self._executor)
        return result

    def _refusal(self, error: OSError) -> ConfigError | BackendError:
        """Why the folder cannot be used: by what the URL says, or by what the disk does just now."""
        if error.errno not in _FINAL | {errno.ENOENT, errno.EEXIST}:
            return _translated("open", error)
        return ConfigError(
            FIELD, self.url, f"cannot be used as a folder ({error.strerror}: {error.filename})",
            allowed="a folder that this process may write, or a path where it can make one",
            fix="correct the path or its permissions",
        )  # fmt: skip

    def _learn(self, lengths: Mapping[str, int]) -> None:
        self._forget(lengths)
        self._lengths.update(lengths)
        self._bytes += sum(lengths.values())

    def _forget(self, keys: Iterable[str]) -> None:
        self._bytes -= sum(self._lengths.pop(key, 0) for key in keys)

    def _count_torn(self, n_objects: int) -> None:
        self._counts["torn"] += n_objects
        self._counts["quarantined"] += n_objects

    def _note(self, verb: str, n_failed: int, error: OSError | None, *, fatal: bool) -> None:
        if error is None:
            return
        self._counts[f"{verb}_errors"] += n_failed
        self._last_error = f"{verb}: {error}"
        if fatal:
            raise _translated(verb, error) from error

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._note(verb, 1, error, fatal=True)


class _Lent(Executor):
    """The cache's threads as aiofiles wants to see them: a hung call in its own would keep the process from exiting."""

    threadless = True  #: on a loop without threads this works as `Workers` do

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return self._workers.submit(partial(fn, *args, **kwargs))


def _translated(verb: str, error: OSError) -> BackendError:
    return BackendError(f"file {verb}: {type(error).__name__}: {error}", retryable=error.errno not in _FINAL)
