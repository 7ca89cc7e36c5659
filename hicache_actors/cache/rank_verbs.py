"""The verbs of an engine with several ranks: ``HiCache.open(..., driver="step", ranks=RankGroup(...))``.

Every rank makes the same calls between `begin_step` and `end_step`, in the same order.  What the leader's frontends ask for
(`acquire`, `stored`, ...) comes to all ranks as bytes: with the engine's own broadcast (`intake_bytes`, `apply_intake`), or on our
channel (`wait_intake`), between two steps.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Final
from weakref import WeakValueDictionary

import anyio

from hicache_actors.backends.backend import Backend
from hicache_actors.cache.asking import LAST_STEP_S
from hicache_actors.cache.assembly import Parts
from hicache_actors.cache.handles import Inside, Lease
from hicache_actors.core import CoreLease
from hicache_actors.core.words import Wake
from hicache_actors.errors import PeerError, UsageError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.ranks import StepDriver
from hicache_actors.ranks.link import RankLink
from hicache_actors.ranks.sync import Ticket

_ARRIVED_S: Final = 0.05  #: for a round that has told of its end already
_IDLE_STEP_S: Final = 0.005  #: between the steps that a cache makes by itself


class RankVerbs(Inside):
    """Raise `UsageError` on a cache of one rank, except `acquired`."""

    _parts: Parts

    def __init__(self) -> None:
        self._handles: WeakValueDictionary[int, Lease] = WeakValueDictionary()
        self._handles_lock = threading.Lock()
        self._kept: dict[int, tuple[CoreLease, Lease]] = {}
        if self._parts.link is not None and not self._parts.link.group.leads:
            self._parts.on_wake = self._keep

    def intake_bytes(self) -> bytes:
        """The leader, between two steps: what its frontends have asked for since the last call.

        Each answer must be given to `apply_intake` once, in order, on all ranks, this one included.
        """
        return self._step_driver().intake_bytes()

    def apply_intake(self, data: bytes) -> None:
        """All ranks, between two steps: the next `begin_step` does what ``data`` asks for, on all of them alike."""
        self._step_driver().apply_intake(data)

    def wait_intake(self, timeout_s: float | None = None) -> bool:
        """All ranks, between two steps, on our own channel: rest until the leader's frontends ask for something, and apply it.

        -> False once the leader has waited for ``timeout_s`` (of the other ranks it is ignored).  0 sends what there is.  Blocks;
        while it does, the leader gives signs of life, so that each rank learns of a dead one.

        Raises `PeerError` if a rank is gone: the next step degrades this cache.
        """
        try:
            return self._apply(self._link().receive(timeout_s))
        except PeerError as error:
            self._step_driver().lose_peers(error)
            raise

    async def wait_intake_async(self, timeout_s: float | None = None) -> bool:
        """`wait_intake` without blocking the loop.  A caller that is cancelled must not use the channel again."""
        link = self._link()
        try:
            return self._apply(await link.workers.run(link.receive, timeout_s))
        except PeerError as error:
            self._step_driver().lose_peers(error)
            raise

    def acquired(self, rid: str) -> Lease | None:
        """The lease that the leader's `acquire` has brought about for ``rid``: for the engine, on every rank.  Owner thread.

        None while its fetch is under way.  Whoever waits in `acquire` on the leader holds the same lease, and ends it.
        """
        self.driver.check_owner()
        core_lease = self.core.find_lease(rid)
        if core_lease is None or not isinstance(core_lease.tokens, Prompt):
            return None
        return self.handle_of(core_lease, core_lease.tokens)

    def handle_of(self, core_lease: CoreLease, prompt: Prompt) -> Lease:
        """One handle for each lease, whoever asks first.  Any thread."""
        with self._handles_lock:
            handle = self._handles.get(core_lease.number)
            if handle is None:
                handle = self._handles[core_lease.number] = Lease(self, core_lease, prompt)
            return handle

    # -- inside --------------------------------------------------------------------------------------------------------

    def _step_driver(self) -> StepDriver:
        driver = self._parts.driver
        if not isinstance(driver, StepDriver):
            raise UsageError('this cache decides by itself; steps need HiCache.open(..., driver="step")')
        return driver

    def _link(self) -> RankLink:
        if self._parts.link is None:
            raise UsageError("this cache has one rank; HiCache.open(..., ranks=...) makes it one of several")
        return self._parts.link

    def _apply(self, data: bytes | None) -> bool:
        if data is None:
            return False
        self.apply_intake(data)
        return True

    def _keep(self, effect: Wake) -> None:
        """Where nobody waits in `acquire`, the lease's handle is kept for `acquired` until the lease ends."""
        for number in [number for number, (lease, _) in self._kept.items() if lease.closed]:
            del self._kept[number]
        lease = effect.value
        if isinstance(lease, CoreLease) and isinstance(lease.tokens, Prompt):
            self._kept[lease.number] = lease, self.handle_of(lease, lease.tokens)

    async def _begin_step(self, timeout_s: float) -> None:
        driver, link = self._step_driver(), self._parts.link
        if (pace_s := driver.pace_s) > 0:
            await anyio.sleep(pace_s)
        ticket = driver.next_round
        if link is not None and isinstance(ticket, Ticket):
            await link.sync.arrived(ticket, timeout_s)
            timeout_s = _ARRIVED_S
        driver.begin_step(timeout_s, pace=False)

    async def _step_until_idle(self, limit_s: float, *, dirty: bool) -> None:
        """The engine has stopped stepping: what it left open is brought to its end here, on all ranks alike; what it left dirty is
        saved.

        Ended by what is replicated only (open work, the agreed clock), so that all ranks make the same rounds.
        """
        driver = self._step_driver()
        if driver.step_open:
            self._parts.log.warning("closed_inside_a_step")
            return
        driver.closing = True
        clock = _AgreedClock(driver, limit_s)
        if dirty:
            await self._begin_step(self._patience_s)
            driver.decide(lambda core: core.drained())
            driver.end_step()
        while driver.needs_step and not clock.late:
            await self._own_step()

    async def _drain_in_own_steps(self, deadline_s: float) -> int:
        driver = self._step_driver()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        clock = _AgreedClock(driver, deadline_s)
        await self._begin_step(self._patience_s)
        waiter: int = driver.decide(lambda core: core.drained())
        self._parts.pipelines.wait_for(waiter, future, int)
        driver.end_step()
        while not future.done():
            await anyio.sleep(_IDLE_STEP_S)
            await self._begin_step(self._patience_s)
            if clock.late and not future.done():
                self._parts.pipelines.leave(waiter)
                left = driver.decide(lambda core: core.cancel_waiter(waiter))
                if left is not None:
                    future.set_result(int(left))
            driver.end_step()
        return future.result()

    async def _own_step(self) -> None:
        await self._begin_step(self._patience_s)
        self._step_driver().end_step()
        await anyio.sleep(_IDLE_STEP_S)

    @property
    def _patience_s(self) -> float:
        return 0.0 if self._parts.link is None else self._parts.link.sync.deadline_s

    @property
    def _agreeing_s(self) -> float:
        """How long an answer may be on its way from Core, beyond what it waits for."""
        return LAST_STEP_S + self._patience_s

    def _check_switch(self, verb: str, store: str | Backend = "") -> None:
        """Raises `UsageError` where the storage is not switched: it is the leader's, for all ranks."""
        link = self._parts.link
        if link is None:
            return
        if not link.group.leads:
            raise UsageError(f"{verb} is the leader's (rank 0), for all ranks")
        if not isinstance(store, str):
            raise UsageError(
                f"{verb}: a backend does not travel to the other ranks; give a URL, which each of them opens"
            )


class _AgreedClock:
    """A time limit that all ranks see pass in the same step.  It begins with the first round that is issued from here on."""

    def __init__(self, driver: StepDriver, limit_s: float) -> None:
        self._driver, self._limit_ms = driver, limit_s * 1000
        self._first_step = driver.steps + driver.lag
        self._started_ms: int | None = None

    @property
    def late(self) -> bool:
        if self._driver.steps <= self._first_step:
            return False
        now_ms = self._driver.core.now_ms
        if self._started_ms is None:
            self._started_ms = now_ms
        return now_ms - self._started_ms >= self._limit_ms
