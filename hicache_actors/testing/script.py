"""A random engine for twin replicas: the same calls on every rank, two steps in flight.

What it does next depends on the shared seed, on Core's answers and on what Core wakes, all of which are replicated; never
on the local world.  So two ranks whose Cores agree make the same calls, whatever their copies and stores are doing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Final

from hicache_actors.core import Core, CoreLease
from hicache_actors.core.config import StoreOn, WritePolicy
from hicache_actors.core.order import EVICTIONS
from hicache_actors.core.words import Shortfall, Wake
from hicache_actors.keys.prompt import Prompt
from hicache_actors.keys.scope import NO_SCOPE, Scope
from hicache_actors.testing.world import SimWorld

SWITCHED_POLICIES: Final[tuple[WritePolicy, ...]] = ("write_through", "write_through_selective", "write_back")
STORE_TIMES: Final[tuple[StoreOn, ...]] = ("publish", "host_evict")
FAMILIES = 6
BRANCHES = 3
MAX_LIVE = 6
_TENANT = Scope(salt="tenant")
_FAR = 10**9


def family_tokens(family: int, n_tokens: int, branch: int = 0, fork_at: int = _FAR) -> list[int]:
    """Prompts of one family share a beginning and fork at token ``fork_at``.  The last family is the first one's tokens
    under another scope (`family_scope`), with ids above 2^32.
    """
    base = family % (FAMILIES - 1) * 1000 + (1 << 33)
    return [base + i if i < fork_at else base + 500 * branch + i + 100_000 for i in range(n_tokens)]


def family_scope(family: int) -> Scope:
    return _TENANT if family == FAMILIES - 1 else NO_SCOPE


class _Request:
    """One request of the script, through its life on one rank."""

    def __init__(self, rid: str, prompt: Prompt, tail: list[int], priority: int) -> None:
        self.rid, self.prompt, self.tail, self.priority = rid, prompt, tail, priority
        self.known_tokens = len(prompt)  #: what the user sent; `tail` is what the model will generate
        self.total_tokens = self.known_tokens + len(tail)
        self.lease: CoreLease | None = None
        self.job: int | None = None
        self.waiter: int | None = None
        self.patience_steps = 0
        self.computed_tokens = 0
        self.in_flight = False
        self.events: list[Hashable] = []


class TwinScript:
    """The engine of one rank.

    ``section`` opens a context in which Core may be called; ``run_step`` makes a number of calls; ``submit`` then hands
    what the engine does outside the section (forward passes, holds) to the world; ``between_steps`` releases late.
    """

    def __init__(
        self,
        seed: int,
        core: Core,
        world: SimWorld,
        section: Callable[[], AbstractContextManager[None]],
        defer: Callable[[Callable[[Any], object]], None],
        *,
        switches: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.local_rng = random.Random(world.rng.random())
        self.core, self.world, self.section, self.defer = core, world, section, defer
        self.page_size, self.switches = world.page_size, switches
        self.live: list[_Request] = []
        self.operations = self.step = 0
        self.stats: Counter[str] = Counter()
        self._made = 0
        self._woken: dict[int, object] = {}
        self._waiters: set[int] = set()
        self._settling: list[tuple[int, _Request, Hashable, int]] = []
        self._unjudged: list[tuple[CoreLease, list[Hashable]]] = []
        self._outside: list[Callable[[], None]] = []
        self._late: list[_Request] = []

    # -- driven by the kit

    def wake(self, effect: Wake) -> None:
        """Effects are the same on all ranks and come at the end of the section; the next step looks at them."""
        self._woken[effect.waiter] = effect.value

    def run_step(self, calls: int) -> None:
        self._begin_step()
        for _ in range(calls):
            self.operations += 1
            x = self.rng.random()
            if x < 0.22 and len(self.live) < MAX_LIVE:
                self._admit()
            elif x < 0.96:
                if self.live:
                    self._advance(self.rng.choice(self.live))
            elif x < 0.963:
                with self.section():
                    self.core.reset()
                self.stats["reset"] += 1
            elif x < 0.97:
                self._ask_waiters()
            elif x < 0.98 and self.switches:
                self._switch()

    def wind_down(self) -> None:
        """A step that finishes what runs and starts nothing."""
        self._begin_step()
        with self.section():
            for request in list(self.live):
                self._stop_prefetch(request)
                if request.waiter is not None:
                    self.core.cancel_acquire(request.waiter)
                    self._forget_waiter(request)
                    self.live.remove(request)
                elif request.lease is None:
                    self.live.remove(request)
                elif not request.in_flight:
                    self._finish(request)

    def submit(self) -> None:
        """Outside the section: what the engine submits to its stream."""
        outside, self._outside = self._outside, []
        for act in outside:
            act()

    def between_steps(self) -> None:
        """Outside the section: releases that the next section runs first."""
        late, self._late = self._late, []
        for request in late:
            self.defer(self._releasing(request))

    @property
    def idle(self) -> bool:
        """No request is live and no waiter's answer is outstanding."""
        return not self.live and not self._late and not self._waiters and not self._unjudged

    def pending(self) -> object:
        """What keeps the script from being idle."""
        return {
            "live": [(r.rid, r.lease is not None, r.job, r.waiter, r.in_flight) for r in self.live],
            "late": [r.rid for r in self._late],
            "waiters": sorted(self._waiters),
            "unjudged": [(lease.rid, list(lease.loads)) for lease, _ in self._unjudged],
        }

    # -- a request's life

    def _admit(self) -> None:
        rng, page = self.rng, self.page_size
        family, known = rng.randrange(FAMILIES), rng.randrange(2, 80)
        tokens = family_tokens(family, known, rng.randrange(BRANCHES), rng.choice((10 * page, 18 * page, _FAR)))
        self._made += 1
        tail_base = 900_000 + (family * 50 if rng.random() < 0.8 else 1000 * self._made)
        tail = [tail_base + i for i in range(rng.randrange(1, 14))]
        prompt = Prompt(tokens, family_scope(family))
        request = _Request(f"r{self._made}", prompt, tail, rng.choice((0, 0, 0, 1)))
        self.live.append(request)
        x = rng.random()
        request.patience_steps = rng.randrange(1, 30)
        with self.section():
            self.core.match(prompt)
            if x < 0.5:
                request.job = self.core.prefetch(prompt, request.rid, None, request.priority)
                self.stats["prefetch"] += request.job is not None
            elif x < 0.75:
                deadline_s = rng.choice((None, None, 0.05, 0.5))
                request.waiter = self.core.acquire(prompt, request.rid, deadline_s, request.priority)
                self._waiters.add(request.waiter)
                self.stats["acquire"] += 1

    def _advance(self, request: _Request) -> None:
        with self.section():
            request.patience_steps -= 1
            if request.waiter is not None:
                self._await_lease(request)
            elif request.job is not None:
                self._await_prefetch(request)
            elif not request.in_flight:
                self._schedule(request)

    def _await_lease(self, request: _Request) -> None:
        assert request.waiter is not None
        if request.waiter in self._woken:
            lease = self._woken[request.waiter]
            assert isinstance(lease, CoreLease)
            self._forget_waiter(request)
            self._take_lease(request, lease)
        elif request.patience_steps <= 0 and self.rng.random() < 0.3:
            self.core.cancel_acquire(request.waiter)
            self._forget_waiter(request)
            self.live.remove(request)
            self.stats["acquire_cancelled"] += 1

    def _await_prefetch(self, request: _Request) -> None:
        assert request.job is not None
        if self.core.prefetch_agreed(request.job) is None:
            if request.patience_steps > 0:
                return
            self._stop_prefetch(request)
        request.job = None

    def _stop_prefetch(self, request: _Request) -> None:
        if request.job is not None and self.core.prefetch_agreed(request.job) is None:
            self.core.stop_prefetch(request.job, request.rid)
            self.stats["prefetch_stopped"] += 1
        request.job = None

    def _schedule(self, request: _Request) -> None:
        rng, core = self.rng, self.core
        if request.lease is None:
            core.match(request.prompt)
            lease = core.lease(request.prompt, request.rid, request.priority)
            self.stats["lease"] += 1
            if rng.random() < 0.85:
                loads = core.load(lease, None if rng.random() < 0.7 else rng.randrange(1, 160))
                self.stats["load_short" if isinstance(loads, Shortfall) else "load" if loads else "load_none"] += 1
            self._take_lease(request, lease)
        if request.computed_tokens >= request.total_tokens:
            self._finish(request)
            return
        left = request.known_tokens - request.computed_tokens
        if left <= 0:
            left = request.total_tokens - request.computed_tokens
        self._forward(request, request.computed_tokens + max(1, min(left, rng.choice((1, 3, 16, 100)))))

    def _take_lease(self, request: _Request, lease: CoreLease) -> None:
        request.lease = lease
        request.computed_tokens = lease.usable_tokens
        self.stats["hit_tokens"] += lease.usable_tokens

    def _forward(self, request: _Request, upto: int) -> None:
        lease, page = request.lease, self.page_size
        assert lease is not None
        if upto > len(request.prompt):
            at = len(request.prompt) - request.known_tokens
            request.prompt.append(request.tail[at : upto - request.known_tokens])
        if upto > lease.capacity_tokens:
            refusal = self.core.allocate(lease, upto - lease.capacity_tokens)
            if refusal is not None:
                self.stats["allocate_short"] += 1
                self._finish(request)
                return
        event = (self.step, request.rid)
        first, whole, pages = request.computed_tokens // page, upto // page, -(-upto // page)
        keys = self.world.prompt_keys(request.prompt, whole)
        keys += [-(1 << 40) - self._made * 1000 - self.step] * (pages - whole)  # the open page
        written = list(zip(lease.pages[first:pages], keys[first:], strict=True))
        read = list(zip(lease.pages[:first], keys[:first], strict=True))
        loads = tuple(lease.loads)
        self._outside.append(lambda: self.world.forward(event, read, written, loads))
        request.in_flight = True
        self._settling.append((self.step + (1 if self.rng.random() < 0.6 else 2), request, event, upto))

    def _begin_step(self) -> None:
        self.step += 1
        due = [entry for entry in self._settling if entry[0] <= self.step]
        self._settling = [entry for entry in self._settling if entry[0] > self.step]
        with self.section():
            for _, request, event, upto in due:
                self._settle(request, event, upto)
            self._judge()
        for waiter in [w for w in self._waiters if w in self._woken and w not in self._held_waiters()]:
            self._waiters.discard(waiter)
            del self._woken[waiter]

    def _settle(self, request: _Request, event: Hashable, upto: int) -> None:
        lease = request.lease
        assert lease is not None
        request.in_flight = False
        request.computed_tokens = upto
        request.events.append(event)
        committed = self.core.commit(lease, upto, event)
        self.stats["published"] += committed.published_pages
        if committed.failed is not None:
            self.stats[f"commit_{committed.failed}"] += 1
            if committed.failed != "degraded":
                self._finish(request)
        elif self.rng.random() < 0.02:
            self._waiters.add(self.core.stored(request.prompt))
            self.stats["stored"] += 1

    def _finish(self, request: _Request) -> None:
        lease = request.lease
        assert lease is not None
        self.live.remove(request)
        if self.rng.random() < 0.3:
            hold = ("hold", request.rid)
            self.core.hold(lease, hold)
            self._outside.append(lambda: self._close_later(hold))
        self._must_add_up(request, lease)
        self._unjudged.append((lease, list(request.events)))
        if self.rng.random() < 0.2:
            self._late.append(request)
        else:
            self._release(request)

    def _must_add_up(self, request: _Request, lease: CoreLease) -> None:
        account = lease.account
        served = account.device + account.host + account.storage
        assert served + account.computed == request.known_tokens, (request.rid, account)
        assert sum(account.reasons.values()) == account.computed, (request.rid, account)
        assert min(served, account.computed, *account.reasons.values(), 0) >= 0, (request.rid, account)

    def _close_later(self, hold: Hashable) -> None:
        self.world.at(self.local_rng.expovariate(1 / 60), lambda: self.world.fire(hold))

    def _releasing(self, request: _Request) -> Callable[[Core], None]:
        return lambda _: self._release(request)

    def _release(self, request: _Request) -> None:
        lease = request.lease
        assert lease is not None
        after = request.events[-1] if request.events and self.rng.random() < 0.7 else None
        self.core.release(lease, after)
        self.core.release(lease)  # idempotent

    # -- verdicts and waiters

    def _judge(self) -> None:
        """Emit the tokens of leases whose loads are agreed and good; the world then insists on right bytes."""
        still = []
        for lease, events in self._unjudged:
            results = [self.core.load_result(job) for job in lease.loads]
            if any(result is None for result in results):
                still.append((lease, events))
                continue
            if lease.failed != "load_failed" and all(r is not None and r.failed is None for r in results):
                for event in events:
                    self.world.emit(event)
                self.stats["emitted"] += 1
            else:
                self.stats["withheld"] += 1
            for job in lease.loads:
                self.core.forget_load(job, lease.number)
        self._unjudged = still

    def _ask_waiters(self) -> None:
        with self.section():
            x = self.rng.random()
            if x < 0.5:
                self._waiters.add(self.core.drained())
                self.stats["drained"] += 1
            else:
                asked = sorted(self._waiters - self._held_waiters() - self._woken.keys())
                if asked:
                    self.core.cancel_waiter(asked[0])
                    self._waiters.discard(asked[0])
                    self.stats["waiter_cancelled"] += 1

    def _switch(self) -> None:
        rng = self.rng
        with self.section():
            what = rng.random()
            if what < 0.4:
                refused = self.core.set_write_policy(rng.choice(SWITCHED_POLICIES))
            elif what < 0.8:
                refused = self.core.set_eviction(rng.choice(EVICTIONS))
            else:
                refused = self.core.set_store_on(rng.choice(STORE_TIMES))
        self.stats["policy_set" if refused is None else f"policy_{refused.reason}"] += 1

    def _held_waiters(self) -> set[int]:
        return {request.waiter for request in self.live if request.waiter is not None}

    def _forget_waiter(self, request: _Request) -> None:
        assert request.waiter is not None
        self._waiters.discard(request.waiter)
        self._woken.pop(request.waiter, None)
        request.waiter = None
