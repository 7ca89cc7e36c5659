"""One simulated rank: a real cache, its engine, and a world of its own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal, TypeAlias, get_args

import anyio
import msgspec

from hicache_actors.backends.backend import Backend
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Fault, Faulty, Hanging, Slow, Verb, Wrapper, at_random
from hicache_actors.cache.api import HiCache
from hicache_actors.cache.storage_switch import source_of
from hicache_actors.config import Deadlines
from hicache_actors.core.words import Effect, Grant, StartBackup, StartDrain, StartLoad, StartWriteBack
from hicache_actors.errors import BackendError, PeerError, StoppedError, TransferError
from hicache_actors.memory.kv import KVTensors
from hicache_actors.ranks import StepDriver
from hicache_actors.testing.ranks.engine import ScriptedEngine
from hicache_actors.testing.ranks.network import SimTransport
from hicache_actors.testing.ranks.options import RankOptions
from hicache_actors.testing.sim_device import SimDevice
from hicache_actors.testing.small import SHAPE, small_config
from hicache_actors.testing.toy_model import ToyModel
from hicache_actors.tiers.storage import Source

_STREAMS: Final = ("load", "write_back")
_TOUCHING: Final = (StartLoad, StartWriteBack, StartBackup, StartDrain, Grant)


DoorKind: TypeAlias = Literal["open", "slow", "shut", "hung"]


class Door(Wrapper):
    """A store that opens at once, slowly, not at all, or never answers."""

    def __init__(self, inner: Backend, kind: DoorKind, draw: random.Random) -> None:
        super().__init__(inner)
        self._kind, self._draw = kind, draw

    async def open(self) -> None:
        if self._kind == "slow":
            await anyio.sleep(self._draw.expovariate(1 / 0.1))
        elif self._kind == "hung":
            await anyio.sleep(1000.0)
        elif self._kind == "shut":
            raise BackendError("planted: it is shut")
        await super().open()


class SimRank:
    """Its device (a speed, copies that hang or fail), store (contents, delays, faults, hung calls), clock and pace are its own.

    ``local`` draws what no other rank knows.
    """

    cache: HiCache
    engine: ScriptedEngine

    def __init__(self, options: RankOptions, transport: SimTransport, number: int) -> None:
        self.options, self.number = options, number
        self.local = random.Random(f"rank {number} of {options.seed}")
        self.device = SimDevice(f"sim{number}")
        self.device.throttle(self.local.choice((0.001, 0.01, 1.0)), self.local.choice((1e-5, 1e-3)))
        self.objects = MemoryBackend()  #: what its store holds
        self.others: dict[str, MemoryBackend] = {}  #: what the stores hold that the operator attaches, by URL
        self.store = self._store(self.objects)
        self.doors: dict[str, DoorKind] = {}  #: how stores open here: the "first" one, and by URL; others are drawn
        self.freed_early: list[int] = []  #: jobs that left Core while their copies or reads still ran here
        self._transport = transport

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SimRank]:
        """Meet the other ranks.  This one may have more room than they have: what fits everywhere counts."""
        options, more = self.options, self.local.randrange(3)
        kv = KVTensors.make(SHAPE, options.device_pages + more)
        config = small_config(
            host_pages=options.host_pages + 2 - more,
            deadlines=Deadlines(load_s=0.5, write_back_s=0.5, backup_s=1.0),
        )
        async with HiCache.open(
            config,
            kv,
            driver="step",
            device=self.device,
            backend=Door(self.store, self.doors.get("first", "open"), self.local),
            ranks=options.group(self.number),
            transport=self._transport,
        ) as self.cache:
            self._skew_clock()
            self._watch_jobs()
            self.cache.movers.storage.find = self._find
            self.engine = ScriptedEngine(self.cache, ToyModel(kv), options.seed, self.local, self._begin)
            yield self

    @property
    def driver(self) -> StepDriver:
        assert isinstance(self.cache.driver, StepDriver)
        return self.cache.driver

    @property
    def lost_peers(self) -> bool:
        return isinstance(self.driver.failure, PeerError)

    async def misbehave(self) -> None:
        """What happens on this rank only, until it is cancelled."""
        draw = self.local
        while True:
            await anyio.sleep(draw.expovariate(1 / 0.2))
            kind = draw.randrange(6)
            if kind == 0:
                with self.device.gate(draw.choice(_STREAMS)):  # copies hang, maybe past their deadline
                    await anyio.sleep(draw.expovariate(1 / 0.6))
            elif kind == 1:
                self.device.fail_next(TransferError("injected"))
            elif kind == 2:
                await self._hang(draw.expovariate(1 / 0.5))
            elif kind == 3:
                listed = self.objects.keys()
                lost = [key async for key in listed if draw.random() < 0.1]
                await self.objects.delete(lost)

    async def _hang(self, seconds: float) -> None:
        """The store that was made last."""
        hanging = self.hanging
        hanging.hang_again()
        try:
            await anyio.sleep(seconds)
        finally:
            hanging.release()

    def slow_store(self, latency_s: float) -> None:
        """Each call to its store takes so long, at least."""
        self.store.latency_s = latency_s

    def decisions(self) -> tuple[object, ...]:
        """What must be equal on all ranks after a step."""
        core = self.cache.core
        store = self.cache.movers.storage.store
        return core.log_digest, self.cache.needs_step, core.usage(), self.engine.trace[-1], store and store.url

    async def operate(self) -> None:
        """The leader's: attach, replace, empty and detach stores, until it is cancelled or the cache is closed."""
        draw, stats = self.local, self.engine.stats
        while True:
            await anyio.sleep(draw.expovariate(1 / 0.3))
            try:
                chance = draw.random()
                if chance < 0.2:
                    await self.cache.detach_storage(draw.uniform(0.05, 1.0))
                    stats["store detached"] += 1
                elif chance < 0.5:
                    await self._clear(draw.choice((0.1, 1.0)))
                else:
                    url = f"memory://{draw.randrange(3)}"
                    await self.cache.attach_storage(url, deadline_s=draw.choice((0.1, 1.0)))
                    stats["store attached"] += 1
            except BackendError:
                stats["store refused"] += 1
            except StoppedError:
                return

    async def _clear(self, deadline_s: float) -> None:
        if self.cache.movers.storage.store is not None:
            await self.cache.clear_storage(deadline_s)
            self.engine.stats["store cleared"] += 1

    async def _begin(self) -> None:
        if self.options.operator:
            await self._carry_intake()
        await self.cache.begin_step_async(self.options.round_deadline_s)

    async def _carry_intake(self) -> None:
        """The broadcast of the engine."""
        if self.lost_peers:
            return
        flight = self._transport.broadcast(self.cache.intake_bytes() if self.number == 0 else b"", 4.0)
        ended = anyio.Event()
        flight.when_done(ended.set)
        await ended.wait()
        try:
            self.cache.apply_intake(flight.result(0.0))
        except PeerError as error:
            self.driver.lose_peers(error)

    def _find(self, store: str | Backend) -> Source:
        """What the operator names is another store on each rank, and may not open there."""
        assert isinstance(store, str)
        objects = self.others.setdefault(store, MemoryBackend())
        (drawn,) = self.local.choices(get_args(DoorKind), (20, 2, 1, 1))
        backend = Door(self._store(objects), self.doors.get(store, drawn), self.local)
        source = source_of(self.cache._parts.config, SHAPE, backend, self.options.group(self.number))
        return msgspec.structs.replace(source, url=store)

    def _store(self, objects: MemoryBackend) -> Slow:
        seed = self.options.seed * 100 + self.number
        rates: dict[tuple[Verb, Fault | type[Exception]], float] = {
            ("exists", BackendError): 0.005,
            ("exists", Fault.LIE): 0.02,
            ("read", Fault.MISS): 0.01,
            ("read", Fault.FLIP): 0.01,
            ("write", Fault.FAIL): 0.01,
            ("write", Fault.LOSE): 0.01,
        }
        self.faulty = Faulty(objects, at_random(seed, rates))
        self.hanging = Hanging(self.faulty, ("exists", "read", "write"))
        self.hanging.release()
        return Slow(self.hanging, 0.001, object_s=0.0005, jitter_s=self.local.choice((0.0, 0.002, 0.02)), seed=seed)

    def _skew_clock(self) -> None:
        """Its clock began at another time, and is fast or slow."""
        driver, skew_ms, pace = self.driver, self.local.randrange(5000), self.local.uniform(0.9, 1.1)
        clock_ms = driver._clock_ms
        driver._clock_ms = lambda: skew_ms + int(clock_ms() * pace)

    def _watch_jobs(self) -> None:
        """RELEASED is agreed only when everything on the job's slots has ended on every rank, so on this one too."""
        board, driver, core = self.driver.board, self.driver, self.cache.core
        touching: set[int] = set()
        execute, forget = driver._execute, board.forget

        def watch(effects: list[Effect]) -> None:
            touching.update(effect.job for effect in effects if isinstance(effect, _TOUCHING))
            execute(effects)

        def check(job: int) -> None:
            if job in touching and not board.is_released(job) and not core.degraded:
                self.freed_early.append(job)
            touching.discard(job)
            forget(job)

        driver._execute = watch
        board.forget = check  # type: ignore[method-assign]
