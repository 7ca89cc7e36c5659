"""The parts of an open cache: how they are put together, started, and stopped.

`planning.plan` refuses what cannot be honoured before anything has been started.  `Parts.start` starts actors in the order of the
data (host, device, storage); `Parts.stop` undoes it in reverse, each stage within its deadline.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from hicache_actors.cache.shadow_mode import Shadow
from hicache_actors.cache.storage_switch import source_of
from hicache_actors.config import Config
from hicache_actors.core import Core, CoreConfig
from hicache_actors.core.config import SlotOwner
from hicache_actors.core.words import DEVICE, HOST, Effect, Wake
from hicache_actors.cuda_ext.device import Device, Listener
from hicache_actors.errors import HiCacheError, PeerError, TransferError
from hicache_actors.events import EventStream
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.poison import poison
from hicache_actors.memory.report import SizingReport
from hicache_actors.pipelines.effects import Pipelines
from hicache_actors.pipelines.movers import Movers
from hicache_actors.ranks import AutoDriver, Board, Driver, StepDriver, exchange_alone
from hicache_actors.ranks.group import RankGroup
from hicache_actors.ranks.link import RankLink
from hicache_actors.runtime import Job, LoopLag, System, Workers, bind_log
from hicache_actors.tiers.device import DeviceTier
from hicache_actors.tiers.host import HostTier, chunk_pages
from hicache_actors.tiers.storage import Source, StorageTier

DriverKind = Literal["auto", "step"]
OPEN_DEADLINE_S: Final = 10.0  #: of the store, when the cache is opened


class Parts:
    """Everything inside one open cache.  Made by `Plan.build`, on the loop that it will live on."""

    def __init__(
        self,
        config: Config,
        kv: KVTensors,
        memory: HostMemory,
        device: Device,
        source: Source | None,
        slots: SlotOwner,
        driver: DriverKind,
        report: SizingReport,
        disabled: str | None,
        link: RankLink | None = None,
        group: RankGroup | None = None,
    ) -> None:
        self.link, self.group = link, group
        self.on_wake: Callable[[Wake], None] | None = None  #: owner thread, before the waiter is told
        self.config, self.kv, self.memory, self.device = config, kv, memory, device
        self.report, self.disabled = report, disabled
        self.log = bind_log(part="cache")
        core_config = _core_config(config, kv, memory, slots, storage=source is not None, enabled=disabled is None)
        core_config = msgspec.structs.replace(core_config, host_chunk_pages=chunk_pages(memory, device))
        if link is not None:
            core_config = msgspec.structs.replace(core_config, **link.sizes)
        self.core = Core(core_config)
        if config.poison_freed:
            self.core.state.pools[DEVICE].on_free = functools.partial(poison, kv)
            self.core.state.pools[HOST].on_free = functools.partial(poison, memory)
        self.board = Board()
        self.system = System(stop_deadline_s=config.close_timeout_s, on_failure=self._system_failed)
        self.loop_lag = LoopLag()
        self._watchers: list[Job] = []
        self._listener: Listener | None = None
        self.workers = Workers("hash", 2, max_lost=None)  # computations: they end, and others wait for that
        self.forward_workers = Workers("forward", 4, max_lost=None)
        self.host_tier = HostTier(memory)
        self.device_tier = DeviceTier(device, kv, memory, self._device_lost)
        self.storage_tier = StorageTier(
            config.storage,
            self.host_tier,
            self.workers,
            source,
            find=lambda store: source_of(config, kv.shape, store, group),
            close_timeout_s=config.close_timeout_s,
        )
        self.movers = Movers(
            self.device_tier,
            self.host_tier,
            self.storage_tier,
            self.workers,
            deadlines=config.deadlines,
            storage_config=config.storage,
            page_size=config.page_size,
            rank=0 if group is None else group.rank,
            round_s=None if link is None else link.group.deadline_s,
        )
        self.pipelines = Pipelines(self.system, self.movers, self.board, kv.shape.layers)
        self.driver = self._make_driver(driver)
        self.events = EventStream(config.page_size, self.workers, self.driver.post)
        self.pipelines.on_changed = self.events.take
        self.shadow = Shadow(self.system, self.workers, kv) if config.shadow and disabled is None else None

    async def start(self) -> None:
        """Raises what a backend raises when it is opened (with ranks: `BackendError` on all); nothing is left running then."""
        await self._open_store()
        await self.system.open()
        await self.system.start(self.host_tier, self.device_tier, self.storage_tier)
        if not getattr(asyncio.get_running_loop(), "threadless", False):  # virtual time has no lag
            self._watchers.append(self.system.spawn("loop_lag", self.loop_lag.run))
        if self.device.kind == "cuda":
            await self.workers.run(self.host_tier.make_ready, self.device, range(self._first_pages()))
        self._listener = self.device.listen()
        if self.disabled is not None:
            self.log.warning("cache_disabled", by=self.disabled)
        self.log.info("cache_opened", report=self.report.lines())
        self.storage_tier.greet()
        self.check_room_for_objects()
        if isinstance(self.driver, AutoDriver):
            self.driver.catch_up()  # the rest of the host memory begins to open; with steps, in the first one
        if (scrubber := self.storage_tier.scrubber()) is not None:
            self._watchers.append(self.system.spawn("scrub", scrubber.run))

    def check_room_for_objects(self) -> None:
        """Say it if the store that is used takes nothing of ours: such a cache works, and stores nothing for ever."""
        store, object_bytes = self.storage_tier.store, self.memory.layout.longest_object_bytes
        try:
            longest_bytes = None if store is None else store.backend.longest_bytes()
        except Exception as error:  # of a store that somebody else has written
            self.log.warning("backend_bug", call="longest_bytes", exc_info=error)
            return
        if store is not None and longest_bytes and longest_bytes < object_bytes:
            self.log.warning(
                "storage_objects_too_long",
                url=store.url,
                object_bytes=object_bytes,
                longest_bytes=longest_bytes,
                fix="nothing can be stored there: use a store of its own for this model",
            )

    async def stop(self) -> None:
        """Never raises, never takes longer than a few times ``close_timeout_s``; says what it had to leave behind."""
        limit_s = self.config.close_timeout_s
        self.host_tier.stop_opening()
        self.events.close()
        for watcher in self._watchers:
            watcher.cancel()
        left: list[str] = [*await self.system.close()]
        left += await self.storage_tier.close(limit_s)
        if not await self._close_device(limit_s):
            left.append("device copies")
        if self._listener is not None:
            await self._listener.close(limit_s)
        for workers in (self.workers, self.forward_workers):
            left += await workers.aclose(limit_s)
        if waiting := await self.pipelines.stop_draining():
            self.log.warning("closed_before_events", drains=waiting)
        self.driver.close()
        if self.link is not None:
            self.link.close()
        self.core.close()
        for pool in self.core.state.pools:
            pool.on_free = None  # what ends late must not find closed memory
        self.memory.close(keep_mapped=bool(left))
        self.storage_tier.unmap(keep_mapped=bool(left))
        if left:
            self.log.error("closed_with_work_left", left=left, memory="kept mapped until the process ends")

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _open_store(self) -> None:
        store, failure = self.storage_tier.store, None
        if store is None:
            return
        try:
            await store.open(OPEN_DEADLINE_S)
        except HiCacheError as error:
            if self.link is None:
                raise
            failure = error
        if self.link is not None:
            await self.link.agree_on_opening(failure, OPEN_DEADLINE_S)

    def _first_pages(self) -> int:
        """Host slots that are to be ready when the cache opens: the first chunk, or all if there are no others."""
        config = self.core.config
        return config.first_host_pages if config.first_host_pages < config.host_pages else self.memory.slots

    async def _close_device(self, limit_s: float) -> bool:
        if self.device.kind == "sim":
            return self.device.close(limit_s)
        closer = Workers("close", 1)
        try:
            return await closer.run(self.device.close, limit_s)
        finally:
            closer.close()

    def _make_driver(self, kind: DriverKind) -> Driver:
        loop = asyncio.get_running_loop()
        opened_s = loop.time()

        def clock_ms() -> int:
            return int((loop.time() - opened_s) * 1000)

        owner = threading.get_ident()

        def schedule(callback: Callable[[], None]) -> None:
            if loop.is_closed():
                return  # a copy or a read may end after everybody has gone
            if threading.get_ident() == owner:
                loop.call_soon(callback)  # it need not be woken: no system calls
            else:
                loop.call_soon_threadsafe(callback)

        if kind == "step":
            link = self.link
            return StepDriver(
                self.core,
                self.board,
                clock_ms,
                self._execute,
                exchange_alone if link is None else link.sync.exchange,
                lag=1 if self.group is None else self.group.lag,
                on_failure=self._core_failed,
                intake=None if link is None else link.intake,
                explain=None if link is None else lambda: link.explain(self.core),
            )
        return AutoDriver(
            self.core,
            self.board,
            clock_ms,
            self.pipelines.execute,
            schedule,
            lambda delay_s, callback: loop.call_later(delay_s, callback).cancel,
            on_failure=self._core_failed,
        )

    def _execute(self, effects: list[Effect]) -> None:
        if self.link is not None:
            for effect in effects:
                if isinstance(effect, Wake):
                    self.link.intake.woken(effect.waiter, effect.value)
                    if self.on_wake is not None:
                        self.on_wake(effect)
        self.pipelines.execute(effects)

    def _system_failed(self, error: BaseException) -> None:
        """A bug inside: open work answers 0, and the cache degrades in the apply that learns of it."""
        self.pipelines.give_up(error)
        self.driver.fail(error)

    def _device_lost(self, error: BaseException) -> None:
        """Its copies end with errors, so nothing hangs; but none will go well again."""
        self.driver.fail(TransferError(f"device {self.device.name} is lost: {error}"))

    def _core_failed(self, error: BaseException) -> None:
        if self.link is not None and isinstance(error, PeerError):
            self.link.sync.lose(error)
        if error is not self.system.failed:
            self.log.error("cache_degraded", rings=self.system.describe_rings(), exc_info=error)


def _core_config(
    config: Config, kv: KVTensors, memory: HostMemory, slots: SlotOwner, *, storage: bool, enabled: bool
) -> CoreConfig:
    return CoreConfig(
        page_size=config.page_size,
        device_pages=kv.pages,
        host_pages=memory.slots if enabled else 0,
        write_policy=config.write_policy,
        selective_threshold=config.policy.selective_threshold,
        write_back_water_mark=config.policy.write_back_water_mark,
        write_back_dirty_cap=config.policy.write_back_dirty_cap,
        eviction=config.eviction,
        slru_protected_hits=config.policy.slru_protected_hits,
        storage=storage,
        store_on=config.storage.store_on,
        store_water_mark=config.storage.store_water_mark,
        gather_s=config.storage.gather_s,
        enabled=enabled,
        slots=slots,
        prefetch_threshold_tokens=config.storage.prefetch_threshold_tokens,
        prefetch_policy=config.storage.prefetch_policy,
    )
