"""StorageTier: the mover of L3.  Owns the stores: the attached one, candidates, and detached ones in which calls hang."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import anyio

from hicache_actors.backends.backend import Backend
from hicache_actors.config import StorageConfig
from hicache_actors.core.words import NotOpened, UseStorage
from hicache_actors.errors import ConfigError, HiCacheError
from hicache_actors.masking import masked
from hicache_actors.memory.staging import staging_size
from hicache_actors.runtime import Actor, Workers, WorkersSnapshot, handles
from hicache_actors.tiers.host import HostTier
from hicache_actors.tiers.storage.scrub import Scrubber
from hicache_actors.tiers.storage.staging import Staging
from hicache_actors.tiers.storage.store import OpenedLate, Source, Store
from hicache_actors.tiers.storage.words import (
    DIRECTIONS,
    CallBegun,
    CallFailed,
    CallRefused,
    Counted,
    Direction,
    Refusal,
    StorageSnapshot,
)


class Candidate:
    """A store that shall be attached; ``error``: why it could not be opened here."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self.error: HiCacheError | None = None


class StorageTier(Actor):
    """Which store is used changes when Core says so (`switch`): jobs that Core opened before go on at the old one.

    ``find`` makes the source of a URL or a backend, for this rank; ``close_timeout_s``: for a store that is not used any more.
    """

    def __init__(
        self,
        config: StorageConfig,
        host: HostTier,
        workers: Workers,
        source: Source | None,
        *,
        find: Callable[[str | Backend], Source],
        close_timeout_s: float,
    ) -> None:
        super().__init__("storage")
        self._config, self._host, self._workers = config, host, workers
        self.find, self._close_timeout_s = find, close_timeout_s
        self._calls: Counter[str] = Counter()
        self._call_errors: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._refused: dict[Direction, Counter[Refusal]] = {direction: Counter() for direction in DIRECTIONS}
        self._last_error: str | None = None
        self._weights: str | None = None  # other ones than the configuration says
        self._candidates: dict[int, Candidate] = {}
        self._detached: list[Store] = []
        self._closings: set[asyncio.Task[list[str]]] = set()
        size = staging_size(host.memory.layout, host.memory.slots, config)
        self._staging = None if size is None else Staging(host.memory.layout, size)
        self._run_downs: dict[Store, asyncio.Task[None]] = {}
        self._clock = asyncio.get_running_loop().time  # `usage` may be asked on any thread
        self.store = None if source is None else self.make(source)
        self._attached = int(source is not None)

    # -- which store (loop thread) -------------------------------------------------------------------------------------

    def make(self, source: Source) -> Store:
        """The store of ``source``, not open yet."""
        store = Store(source, self._config, self._host, self._staging, self._workers, self._note, self.log)
        if self._weights is not None:
            store.keys = store.keys.with_weights(self._weights)
        return store

    def offer(self, number: int, source: Source) -> Candidate:
        """The rank that was asked: attach ``number`` is about this store."""
        candidate = self._candidates[number] = Candidate(self.make(source))
        return candidate

    async def make_ready(self, number: int, url: str, deadline_s: float) -> NotOpened | None:
        """Open the store of attach ``number`` -> None, or why it is not ready."""
        candidate = self._candidates.get(number)
        if candidate is None:
            candidate = self._candidates[number] = Candidate(None)
        try:
            if candidate.store is None:
                candidate.store = self.make(self.find(url))
            await candidate.store.open(deadline_s)
        except HiCacheError as error:
            candidate.error = error
            self.log.warning("storage_not_opened", url=masked(url), exc_info=error)
            if isinstance(error, ConfigError):
                return "refused"
            return "late" if isinstance(error, OpenedLate) else "failed"
        return None

    def drop(self, number: int) -> None:
        """Attach ``number`` has been refused, here or on another rank."""
        candidate = self._candidates.pop(number, None)
        if candidate is not None and candidate.store is not None:
            self.close_store(candidate.store)

    def switch(self, use: UseStorage) -> None:
        """Core has decided: from here on jobs are about the store that was made ready, or there are none."""
        old, self.store = self.store, None
        if use.attached:
            candidate = self._candidates.pop(use.number, None)
            self.store = None if candidate is None else candidate.store
        if old is not None:
            self._detached.append(old)
            self.run_down(old, use.deadline_s)
        self._forget_gone()
        self._attached += self.store is not None
        self.log.info("storage_switched", old=old and old.url, new=self.store and self.store.url)
        self.greet()

    def greet(self) -> None:
        """A store is used from here on: say who shares it, and look at what is there."""
        if self.store is not None:
            self.log.info("storage_shared_with", url=self.store.url, who=self.store.keys.shared_with())
            if self._config.probe_keys and self.store.keys.leads:
                self.store.look_around(self._config.probe_keys)

    def scrubber(self) -> Scrubber | None:
        """To be run as long as the cache is open; None if none is wanted."""
        budget = self._config.scrub_mb_s * 1e6
        return Scrubber(lambda: self.store, budget, self._workers, self._note) if budget else None

    def use_weights(self, weights: str) -> None:
        """Core has decided: from here on jobs are about pages of a model with these weights, at whatever store."""
        self._weights = weights
        candidates = (candidate.store for candidate in self._candidates.values())
        for store in (self.store, *candidates):
            if store is not None:
                store.keys = store.keys.with_weights(weights)
        self.log.info("weights_changed", weights=weights)

    def run_down(self, store: Store, deadline_s: float) -> asyncio.Task[None]:
        """Let what is about ``store`` end, then cut it off and close it: within ``deadline_s``, whatever hangs in it.

        -> one task for each store: cancelling a wait for it must not cancel it.
        """
        running = self._run_downs.get(store)
        if running is None:
            running = asyncio.get_running_loop().create_task(self._run_down(store, deadline_s), name="storage-run-down")
            self._run_downs[store] = running
            running.add_done_callback(lambda _: self._run_downs.pop(store, None))
        return running

    def being_run_down(self, store: Store) -> asyncio.Task[None] | None:
        """None once it is over."""
        return self._run_downs.get(store)

    def close_store(self, store: Store) -> asyncio.Task[list[str]]:
        """Close a store that is not used any more, in a task of its own: nobody has to wait for it."""
        closing = asyncio.get_running_loop().create_task(store.close(self._close_timeout_s), name="storage-close")
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)
        return closing

    async def close(self, timeout_s: float) -> list[str]:
        """The cache ends: wait for the calls that run, then let go of the rest, and close every store -> what may still run."""
        candidates = [candidate.store for candidate in self._candidates.values()]
        stores = [store for store in (*self._detached, *candidates, self.store) if store is not None]
        left: list[str] = []

        async def end(store: Store) -> None:
            if calls := await store.calls.finish(timeout_s):
                left.append(f"{calls} storage calls")
            left.extend(await store.close(timeout_s))

        async with anyio.create_task_group() as group:
            for store in stores:
                group.start_soon(end, store)
        for running in self._run_downs.values():
            running.cancel()
        if ending := {*self._closings, *self._run_downs.values()}:
            await asyncio.wait(ending, timeout=timeout_s)
        return left

    def unmap(self, *, keep_mapped: bool) -> None:
        """After `close`: let go of the staging slots; ``keep_mapped``: something may still touch them."""
        if self._staging is not None:
            self._staging.close(keep_mapped=keep_mapped)

    # -- observation ---------------------------------------------------------------------------------------------------

    @property
    def threads(self) -> tuple[WorkersSnapshot, ...]:
        return () if self.store is None else self.store.threads.snapshots()

    def usage(self) -> StorageSnapshot | None:
        """None if there has never been a store.  Any thread."""
        if not self._attached:
            return None
        now_s, store = self._clock(), self.store
        detached_calls = sum(len(each.calls.open) for each in self._detached)
        return StorageSnapshot(
            url=None if store is None else store.url,
            scope=None if store is None else store.backend.scope,
            attached=self._attached,
            calls=dict(self._calls),
            errors=dict(self._call_errors),
            refused={direction: dict(reasons) for direction, reasons in self._refused.items()},
            read_pages=self._pages["read_pages"],
            written_pages=self._pages["written_pages"],
            present_pages=self._pages["present_pages"],
            joined_pages=self._pages["joined_pages"],
            corrupt_pages=self._pages["corrupt_pages"],
            foreign_pages=self._pages["foreign_pages"],
            open_calls=detached_calls + (0 if store is None else len(store.calls.open)),
            detached_calls=detached_calls,
            read_latency_s=None if store is None else store.calls.latency.average_s(now_s),
            lanes={} if store is None else {name: lane.snapshot(now_s) for name, lane in store.calls.lanes.items()},
            staging={} if self._staging is None else self._staging.snapshot(),
            shared_with=None if store is None else store.keys.shared_with(),
            neighbours={} if store is None else store.hits.neighbours.others,
            lookups=self._pages["lookups"],
            lookup_hits=self._pages["lookup_hits"],
            never_hits=store is not None and store.hits.never_hits,
            scrubbed_objects=self._pages["scrubbed_objects"],
            scrubbed_bytes=self._pages["scrubbed_bytes"],
            scrubbed_bad_objects=self._pages["scrubbed_bad_objects"],
            last_error=self._last_error,
            backend={} if store is None else store.stats(),
        )

    # -- the actor -----------------------------------------------------------------------------------------------------

    @handles(CallBegun)
    def _call_begun(self, message: CallBegun) -> None:
        self._calls[message.kind] += 1

    @handles(CallFailed)
    def _call_failed(self, message: CallFailed) -> None:
        self._call_errors[message.kind] += 1
        self._last_error = message.error

    @handles(CallRefused)
    def _call_refused(self, message: CallRefused) -> None:
        self._refused[message.direction][message.reason] += 1

    @handles(Counted)
    def _counted(self, message: Counted) -> None:
        self._pages[message.what] += message.pages

    async def _run_down(self, store: Store, deadline_s: float) -> None:
        until_s = anyio.current_time() + deadline_s
        await store.run_down(deadline_s)
        closing = self.close_store(store)
        await asyncio.wait({closing}, timeout=max(0.0, until_s - anyio.current_time()))

    def _forget_gone(self) -> None:
        self._detached = [store for store in self._detached if store.calls.open or not store.closed]

    def _note(self, message: CallBegun | CallFailed | CallRefused | Counted) -> None:
        if self.state == "running":  # a call may outlive the actor
            self.tell(message)
