"""StorageTier: the mover of L3.  Owns the stores: the attached one, the next one, and detached ones in which calls hang."""

from __future__ import annotations

import asyncio
from collections import Counter

import anyio

from hicache_actors.config import StorageConfig
from hicache_actors.memory.staging import staging_size
from hicache_actors.runtime import Actor, Workers, WorkersSnapshot, handles
from hicache_actors.tiers.host import HostTier
from hicache_actors.tiers.storage.staging import Staging
from hicache_actors.tiers.storage.store import Source, Store
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


class StorageTier(Actor):
    """Which store is used changes when Core says so (`switch`): jobs that Core opened before go on at the old one."""

    def __init__(self, config: StorageConfig, host: HostTier, workers: Workers, source: Source | None) -> None:
        super().__init__("storage")
        self._config, self._host, self._workers = config, host, workers
        self._calls: Counter[str] = Counter()
        self._call_errors: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._refused: dict[Direction, Counter[Refusal]] = {direction: Counter() for direction in DIRECTIONS}
        self._last_error: str | None = None
        self._next: Store | None = None
        self._detached: list[Store] = []
        self._closings: set[asyncio.Task[list[str]]] = set()
        size = staging_size(host.memory.layout, host.memory.slots, config)
        self._staging = None if size is None else Staging(host.memory.layout, size)
        self._clock = asyncio.get_running_loop().time  # `usage` may be asked on any thread
        self.store = None if source is None else self.make(source)
        self._attached = int(source is not None)

    # -- which store (loop thread) -------------------------------------------------------------------------------------

    def make(self, source: Source) -> Store:
        """The store of ``source``, not open yet."""
        return Store(source, self._config, self._host, self._staging, self._workers, self._note, self.log)

    def prepare(self, store: Store | None) -> None:
        """What the next `switch` shall attach, opened; None takes it back."""
        self._next = store

    def switch(self, attached: bool) -> None:
        """Core has decided: from here on jobs are about the prepared store, or there are none."""
        old, self.store = self.store, None
        if attached:
            self.store, self._next = self._next, None
        if old is not None:
            self._detached.append(old)
        self._forget_gone()
        self._attached += self.store is not None
        self.log.info("storage_switched", old=old and old.url, new=self.store and self.store.url)

    def close_store(self, store: Store, timeout_s: float) -> asyncio.Task[list[str]]:
        """Close a store that is not used any more, in a task of its own: nobody has to wait for it."""
        closing = asyncio.get_running_loop().create_task(store.close(timeout_s), name="storage-close")
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)
        return closing

    async def close(self, timeout_s: float) -> list[str]:
        """The cache ends: wait for the calls that run, then let go of the rest, and close every store -> what may still run."""
        stores = [store for store in (*self._detached, self._next, self.store) if store is not None]
        left: list[str] = []

        async def end(store: Store) -> None:
            if calls := await store.calls.finish(timeout_s):
                left.append(f"{calls} storage calls")
            left.extend(await store.close(timeout_s))

        async with anyio.create_task_group() as group:
            for store in stores:
                group.start_soon(end, store)
        if self._closings:
            await asyncio.wait(set(self._closings), timeout=timeout_s)
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

    def _forget_gone(self) -> None:
        self._detached = [store for store in self._detached if store.calls.open or not store.closed]

    def _note(self, message: CallBegun | CallFailed | CallRefused | Counted) -> None:
        if self.state == "running":  # a call may outlive the actor
            self.tell(message)
