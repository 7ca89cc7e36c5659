"""Attaching, replacing and detaching the storage while requests run.

A transaction of three parts.  What can be refused is refused before anything happens, and opened beside what is in use; then Core
decides, as an agreed intent, and the tier follows in that very place of its effects, so each job is about one store from its
beginning to its end; then the old store is run down, within a deadline, whatever hangs in it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeAlias, TypeVar

import anyio
import msgspec

from hicache_actors.backends.backend import Backend
from hicache_actors.backends.registry import open_backend
from hicache_actors.config import Config
from hicache_actors.core import Core
from hicache_actors.errors import BackendError
from hicache_actors.key_choice import keys_of
from hicache_actors.keys.namespace import SINGLE_RANK
from hicache_actors.memory.shapes import KVShape
from hicache_actors.ranks.group import RankGroup
from hicache_actors.tiers.storage import Source, StorageTier, Store, StoreThreads

T = TypeVar("T")
Decide: TypeAlias = Callable[[Callable[[Core], None]], Awaitable[None]]

_THREADS_A_BATCH: Final = 2  #: that a backend may have for one call


def source_of(config: Config, shape: KVShape, store: str | Backend, group: RankGroup | None = None) -> Source:
    """A store by its URL or its backend, fit for this cache and its rank.  Raises `ConfigError`; nothing is opened."""
    url = store if isinstance(store, str) else config.storage.url
    limits = msgspec.structs.replace(config.storage, url=url)
    config = msgspec.structs.replace(config, storage=limits)
    config.check_storage()
    keys = keys_of(config, shape, SINGLE_RANK if group is None else group.key_rank)
    hung = limits.max_hung_calls
    threads = StoreThreads(
        {
            "query": limits.query_concurrency + hung,
            "read": _THREADS_A_BATCH * (limits.read_concurrency + hung),
            "write": _THREADS_A_BATCH * (limits.write_concurrency + hung),
        }
    )
    if isinstance(store, str):
        return Source(store, open_backend(store, threads), keys, threads)
    return Source(type(store).__name__, store, keys, threads)


class StorageSwitch:
    """One transaction at a time; one that has begun goes on to its end, whatever becomes of who asked for it.  Loop thread.

    ``decide`` runs an intent in Core's next section and waits for it.
    """

    def __init__(self, tier: StorageTier, decide: Decide, close_timeout_s: float) -> None:
        self._tier, self._decide, self._close_timeout_s = tier, decide, close_timeout_s
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()

    async def attach(self, source: Source, deadline_s: float) -> None:
        """See `HiCache.attach_storage`."""
        await self._run(self._attach(self._tier.make(source), deadline_s))

    async def detach(self, deadline_s: float) -> int:
        """See `HiCache.detach_storage`."""
        return await self._run(self._detach(deadline_s))

    async def close(self, timeout_s: float) -> None:
        """Wait for what has begun, then cancel it; an opened store is left to `StorageTier.close`."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=timeout_s)
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running), timeout=timeout_s)

    async def _attach(self, store: Store, deadline_s: float) -> None:
        async with self._turn:
            until_s = anyio.current_time() + deadline_s
            try:
                await store.open(deadline_s)
                self._tier.prepare(store)
                old = self._tier.store
                if not await self._decided(True, until_s, withdraw=True):
                    raise BackendError(f"attach {store.url}: no step within {deadline_s} s")
            except BaseException:
                if self._tier.store is not store:
                    self._tier.prepare(None)
                    self._tier.close_store(store, self._close_timeout_s)
                raise
            if old is not None:
                await self._run_down(old, anyio.current_time() + deadline_s)

    async def _detach(self, deadline_s: float) -> int:
        async with self._turn:
            until_s = anyio.current_time() + deadline_s
            store = self._tier.store
            if store is None:
                return 0
            # An engine that makes no steps decides nothing: the store is cut off in time all the same, and Core learns of it later.
            await self._decided(False, until_s, withdraw=False)
            await self._run_down(store, until_s)
            return len(store.calls.open)

    async def _decided(self, attached: bool, until_s: float, *, withdraw: bool) -> bool:
        """Ask Core to switch, and wait -> whether it has, by then.  ``withdraw``: if it has not, it shall not do so later."""
        chance = threading.Lock()  # taken once: by Core's thread that decides, or here

        def decide(core: Core) -> None:
            if chance.acquire(blocking=False):
                core.set_storage(attached)

        deciding = asyncio.ensure_future(self._decide(decide))
        try:
            await asyncio.wait({deciding}, timeout=max(0.0, until_s - anyio.current_time()))
            if not deciding.done() and (not withdraw or chance.acquire(blocking=False)):
                return False
            await asyncio.wait({deciding})  # its thread is at it
        except BaseException:
            chance.acquire(blocking=False)
            raise
        finally:
            deciding.cancel()
        deciding.result()
        return True

    async def _run_down(self, store: Store, until_s: float) -> None:
        await store.run_down(max(0.0, until_s - anyio.current_time()))
        closing = self._tier.close_store(store, self._close_timeout_s)
        await asyncio.wait({closing}, timeout=max(0.0, until_s - anyio.current_time()))

    async def _run(self, transaction: Coroutine[Any, Any, T]) -> T:
        task = asyncio.get_running_loop().create_task(transaction, name="storage-switch")
        self._running.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait({task})
        return task.result()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # who asked may have gone
