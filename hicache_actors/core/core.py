"""Core: the replicated state of the cache, one pure and synchronous object.

Three inputs change it: an engine call, an agreed completion, the agreed clock (both through `Core.apply`).  It returns effects
(`take_effects`) and starts nothing itself; it does no I/O and reads no clock.  Equal inputs in equal order give equal state on all
ranks.  It is not thread-safe: one owner thread calls it, in sections (`ranks.py`).

Where things are decided: walking and splitting in `tree`, what is where in `residents`, who goes in `order` and `eviction`, pins
and failed residencies in `pins`, jobs and the wire in `jobs`, requests in `leases` and `loads`, prefetch in `fetch`, write-back
and backup in `saving`, `cleaning` and `ahead`, how host memory grows at the start in `opening`, which store is used in `attaching`,
how it is emptied in `clearing`, what it lacks in `backlog`, blocks of the engine's own in `blocks`, waiters in `waiting`.  What
comes and goes is written down in `changes`, for those who listen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hicache_actors.core import check as _check
from hicache_actors.core import usage as _usage
from hicache_actors.core.attaching import Attaching
from hicache_actors.core.backlog import Backlog
from hicache_actors.core.blocks import Blocks
from hicache_actors.core.calls import BlockCalls, FetchCalls, OperatorCalls, RoomCalls, StoreCalls
from hicache_actors.core.clearing import Clearing
from hicache_actors.core.config import CoreConfig
from hicache_actors.core.eviction import Evictor
from hicache_actors.core.fetch import Fetches
from hicache_actors.core.jobs import Wire
from hicache_actors.core.leases import Leases
from hicache_actors.core.loads import Loads
from hicache_actors.core.news import NOTHING_NEW
from hicache_actors.core.node import PLACES
from hicache_actors.core.opening import Opening
from hicache_actors.core.records import Changed
from hicache_actors.core.requests import RequestCalls
from hicache_actors.core.room import Rooms
from hicache_actors.core.saving import Saving
from hicache_actors.core.state import Decision, Note, State
from hicache_actors.core.waiting import Waiting
from hicache_actors.core.words import (
    DEVICE,
    Effect,
    Failure,
    Phase,
    Settled,
    Slots,
    decode_result,
)


class Core(RequestCalls, BlockCalls, FetchCalls, OperatorCalls, RoomCalls, StoreCalls):
    """See the module.  Counts of hits are in tokens, cumulative, multiples of ``page_size``."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.state = State(config)
        self._evictor = Evictor(self.state)
        self._saving = Saving(self.state)
        self._backlog = Backlog(self.state, self._saving)
        self._attaching = Attaching(self.state, self._backlog)
        self._clearing = Clearing(self.state, self._backlog)
        self._opening = Opening(self.state)
        self._fetches = Fetches(self.state)
        self._rooms = Rooms(self.state)
        self._loads = Loads(self.state, self._rooms)
        self._leases = Leases(self.state, self._loads, self._fetches)
        self._blocks = Blocks(self.state, self._fetches, self._loads, self._leases, self._saving)
        self._waiting = Waiting(self.state, self._leases, self._fetches, self._saving, self._backlog)
        self.news = NOTHING_NEW  #: what the last apply has named, and the section before it

    # -- sections -----------------------------------------------------------------------------------------------------------

    def apply(
        self,
        now_ms: int,
        values: Iterable[tuple[int, Phase, int]],
        released: Iterable[int],
        intents: Iterable[Callable[[Core], object]] = (),
        alive: bool = True,
    ) -> None:
        """Take in what has been agreed.  ``values``: (job, HIT or RUN, HIT pages or `encode_result`); ``released``: jobs, negative
        ones for drains of a forward pass that failed on some rank.

        Order: alive, clock, values by job, RELEASED by job, due retries, settled acquires, intents as listed.  A value whose job
        has left that phase, or has ended, is dropped.
        """
        state = self.state
        self.news = NOTHING_NEW
        if not alive:
            self.degrade()
        state.now_ms = max(state.now_ms, now_ms)
        # Most applies bring nothing.  What has no work is not called: a forward pass has driven its code from the caches.
        waiting = self._waiting
        if waiting.acquires:
            waiting.on_apply()
        if self._rooms.waits:
            self._rooms.on_apply()
        for job_id, phase, value in sorted(values) if values else ():
            job = state.jobs.open.get(job_id)
            if job is None or job.phase is not phase or phase is Phase.LIMBO:
                continue
            state.note(Note.HIT if phase is Phase.HIT else Note.RESULT, job_id, value)
            if phase is Phase.HIT:
                job.on_hit(value)
            else:
                job.on_result(*decode_result(value))
        for job_id in sorted(released, key=abs) if released else ():
            job = state.jobs.open.get(abs(job_id))
            if job is not None and job.phase is Phase.LIMBO:
                state.note(Note.RELEASED, job_id)
                if job_id < 0:
                    job.on_spoilt()
                state.close(job)
        if self._opening.idle:
            self._opening.go_on()
        if not state.degraded:
            if self._saving.retries:
                self._saving.retry_due()
            if state.backlog:
                self._backlog.work_off()
            if not state.policies.stores_on_publish:
                self._saving.ahead.advance()
        if waiting.acquires:
            waiting.settle_acquires()
        for intent in intents:
            intent(self)
        self.news = state.news.take()

    def end_section(self) -> None:
        """Open the jobs that this section has wished for, answer waiters.  `take_effects` calls it."""
        if self._waiting.acquires:
            self._waiting.settle_acquires()
        if self._rooms.waits:
            self._rooms.grant()
        if self._waiting.stores:
            self._waiting.ask_stored()
        self._saving.end_section(awaited=bool(self._waiting.stores or self._waiting.drains))
        self._blocks.end_section()
        self._leases.end_section()
        self._waiting.end_section()
        if self.state.tree.has_garbage:
            self.state.tree.cut_garbage()
        if self.state.tree.has_idle_roots:
            self.state.tree.drop_roots(pin.tail for pin in self.state.pins.all.values())
        if self.state.residents.moving:
            self.state.residents.move()

    def take_effects(self) -> list[Effect]:
        """Close the section -> what is to be started or woken, in order.  Each effect is returned once."""
        self.end_section()
        effects, self.state.effects = self.state.effects, []
        changes = self.state.residents.changes
        if changes is not None and changes.records:
            state = self.state
            effects.append(Changed(state.decided, state.epoch, state.now_ms, changes.take()))
        return effects

    def wire(self) -> Wire:
        """Who answers where in the next round.  Call it after `take_effects`."""
        return self.state.jobs.wire()

    @property
    def needs_step(self) -> bool:
        """Rounds must go on: a job is open, or one that grows the host pool is to be, something is still to be named, or somebody
        waits for what only the agreed clock brings: a retry, a deadline.  Replicated.
        """
        clock = self._waiting.needs_clock or self._rooms.needs_clock
        return bool(self.state.jobs.open) or clock or self._blocks.needs_step or self._opening.idle

    @property
    def next_due_ms(self) -> int | None:
        """When the agreed clock has work: a retry, a backup that gathers, a wait for room that ends, or (now) the rest of a
        backlog, a reset, a change of policy, a pool that is to grow; or None.
        """
        if self.state.tree.has_garbage or self.state.residents.moving or self._backlog.ready or self._opening.idle:
            return self.state.now_ms
        # Asked for at the end of each section: what has no work is not called.
        due = (part.next_due_ms for part in (self._saving, self._waiting, self._rooms) if part.has_dues)
        return min((ms for ms in due if ms is not None), default=None)

    @property
    def page_size(self) -> int:
        return self.config.page_size

    @property
    def now_ms(self) -> int:
        return self.state.now_ms

    @property
    def epoch(self) -> int:
        return self.state.epoch

    @property
    def degraded(self) -> bool:
        return self.state.degraded

    @property
    def log_digest(self) -> int:
        """Rolling digest of all decisions so far, 32 bits; it travels with each round."""
        return self.state.log_digest

    @property
    def decided(self) -> int:
        """Decisions so far."""
        return self.state.decided

    @property
    def decisions(self) -> list[Decision]:
        """The last of them, for the report of a divergence."""
        return [Decision(*entry) for entry in self.state.decisions]

    @property
    def counts(self) -> dict[str, int]:
        """Counters by name, since open."""
        return self.state.counts

    def cancel_waiter(self, waiter: int) -> object:
        """Drop a waiter of `stored`, `drained`, `attach` or `clear_storage` -> its answer as of now (reason "pending" if more may
        come); None if unknown.
        """
        answers = (part.cancel(waiter) for part in (self._waiting, self._attaching, self._clearing))
        return next((answer for answer in answers if answer is not None), None)

    # -- the whole ----------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget both tiers' contents (the storage keeps its own) and start an epoch; O(slots + pins), the nodes go in slices.

        Open jobs run on and publish nothing; pinned slots are strays until their pins end; leases keep their pages and publish
        nothing more.
        """
        self._forget_all("reset")
        self.state.note(Note.RESET, self.state.epoch)

    def degrade(self) -> None:
        """Give up caching for good: as `reset`, and open jobs are settled with 0 (their slots wait for RELEASED)."""
        state = self.state
        if state.degraded:
            return
        state.degraded = True
        owners = [lease.pin for lease in state.leases.values()] + self._blocks.pins
        owners += [pin for job in state.jobs.open.values() for pin in job.pins]
        state.pins.keep_only(owners)  # a bug may have cut off an end, or a beginning
        self._forget_all("degraded")
        for job in list(state.jobs.open.values()):
            if job.phase is Phase.LIMBO:
                continue
            job.on_degrade()
            state.effects.append(Settled(job.id, 0, "degraded"))
            if job.phase is Phase.HIT:
                state.close(job)
            else:
                state.to_limbo(job)
        state.note(Note.DEGRADE)

    def _forget_all(self, failure: Failure) -> None:
        state = self.state
        state.epoch += 1
        state.evictions.reset(state.now_ms)
        self._leases.fail_all(failure)
        state.pins.lose_everything()
        if state.residents.changes is not None:
            state.residents.changes.cleared("reset" if failure == "reset" else "degraded")
        self._saving.forget()
        for place in PLACES:
            held: list[Slots] = [stray.slots for stray in state.pins.strays(place)]
            held += [job.slots for job in state.jobs.open.values() if job.place == place]
            if place == DEVICE:
                held += [lease.private_slots() for lease in state.leases.values()]
                held += [room.slots for room in state.reservations.values()]
            state.pools[place].keep_only(held)
        state.changed = True

    def close(self) -> None:
        """Forget everything, and free the memory of the tree, whose nodes the garbage collector does not see.

        O(nodes), about 0.6 us each.  As after `degrade`, leases can still be released; effects are dropped.
        """
        self.degrade()
        self.take_effects()
        while self.state.tree.has_garbage:
            self.state.tree.cut_garbage()

    # -- looking ------------------------------------------------------------------------------------------------------------

    def usage(self) -> _usage.Usage:
        """Pages of each tier, nodes, jobs: one frozen struct."""
        retries, acquires = len(self._saving.retries), len(self._waiting.acquires)
        return _usage.usage(self.state, self._fetches.staged_pages, retries, acquires, self._rooms.waiting)

    def state_digest(self) -> int:
        """Digest of the whole state, O(state): for tests.  `log_digest` is what travels."""
        return _check.state_digest(self.state, self._saving, self._fetches, self._waiting, self._blocks, self._rooms)

    def check(self) -> None:
        """Recompute every invariant, O(state): for tests.  AssertionError names the broken one."""
        _check.check(self.state, self._saving, self._fetches)
