"""Attaching, replacing and detaching the storage while requests run.

A transaction of three parts.  What can be refused is refused before anything happens; each rank opens the store beside what is in
use (`pipelines.attach`); then Core decides, on all ranks alike, and the tier follows in that very place of its effects, so each job
is about one store from its beginning to its end; then the old store is run down, within a deadline, whatever hangs in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import anyio
import msgspec

from hicache_actors.backends.backend import Backend
from hicache_actors.backends.registry import open_backend
from hicache_actors.cache.asking import Asking
from hicache_actors.cache.key_choice import keys_of
from hicache_actors.config import Config
from hicache_actors.core import Core
from hicache_actors.core.words import Attached
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.keys.namespace import SINGLE_RANK
from hicache_actors.memory.shapes import KVShape
from hicache_actors.ranks.group import RankGroup
from hicache_actors.ranks.intents import AskAttach, Detach
from hicache_actors.tiers.storage import Candidate, Source, StorageTier, StoreThreads

T = TypeVar("T")

_THREADS_A_BATCH: Final = 2  #: that a backend may have for one call


def source_of(config: Config, shape: KVShape, store: str | Backend, group: RankGroup | None = None) -> Source:
    """A store by its URL or its backend, fit for this cache and its rank.  Raises `ConfigError`; nothing is opened."""
    if not isinstance(store, str | Backend):
        raise ConfigError(
            "storage", type(store).__name__, "names no store", allowed="a URL, or a Backend that is not open",
            fix="write e.g. 'file:///var/cache/kv'",
        )  # fmt: skip
    url = store if isinstance(store, str) else config.storage.url
    limits = msgspec.structs.replace(config.storage, url=url)
    config = msgspec.structs.replace(config, storage=limits)
    config.check_storage()
    keys = keys_of(config, shape, SINGLE_RANK if group is None else group.key_rank)
    hung = limits.max_hung_calls
    threads = StoreThreads(
        {
            "query": _THREADS_A_BATCH * (limits.query_concurrency + hung),
            "read": _THREADS_A_BATCH * (limits.read_concurrency + hung),
            "write": _THREADS_A_BATCH * (limits.write_concurrency + hung),
        }
    )
    if isinstance(store, str):
        return Source(store, open_backend(store, threads), keys, threads)
    return Source(type(store).__name__, store, keys, threads)


class StorageSwitch:
    """One transaction at a time; one that has begun goes on to its end, whatever becomes of who asked for it.  Loop thread.

    ``slack_s``: what ranks may take, beyond its deadline, to agree on what has become of it.
    """

    def __init__(self, tier: StorageTier, asking: Asking, slack_s: float) -> None:
        self._tier, self._asking, self._slack_s = tier, asking, slack_s
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()

    async def attach(self, source: Source, deadline_s: float) -> None:
        """See `HiCache.attach_storage`."""
        await self._run(self._attach(source, deadline_s))

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

    async def _attach(self, source: Source, deadline_s: float) -> None:
        async with self._turn:
            offered: list[tuple[int, Candidate]] = []

            def told(number: int) -> AskAttach:
                offered.append((number, self._tier.offer(number, source)))
                return AskAttach(number, source.url, deadline_s)

            old = self._tier.store
            outcome: Attached | None = await self._asking.ask(
                lambda core: core.attach(offered[0][0], source.url, deadline_s),
                lambda answer: answer,
                Core.cancel_waiter,
                deadline_s + self._slack_s,
                told=told,
            )
            if outcome is None:
                raise BackendError(f"attach {source.url}: no step within {deadline_s} s")
            if outcome.refused == "degraded":
                self._tier.drop(offered[0][0])  # nobody may have begun to open it
            if outcome.refused is not None:
                raise offered[0][1].error or BackendError(_refusal(source.url, outcome), retryable=False)
            if old is not None and (running := self._tier.being_run_down(old)) is not None:
                await asyncio.wait({running})

    async def _detach(self, deadline_s: float) -> int:
        async with self._turn:
            store = self._tier.store
            if store is None:
                return 0
            deciding = self._asking.decision(lambda core: core.set_storage(False, deadline_s), Detach(deadline_s))
            until_s = anyio.current_time() + deadline_s
            # An engine that makes no steps decides nothing: the store is cut off in time all the same, and Core learns of it later.
            await asyncio.wait({deciding}, timeout=deadline_s)
            left_s = max(0.0, until_s - anyio.current_time())
            await asyncio.wait({self._tier.run_down(store, left_s)})
            return len(store.calls.open)

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


def _refusal(url: str, outcome: Attached) -> str:
    words = {
        "refused": f"its settings and this URL do not fit on rank {outcome.rank}",
        "failed": f"rank {outcome.rank} could not open it",
        "late": f"it has not opened in time on rank {outcome.rank}",
        "stopped": "it was given up before all ranks had opened it",
        "given_up": "the cache of a rank is failing",
        "degraded": "the cache has degraded, and uses no storage any more",
    }
    more = "; the log of that rank says more" if outcome.rank is not None else ""
    return f"attach {url}: {words[outcome.refused or 'stopped']}{more}; nothing has changed"
