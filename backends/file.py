"""``file:///absolute/folder``: one file per object, in a folder that several processes may share."""

from __future__ import annotations

import errno
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple

import aiofiles.os
import anyio

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.evictor import check, unchecked
from hicache_actors.backends.file_batches import FAILED, MISSING, TORN
from hicache_actors.backends.file_options import FileOptions
from hicache_actors.backends.folder import Folder
from hicache_actors.backends.helping import help_of
from hicache_actors.backends.known import Known
from hicache_actors.backends.ledger import N_ROWS, N_SHARDS, disk_bytes
from hicache_actors.backends.objects import Expected, Verdict
from hicache_actors.backends.room import Room
from hicache_actors.backends.shards import Identity
from hicache_actors.backends.urls import FIELD
from hicache_actors.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_FINAL: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG}
)
_NO_SUCH_FOLDER: Final = _FINAL | {errno.ENOENT, errno.EEXIST, errno.ENOLCK, errno.EOPNOTSUPP}

_ROWS_PER_HOP: Final = 16  # scans of a shard before a worker thread is free for others again
_CHECK_EVERY_S: Final = 1.0
_CHECK_PART: Final = 50  # of the time, at most, goes into the rolling check
_COUNT_AT_OPEN: Final = 20_000  # objects are counted anew; more than that are taken as the ledger has them
_ROOM_S: Final = 5.0
_KEEP_IDENTITIES: Final = 8192


class FileBackend(Backend):
    """Objects in the shards of one folder (see `hicache_actors.backends.folder`), found again after a restart.

    A write goes to a temporary file that gets its name when it is whole; nothing is synced, for the checksum of an object tells
    what a power failure left of it.  An object of another length than the reader asks for is a miss and is quarantined.
    Folders are made 0700 and files 0600.

    A batch is one hop to a worker thread, both ways; two threads move a large one, if a second can be had.  Several processes may
    share a folder: its limits (see `FileOptions`) are for all of them, and what fits no more makes the longest unused objects go,
    whoever wrote them.

    A read or write raises `BackendError` if the disk failed and no object came through; otherwise failed objects are
    answered one by one and counted.  Objects for which there is no room are answered FAILED.
    """

    checks = True

    def __init__(
        self, url: str, workers: Workers, *, options: FileOptions | None = None, folder: Folder | None = None
    ) -> None:
        """``options``, ``folder``: of another scheme that keeps such a folder; default: what the URL says."""
        self.scope = "host"
        self.url = url
        self.options = options or FileOptions.parse(url)
        self._folder = folder or Folder(self.options.root, self.options.limits)
        self.batch_pages = self._folder.batch_pages
        self._workers = workers
        self._executor = _Lent(workers)
        self._known = Known(self.options.metadata_ttl_s)
        self._read_as: deque[Mapping[str, tuple[int, int]]] = (
            deque()
        )  # what was read last, a batch each, should it turn out to be bad
        self._n_read_as = 0
        self._next_check_s = 0.0
        self._counts: Counter[str] = Counter()
        self._last_error = ""
        self._room = Room(self._folder, self._admin, self._counts)

    async def open(self) -> None:
        try:
            await self._admin(self._folder.open)
        except OSError as error:
            raise self._refusal(error) from error
        with self._errors("open", undo=self._folder.close):
            few = self._folder.ledger.usage.objects <= _COUNT_AT_OPEN
            await self._check(range(N_ROWS) if few else await self._admin(unchecked, self._folder))
        self._next_check_s = anyio.current_time() + _CHECK_EVERY_S

    async def close(self) -> None:
        with self._errors("close"):
            await self._admin(self._folder.close)

    async def exists(self, keys: Sequence[str]) -> int:
        now_s = anyio.current_time()
        known = self._known.leading(keys, now_s)
        if known == len(keys):
            return known
        with self._errors("exists"):
            found = await self._workers.run(self._folder.leading, keys[known:], help_of(self._workers))
        self._known.add(keys[known : known + found], now_s)
        return known + found

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        return (await self._read(keys, buffers, None))[0]

    async def peek(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        read = partial(self._folder.read_many, touch=False)
        lengths, identities, error, _ = await self._workers.run(read, keys, buffers)
        found = [length >= 0 for length in lengths]
        self._remember(identities)
        self._count_torn(lengths.count(TORN))
        self._note("read", lengths.count(FAILED), error, fatal=not any(found))
        return found

    async def read_checked(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> list[Verdict | None]:
        return (await self._read(keys, buffers, expected))[1]

    async def _read(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected | None
    ) -> tuple[list[bool], list[Verdict | None]]:
        """-> which were found, and what they are if something is expected."""
        lengths, identities, error, verdicts = await self._workers.run(
            self._folder.read_many, keys, buffers, expected, help_of(self._workers)
        )
        self._known.add(identities, anyio.current_time())
        self._remember(identities)
        if len(identities) == len(lengths):
            self._counts["hits"] += len(lengths)
            return [True] * len(lengths), verdicts
        found = [length >= 0 for length in lengths]
        self._known.discard(key for key, here in zip(keys, found, strict=True) if not here)
        self._counts["hits"] += sum(found)
        self._counts["misses"] += lengths.count(MISSING)
        self._count_torn(lengths.count(TORN))
        self._note("read", lengths.count(FAILED), error, fatal=not any(found))
        return found, verdicts

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        return await self._write(keys, buffers, None)

    async def write_sealed(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> list[Stored]:
        return await self._write(keys, buffers, expected)

    async def _write(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected | None
    ) -> list[Stored]:
        outcomes, error = await self._write_with_room(keys, buffers, expected)
        now_s = anyio.current_time()
        self._known.add((key for key, done in zip(keys, outcomes, strict=True) if done), now_s)
        self._counts["written"] += outcomes.count(Stored.WRITTEN)
        self._counts["present"] += outcomes.count(Stored.PRESENT)
        self._note("write", outcomes.count(Stored.FAILED), error, fatal=not any(outcomes))
        if now_s >= self._next_check_s:
            self._next_check_s = math.inf  # one at a time
            try:
                await self._check_some()
            finally:
                took_s = anyio.current_time() - now_s
                self._next_check_s = now_s + max(_CHECK_EVERY_S, took_s * _CHECK_PART)
        return outcomes

    async def lengths(self, keys: Sequence[str]) -> list[int | None]:
        with self._errors("lengths"):
            return await self._workers.run(self._folder.lengths, keys)

    async def delete(self, keys: Sequence[str]) -> int:
        self._known.discard(keys)
        with self._errors("delete"):
            return await self._admin(self._folder.delete_many, keys)

    async def quarantine(self, key: str) -> bool:
        """Only the very file that was read last under ``key``, if one was: not a good one that has taken its place."""
        self._known.discard([key])
        with self._errors("quarantine"):
            moved = await self._admin(self._folder.quarantine, key, self._as_read(key))
        self._counts["quarantined"] += moved
        return moved

    async def clear(self) -> None:
        async for keys in self._listed("clear"):
            await self.delete(keys)

    async def keys(self) -> AsyncIterator[str]:
        async for keys in self._listed("keys"):
            for key in keys:
                yield key

    async def reconcile(self) -> bool:
        """Count the whole folder anew -> whether every shard was quiet enough for an exact count."""
        with self._errors("reconcile"):
            return await self._check(range(N_ROWS))

    def stats(self) -> Mapping[str, int | float | str]:
        """``bytes``, ``objects``, ``quarantine_bytes``: of the whole folder, as of this process's last change; the other counts
        are this process's own."""
        usage = self._folder.ledger.usage._asdict()
        limits = {"max_bytes": self.options.limits.max_bytes or 0, "min_free_bytes": self.options.limits.min_free_bytes}
        return {**usage, **limits, "last_error": self._last_error, **self._counts}

    # -- room ---------------------------------------------------------------------------------------------------------

    async def _write_with_room(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected | None
    ) -> tuple[list[Stored], OSError | None]:
        """Write, make room for what did not fit, and write that; what still does not fit is refused."""
        outcomes, left, error = await self._workers.run(
            self._folder.write_many, keys, buffers, help_of(self._workers), expected
        )
        until_s = anyio.current_time() + _ROOM_S
        while left and anyio.current_time() < until_s:  # other writers may be faster than we
            done_bytes = sum(disk_bytes(len(buffers[i])) for i, done in enumerate(outcomes) if done)
            wanted_bytes = self._fitting([disk_bytes(len(buffers[i])) for i in left], done_bytes)
            try:
                if not wanted_bytes or not await self._room.make(wanted_bytes):
                    break
            except OSError as caught:
                self._note("evict", 1, caught, fatal=False)
                break
            again = await self._workers.run(
                self._folder.write_many, [keys[i] for i in left], [buffers[i] for i in left], None, expected, left
            )
            for i, outcome in zip(left, again.outcomes, strict=True):
                outcomes[i] = outcome
            error = again.error or error
            left = [left[i] for i in again.no_room]
        self._counts["refused"] += len(left)
        return outcomes, error

    def _fitting(self, sizes: Sequence[int], done_bytes: int) -> int:
        """Of objects that want room, the sum of the first that can have it together with what was written just now."""
        max_bytes = self.options.limits.max_bytes
        wanted_bytes = 0
        for n_bytes in sizes:
            if max_bytes is not None and done_bytes + wanted_bytes + n_bytes > max_bytes:
                break
            wanted_bytes += n_bytes
        return wanted_bytes

    # -- counting -----------------------------------------------------------------------------------------------------

    async def _check_some(self) -> None:
        """The rolling check: one shard, or all if the folder was exchanged under us."""
        try:
            if self._folder.ledger.uncounted:
                await self._check(await self._admin(unchecked, self._folder))
            else:
                await self._check([await self._admin(self._folder.ledger.next_row)])
        except OSError as error:
            self._note("check", 1, error, fatal=False)

    async def _check(self, rows: Sequence[int]) -> bool:
        exact = True
        for first in range(0, len(rows), _ROWS_PER_HOP):
            for checked in await self._admin(self._check_rows, rows[first : first + _ROWS_PER_HOP]):
                self._counts["orphans_removed"] += checked[0]
                self._count_torn(checked[1])
                exact &= checked[2]
        return exact

    def _check_rows(self, rows: Sequence[int]) -> list[tuple[int, int, bool]]:
        checked = (check(self._folder, row) for row in rows)
        return [(row.orphans, row.torn, row.exact) for row in checked]

    async def _listed(self, verb: str) -> AsyncIterator[list[str]]:
        for first in range(0, N_SHARDS, _ROWS_PER_HOP):
            with self._errors(verb):
                found = await self._admin(self._keys_of, range(first, first + _ROWS_PER_HOP))
            yield found

    def _keys_of(self, rows: Sequence[int]) -> list[str]:
        return [key for row in rows for key in self._folder.keys(row)]

    # -- parts --------------------------------------------------------------------------------------------------------

    async def _admin(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        result: T = await aiofiles.os.wrap(fn)(*args, executor=self._executor)
        return result

    def _refusal(self, error: OSError) -> ConfigError | BackendError:
        """Why the folder cannot be used: by what the URL says, or by what the disk does just now."""
        if error.errno not in _NO_SUCH_FOLDER:
            return _translated("open", error)
        return ConfigError(
            FIELD, self.url, f"cannot be used as a folder ({error.strerror}: {error.filename})",
            allowed="a folder that this process may write, on a file system with locks, or a path where it can make one",
            fix="correct the path or its permissions",
        )  # fmt: skip

    def _remember(self, identities: Mapping[str, tuple[int, int]]) -> None:
        if not identities:
            return
        self._read_as.append(identities)
        self._n_read_as += len(identities)
        while self._n_read_as > _KEEP_IDENTITIES and len(self._read_as) > 1:
            self._n_read_as -= len(self._read_as.popleft())

    def _as_read(self, key: str) -> Identity | None:
        """Which file was read last under ``key``."""
        return next((Identity._make(batch[key]) for batch in reversed(self._read_as) if key in batch), None)

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
    def _errors(self, verb: str, undo: Callable[[], None] | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if undo is not None:
                undo()
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
