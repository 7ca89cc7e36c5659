"""The cache as its users see it.

Decisions (`match`, `lease`, `prefetch`, and the methods of a lease) belong to Core's owner thread and return at once.  Async
verbs (`acquire`, `stored`, `drain`, `reset`) belong to the loop.  Expected refusals are values with a reason; an exception means
a call out of place (`UsageError`), a closed cache (`StoppedError`), or bad tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import anyio
import msgspec

from hicache_actors.backends.backend import Backend
from hicache_actors.cache import arguments
from hicache_actors.cache.admission import Admission
from hicache_actors.cache.asking import Acquire, Asking
from hicache_actors.cache.assembly import DriverKind, Parts
from hicache_actors.cache.block_verbs import BlockVerbs
from hicache_actors.cache.clear_verbs import ClearVerbs
from hicache_actors.cache.handles import Lease, Prefetch
from hicache_actors.cache.observing import ObservationVerbs
from hicache_actors.cache.planning import build
from hicache_actors.cache.policy_verbs import PolicyVerbs
from hicache_actors.cache.rank_verbs import RankVerbs
from hicache_actors.cache.rooms import Room, WaitForRoom
from hicache_actors.cache.shadow_mode import ShadowAdmission, cached_rid
from hicache_actors.cache.storage_switch import StorageSwitch
from hicache_actors.cache.weight_verbs import WeightVerbs
from hicache_actors.config import Config
from hicache_actors.core import Core
from hicache_actors.core.config import SlotOwner
from hicache_actors.core.news import StepNews
from hicache_actors.core.words import Match, Shortfall
from hicache_actors.cuda_ext.device import Device
from hicache_actors.errors import HiCacheError, PeerError, StoppedError, TransferError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.report import SizingReport
from hicache_actors.pipelines.effects import Pipelines
from hicache_actors.pipelines.job import OpenJob
from hicache_actors.pipelines.movers import Movers
from hicache_actors.ranks import Driver, StepDriver
from hicache_actors.ranks.group import RankGroup
from hicache_actors.ranks.intents import AskDrained, AskStored, Reset
from hicache_actors.ranks.transport import Transport
from hicache_actors.runtime import Workers, see_through

T = TypeVar("T")


class Stored(msgspec.Struct, frozen=True):
    """``tokens`` of the acknowledged leading run; ``reason`` says why it is not all of the prompt's whole pages, else None."""

    tokens: int
    reason: str | None = None


class HiCache(BlockVerbs, ClearVerbs, ObservationVerbs, PolicyVerbs, RankVerbs, WeightVerbs):
    """A KV cache in three tiers.  Open it with `HiCache.open`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._closing = self._closed = False
        self._asking = Asking(parts.driver, parts.pipelines)
        self._switch = StorageSwitch(parts.storage_tier, self._asking, self._agreeing_s)
        self._rids = itertools.count(1)
        RankVerbs.__init__(self)

    @staticmethod
    @asynccontextmanager
    async def open(
        config: Config,
        kv: KVTensors | None = None,
        *,
        slots: SlotOwner = "owned",
        driver: DriverKind = "auto",
        device: Device | None = None,
        backend: Backend | None = None,
        ranks: RankGroup | None = None,
        transport: Transport | None = None,
    ) -> AsyncIterator[HiCache]:
        """A cache on the running loop, closed when the block ends.

        ``kv``: the engine's KV tensors; without them they are made (``config.shape``, ``config.device.pages``).
        ``slots``: "owned" (the cache hands out device pages by `lease`) or "engine" (the engine owns its blocks and uses the verbs
        of `BlockVerbs`; needs ``driver="step"``).
        ``driver``: "auto" (every call decides at once, on the loop) or "step" (an engine thread calls `begin_step`/`end_step`).
        ``ranks``: where this process stands among the ranks of its engine; they all open the cache, with equal settings, and it
        serves what fits on the smallest of them (see `RankVerbs`; needs ``driver="step"``).
        ``device``, ``backend``, ``transport``: objects to use in place of those that the tensors, ``config.storage.url`` and
        ``ranks`` name.

        Raises `ConfigError` before anything is started (with ranks: on all of them, for a setting that differs, or that one of them
        cannot honour), `PeerError` if not all ranks come, and `BackendError` if the store cannot be opened, or not within 10
        seconds (with ranks: on all of them, if one cannot open its own).  A bug inside that degraded the cache meanwhile is raised
        when the block ends, unless the block itself raised.
        """
        parts = await build(
            config,
            kv,
            slots=slots,
            driver=driver,
            device=device,
            backend=backend,
            group=ranks,
            transport=transport,
        )
        cache = HiCache(parts)
        try:
            await parts.start()
            yield cache
        finally:
            # Memory must not go while copies run, however the block ended, and whatever is cancelled while it ends.
            await see_through(cache._close())
        failure = parts.driver.failure
        if failure is not None and not isinstance(failure, PeerError | TransferError):  # those are no bugs
            raise HiCacheError(f"the cache failed while it was open: {failure!r}") from failure

    @property
    def report(self) -> SizingReport:
        """Tokens and bytes of each tier, break-even, and known traps of this configuration, in words (``.text``)."""
        return self._parts.report

    # -- decisions: Core's owner thread --------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.core.page_size

    def __repr__(self) -> str:
        shape = self.kv.shape
        return (
            f"<HiCache {self.state}: {shape.layers} layers, {self.kv.pages} device pages of {shape.page_size} tokens>"
        )

    @property
    def kv(self) -> KVTensors:
        """The device pool."""
        return self._parts.kv

    def match(self, prompt: Prompt) -> Match:
        """What is cached of ``prompt``; nothing in shadow mode, where it is of no use.  Never changes anything."""
        self.driver.check_owner()
        arguments.check_prompt(prompt)
        if self._parts.shadow is not None:
            return Match(0, 0, 0)
        try:
            return self.core.match(prompt)
        except Exception as error:
            self.driver.fail(error)
            return Match(0, 0, 0)

    def lease(self, prompt: Prompt, rid: str, *, priority: int = 0, used_tokens: int = 0) -> Lease:
        """Pin what the device has of ``prompt``, ready or loading.  ``rid`` names the request, once at a time.

        ``used_tokens``: so many of its first tokens were in a lease of this request before, which has been preempted or was tried
        in vain.  Policies that count users count it once on them.
        """
        self._check_open()
        return self.driver.decide(self._admission(prompt, rid, priority, used_tokens).lease)

    def prefetch(self, prompt: Prompt, rid: str, *, deadline_s: float | None = None, priority: int = 0) -> Prefetch:
        """Bring what the host lacks of ``prompt`` from storage, if the missing span is worth it."""
        self._check_open()
        arguments.check_prompt(prompt)
        arguments.check_rid(rid)
        limit_s = None if deadline_s is None else arguments.seconds("deadline_s", deadline_s)
        rank = arguments.priority(priority)
        if self._parts.shadow is not None:
            rid = cached_rid(rid)

        def prefetch(core: Core) -> Prefetch:
            job = core.prefetch(prompt, rid, limit_s, rank)
            return Prefetch(self, None if job is None else self.open_job(job), rid)

        return self.driver.decide(prefetch)

    @property
    def needs_step(self) -> bool:
        """While it is true an engine with driver="step" makes (empty) steps.  Always False with driver="auto"."""
        return self.driver.needs_step

    def begin_step(self, timeout_s: float = 5.0) -> StepNews:
        """Open a step on this thread, which owns the decisions until the next one: apply what has ended since, and name it.

        Blocks up to 5 ms in an empty step, to pace it.  driver="step" only.
        """
        self._check_open()
        self._step_driver().begin_step(timeout_s)
        return self._parts.core.news

    async def begin_step_async(self, timeout_s: float = 5.0) -> StepNews:
        """`begin_step` for an engine that runs on the loop: never blocks it."""
        self._check_open()
        await self._begin_step(timeout_s)
        return self.core.news

    def end_step(self) -> None:
        """Close the step: what it decided is started."""
        self._step_driver().end_step()

    # -- async frontends: the loop -------------------------------------------------------------------------------------

    def acquire(
        self,
        prompt: Prompt,
        *,
        deadline_s: float | None = None,
        rid: str | None = None,
        priority: int = 0,
        room: Room | None = None,
        used_tokens: int = 0,
    ) -> AbstractAsyncContextManager[Lease]:
        """A lease on all that can be had of ``prompt``: fetched from storage if that is worth it (at most ``deadline_s``),
        loading into the device pool.  Released when the block ends, whatever ends it.

        A lease that got less than it could says why in ``account.reasons``; it never fails a request.  ``room``: a reservation
        of `room`, whose pages it takes first.  ``used_tokens``: as for `lease`.
        """
        self._check_open()
        name = f"hicache:{next(self._rids)}" if rid is None else rid
        admission = self._admission(prompt, name, priority, used_tokens, room)
        if deadline_s is None:
            limit_s = self._parts.config.storage.prefetch_timeout_s(len(prompt))
        else:
            limit_s = arguments.seconds("deadline_s", deadline_s)
        return Acquire(self._asking, admission, limit_s)

    def room(self, n_tokens: int, *, deadline_s: float) -> AbstractAsyncContextManager[Room | Shortfall]:
        """Wait, in order, for device pages for ``n_tokens``, and keep them for ``acquire(room=...)`` until the block ends.

        The caller holds no lease.  Gives a `Shortfall` after ``deadline_s``, at once if the pool is smaller, and when the cache has
        degraded: not an exception, for a full pool is no error.  While somebody waits, leases opened before go on; later ones load
        and allocate nothing beyond their own reservation, so nobody is overtaken for ever.
        """
        self._check_open()
        limit_s = max(0.0, arguments.seconds("deadline_s", deadline_s))
        return WaitForRoom(self, self._asking, arguments.tokens("n_tokens", n_tokens), limit_s)

    async def stored(self, prompt: Prompt, deadline_s: float) -> Stored:
        """Wait until the whole pages of ``prompt`` are acknowledged by the store; at most ``deadline_s``.

        Whatever was to be saved or stored later (``write_back``, ``store_on = "host_evict"``) is saved and stored now.
        """
        arguments.check_prompt(prompt)
        return await self._asking.ask(
            lambda core: core.stored(prompt),
            lambda answer: Stored(*answer),
            Core.cancel_waiter,
            arguments.seconds("deadline_s", deadline_s),
            unheard=lambda: (0, "pending"),
            told=lambda number: AskStored(number, prompt),
        )

    async def drain(self, deadline_s: float, *, stepping: bool = False) -> int:
        """Wait until everything is written that the policy wants written; at most ``deadline_s`` -> pages left unwritten.

        That includes what was to be saved or stored later, prefixes first.
        ``stepping``: the engine has stopped making steps, so they are made here; with ranks, all of them call it.
        """
        deadline_s = arguments.seconds("deadline_s", deadline_s)
        if stepping:
            self._check_open()
            return await self._drain_in_own_steps(deadline_s)
        return await self._asking.ask(
            Core.drained,
            int,
            Core.cancel_waiter,
            deadline_s,
            unheard=lambda: self.core.unsaved_pages,
            told=AskDrained,
        )

    async def reset(self) -> None:
        """Forget device and host, stored or not; storage is kept.  Running leases keep their pages, and publish no more."""
        self._check_open()
        await self._asking.decided(Core.reset, Reset())

    async def attach_storage(self, store: str | Backend, *, deadline_s: float = 10.0) -> None:
        """Use ``store`` (a URL, or a backend that is not open yet) from here on, instead of what is used now, if anything is.

        It has ``deadline_s`` to open; what is used now goes on until then, and has as long to end what it has begun.  What the
        host holds is backed up in the background, or with ``store_on = "host_evict"`` what is above the mark.  Cancelling this wait
        does not stop what has begun.

        With ranks it is the leader's, and takes a URL: each rank opens that for itself, and all use it from the same step on.

        Raises `ConfigError` (a bad URL; a setting that storage needs is missing) or `BackendError` (it cannot be opened, on this
        rank or on one that is named): then nothing has changed, on any rank.  "no step": the engine has made none in time; its next
        one gives the store up, unless all ranks had it open by then.
        """
        self._check_open()
        deadline_s = arguments.seconds("deadline_s", deadline_s)
        self._check_switch("attach_storage", store)
        if self._parts.disabled is not None:
            self._parts.log.warning("storage_not_attached", disabled_by=self._parts.disabled)
            return
        await self._switch.attach(self._parts.storage_tier.find(store), deadline_s)
        self._parts.check_room_for_objects()

    async def detach_storage(self, deadline_s: float) -> int:
        """Use no storage from here on.  What is stored stays there, and counts as not stored until a store is attached.

        What has begun may end for ``deadline_s``; then nobody waits for it any more, and no call is made any more -> calls that
        hang all the same: the host memory that they may touch stays theirs until they return.  0 without a storage.

        With ranks it is the leader's; each rank has that time for its own calls, and the answer counts those of this one.
        """
        self._check_open()
        self._check_switch("detach_storage")
        return await self._switch.detach(arguments.seconds("deadline_s", deadline_s))

    # -- for handles and tests -----------------------------------------------------------------------------------------

    @property
    def core(self) -> Core:
        return self._parts.core

    @property
    def driver(self) -> Driver:
        return self._parts.driver

    @property
    def pipelines(self) -> Pipelines:
        return self._parts.pipelines

    @property
    def movers(self) -> Movers:
        return self._parts.movers

    @property
    def forward_workers(self) -> Workers:
        return self._parts.forward_workers

    def open_job(self, job: int) -> OpenJob:
        return self.pipelines.open_job(job)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _admission(
        self, prompt: Prompt, rid: str, priority: int, used_tokens: int, room: Room | None = None
    ) -> Admission:
        arguments.check_prompt(prompt)
        arguments.check_rid(rid)
        priority, used_tokens = arguments.priority(priority), arguments.tokens("used_tokens", used_tokens)
        if room is not None and not isinstance(room, Room):
            raise arguments.not_a_room(room)
        shadow, waiter = self._parts.shadow, 0 if room is None else room.waiter
        if shadow is None:
            return Admission(self, prompt, rid, priority, waiter, used_tokens)
        return ShadowAdmission(self, prompt, rid, priority, waiter, used_tokens, shadow)

    def _check_open(self) -> None:
        if self._closing:
            raise StoppedError("the cache is closed")

    async def _close(self) -> None:
        """Stop fetching, let what runs end, stop the parts.  Idempotent, never raises."""
        if self._closing:
            return
        if self._dirty and not isinstance(self.driver, StepDriver):
            await self.drain(self._parts.config.close_timeout_s)
        self._closing = True
        pipelines = self._parts.pipelines
        self._asking.stop()
        pipelines.stop_waits()
        limit_s = self._parts.config.close_timeout_s
        with anyio.move_on_after(limit_s + 2 * self._patience_s):
            if isinstance(self.driver, StepDriver):
                await self._step_until_idle(limit_s, dirty=self._dirty)
            else:
                self.driver.decide(Core.hurry)
                with anyio.move_on_after(limit_s):
                    await pipelines.idle()
        await self._switch.close(self._parts.config.close_timeout_s)
        await self._parts.stop()
        self._closed = True
        self._asking.stop()
