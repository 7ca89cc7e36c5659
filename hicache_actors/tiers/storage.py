"""StorageTier: the mover of L3.  Owns the backend and every call that is made to it.

A call runs in a task of its own, outside the system's group: nobody cancels it, neither the job that wants it nor a dying
group; a caller stops waiting and goes, and the slots that the call touches are held until it has really ended.  What a backend
does wrong ends here: an error, an answer that breaks the contract, short data or a bad checksum is a miss, counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any, Literal, TypeAlias, TypeVar

import anyio
import msgspec

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.objects import Verdict, seal_many, verify_many
from hicache_actors.core.words import Slots
from hicache_actors.errors import BackendError, StoppedError
from hicache_actors.keys.scheme import SuffixKeys
from hicache_actors.runtime import Actor, Ask, Control, Workers, handles
from hicache_actors.tiers.host import HostTier

T = TypeVar("T")
CallKind: TypeAlias = Literal["query", "read", "seal", "write", "quarantine"]


class StartCall(Ask[asyncio.Task[Any]], frozen=True):
    """Run a storage call to its end, whatever happens to who asked."""

    kind: CallKind
    call: Callable[[], Coroutine[Any, Any, Any]]


class Counted(Control, frozen=True):
    """Add to one of the counters of `StorageSnapshot`."""

    what: Literal["read_pages", "written_pages", "present_pages", "corrupt_pages", "foreign_pages"]
    pages: int


class CallFailed(Control, frozen=True):
    kind: CallKind
    error: str


class StorageSnapshot(msgspec.Struct, frozen=True):
    """``calls``, ``errors``: by kind of call.  ``present_pages``: offered, but stored already.  ``corrupt_pages``: failed the
    checksum, and quarantined; ``foreign_pages``: another namespace's, a plain miss.  ``open_calls`` run now."""

    url: str
    scope: str
    calls: Mapping[str, int]
    errors: Mapping[str, int]
    read_pages: int
    written_pages: int
    present_pages: int
    corrupt_pages: int
    foreign_pages: int
    open_calls: int
    last_error: str | None
    backend: Mapping[str, int | float | str]


class StorageTier(Actor):
    """``workers`` verify and seal objects; the backend has threads of its own if it needs any."""

    def __init__(
        self,
        url: str,
        backend: Backend,
        keys: SuffixKeys,
        host: HostTier,
        workers: Workers,
        *,
        read_concurrency: int,
        write_concurrency: int,
    ) -> None:
        super().__init__("storage")
        self.backend, self.read_concurrency = backend, read_concurrency
        self._url, self._keys, self._host, self._workers = url, keys, host, workers
        self._reads, self._writes = anyio.Semaphore(read_concurrency), anyio.Semaphore(write_concurrency)
        self._open: set[asyncio.Task[Any]] = set()
        self._calls: Counter[str] = Counter()
        self._call_errors: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._last_error: str | None = None

    # -- for pipelines (loop thread) -----------------------------------------------------------------------------------

    async def query(self, hashes: Sequence[bytes]) -> int:
        """Length of the leading run that is stored; 0 if the store fails."""
        keys = self._keys.keys(hashes)
        return await self.outcome(self._start("query", lambda: self._query(keys)), 0)

    def start_read(self, hashes: Sequence[bytes], slots: Slots, wanted: Callable[[], bool]) -> asyncio.Task[int]:
        """Read and verify a batch -> its leading pages that are right.  Skipped if not ``wanted`` when its turn comes."""
        return self._start("read", lambda: self._read(hashes, slots, wanted))

    def start_seal(self, hashes: Sequence[bytes], slots: Slots) -> asyncio.Task[bool]:
        """Write checksum and header of each page into its slot, off the loop."""
        return self._start("seal", lambda: self._seal(hashes, slots))

    def start_write(
        self, hashes: Sequence[bytes], slots: Slots, wanted: Callable[[], bool]
    ) -> asyncio.Task[Sequence[Stored]]:
        """Store sealed pages -> what became of each."""
        return self._start("write", lambda: self._write(hashes, slots, wanted))

    async def outcome(self, call: asyncio.Task[T], otherwise: T) -> T:
        """Wait for a call -> its result, or ``otherwise`` if the store failed.  Cancelling this wait does not touch the call."""
        await asyncio.wait({call})
        if call.cancelled():
            return otherwise
        error = call.exception()
        if error is None:
            return call.result()
        if isinstance(error, (BackendError, StoppedError)):
            return otherwise
        raise error

    def usage(self) -> StorageSnapshot:
        return StorageSnapshot(
            url=self._url,
            scope=self.backend.scope,
            calls=dict(self._calls),
            errors=dict(self._call_errors),
            read_pages=self._pages["read_pages"],
            written_pages=self._pages["written_pages"],
            present_pages=self._pages["present_pages"],
            corrupt_pages=self._pages["corrupt_pages"],
            foreign_pages=self._pages["foreign_pages"],
            open_calls=len(self._open),
            last_error=self._last_error,
            backend=self._backend_stats(),
        )

    async def finish_calls(self, timeout_s: float) -> int:
        """Wait for the calls that run, then let go of the rest -> how many may still touch host memory."""
        if self._open:
            await asyncio.wait(set(self._open), timeout=timeout_s)
        left = [call for call in self._open if not call.done()]
        for call in left:
            call.cancel()
        return len(left)

    # -- the actor -----------------------------------------------------------------------------------------------------

    @handles(StartCall)
    def _start_call(self, message: StartCall) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(self._bounded(message), name=f"storage-{message.kind}")
        self._open.add(task)
        task.add_done_callback(partial(self._call_done, message.kind))
        self._calls[message.kind] += 1
        return task

    @handles(CallFailed)
    def _call_failed(self, message: CallFailed) -> None:
        self._call_errors[message.kind] += 1
        self._last_error = message.error

    @handles(Counted)
    def _counted(self, message: Counted) -> None:
        self._pages[message.what] += message.pages

    def _backend_stats(self) -> Mapping[str, int | float | str]:
        try:
            return self.backend.stats()
        except Exception as error:
            return {"stats_failed": f"{type(error).__name__}: {error}"}

    # -- inside a call's task ------------------------------------------------------------------------------------------

    def _start(self, kind: CallKind, call: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        task: asyncio.Task[T] = self.call(StartCall(kind, call))
        return task

    async def _bounded(self, message: StartCall) -> Any:
        try:
            return await message.call()
        except (BackendError, StoppedError):
            raise
        except Exception as error:
            # A plug-in's bug is still the outside world: it must not take the cache down, but it must be seen.
            self.log.error("backend_bug", call=message.kind, exc_info=error)
            raise BackendError(f"{message.kind}: {type(error).__name__}: {error}", retryable=False) from error

    def _call_done(self, kind: CallKind, task: asyncio.Task[Any]) -> None:
        self._open.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._note(CallFailed(kind, f"{type(error).__name__}: {error}"))

    def _note(self, message: Counted | CallFailed) -> None:
        if self.state == "running":  # a call may outlive the actor
            self.tell(message)

    async def _query(self, keys: Sequence[str]) -> int:
        return max(0, min(index(await self.backend.exists(keys)), len(keys)))

    async def _read(self, hashes: Sequence[bytes], slots: Slots, wanted: Callable[[], bool]) -> int:
        async with self._reads:
            if not wanted():
                return 0
            keys, objects = self._keys.keys(hashes), self._host.objects(slots)
            found = list(await self.backend.read(keys, objects))[: len(keys)]
        whole = next((at for at, here in enumerate(found) if not here), len(found))
        verdicts = await self._workers.run(
            verify_many, objects[:whole], self._keys.namespace_digest, hashes[:whole], self._keys.chunk
        )
        good = next((at for at, verdict in enumerate(verdicts) if verdict is not Verdict.OK), whole)
        self._note(Counted("read_pages", good))
        for key, verdict in zip(keys, verdicts, strict=False):
            if verdict in (Verdict.CORRUPT, Verdict.EMPTY):
                self._quarantine(key)
            elif verdict is Verdict.FOREIGN:
                self._note(Counted("foreign_pages", 1))
        return good

    async def _seal(self, hashes: Sequence[bytes], slots: Slots) -> bool:
        await self._workers.run(
            seal_many, self._host.objects(slots), self._keys.namespace_digest, hashes, self._keys.chunk
        )
        return True

    async def _write(self, hashes: Sequence[bytes], slots: Slots, wanted: Callable[[], bool]) -> Sequence[Stored]:
        async with self._writes:
            if not wanted():
                return ()
            answers = await self.backend.write(self._keys.keys(hashes), self._host.objects(slots))
        outcomes = [Stored(answer) for answer in answers][: len(hashes)]
        self._note(Counted("written_pages", sum(outcome is Stored.WRITTEN for outcome in outcomes)))
        self._note(Counted("present_pages", sum(outcome is Stored.PRESENT for outcome in outcomes)))
        return outcomes

    def _quarantine(self, key: str) -> None:
        self.log.warning("object_quarantined", key=key)
        self._note(Counted("corrupt_pages", 1))
        if self.state == "running":
            self._start("quarantine", lambda: self.backend.quarantine(key))
