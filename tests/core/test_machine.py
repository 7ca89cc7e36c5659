"""Random histories of Core against the naive model of `model.py`, with `check()` after each step."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hicache_actors.core import Core, CoreLease
from hicache_actors.core.config import StoreOn, WritePolicy
from hicache_actors.core.order import EVICTIONS, Eviction
from hicache_actors.core.words import (
    DEVICE,
    Effect,
    Phase,
    Shortfall,
    StartDrain,
    Wake,
    encode_result,
    unpack_slots,
)
from hicache_actors.keys.scope import NO_SCOPE, Scope

from .kit import ALL, PAGE, Toks, make
from .model import GARBAGE, Model, paths

POLICIES: list[WritePolicy] = ["write_through", "write_through_selective", "write_back", "none"]
STORE_ON: list[StoreOn] = ["publish", "host_evict"]
BIG = 1 << 40  # ids beyond 32 bits


def prompt(family: int, branch_at: int, branch: int, length: int, scope: Scope = NO_SCOPE) -> Toks:
    ids = [family * BIG + i for i in range(length)]
    ids[branch_at:] = [i + branch * BIG // 2 + branch for i in ids[branch_at:]]
    return Toks(ids, scope)


prompts = st.builds(
    prompt,
    st.integers(0, 1),
    st.sampled_from([4, 10, 16, 40]),
    st.integers(0, 2),
    st.sampled_from([0, 1, 3, 4, 5, *range(13, 48)]),
    st.sampled_from([NO_SCOPE, NO_SCOPE, Scope(lora="a")]),
)


class CoreMachine(RuleBasedStateMachine):
    core: Core
    model: Model

    @initialize(
        device=st.integers(14, 24),
        host=st.integers(8, 40),
        policy=st.sampled_from(["timeout", "best_effort"]),
        write_policy=st.sampled_from(POLICIES),
        eviction=st.sampled_from(EVICTIONS),
        store_on=st.sampled_from(STORE_ON),
        gather_s=st.sampled_from([0.0, 0.05, 2.0]),
    )
    def open(
        self,
        device: int,
        host: int,
        policy: str,
        write_policy: WritePolicy,
        eviction: Eviction,
        store_on: StoreOn,
        gather_s: float,
    ) -> None:
        self.core = make(
            device,
            host,
            prefetch_policy=policy,
            write_policy=write_policy,
            eviction=eviction,
            store_on=store_on,
            gather_s=gather_s,
            retry_delays_s=(1, 4),
            table_slots=8,
            table_rows=8,
        )
        self.model = Model(self.core)
        self.made = self.now_ms = 0
        self.waiters: dict[int, tuple[str, Toks]] = {}
        self.lengths: dict[str, int] = {}

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for lease, _ in list(self.model.leases.values()):
            self.end(lease, None)
        for waiter in list(self.waiters):
            self.core.cancel_acquire(waiter)
        self.section(may_evict=False)
        for _ in range(200):
            if not self.core.needs_step:
                break
            self.clock(2)
            self.round(lambda n: n, lambda n: (n, True), everything=True)
        assert not self.core.needs_step
        self.core.reset()
        self.core.take_effects()
        usage = self.core.usage()
        assert usage.device.free_pages == usage.device.total_pages
        assert usage.host.free_pages == usage.host.total_pages
        assert not self.core.state.pins.all
        self.core.close()

    # -- sections -----------------------------------------------------------------------------------------------------------

    def section(self, *, may_evict: bool = True) -> list[Effect]:
        effects = self.core.take_effects()
        self.model.take(effects)
        self.core.check()
        self.model.compare(may_evict=may_evict or self.saves_ahead)
        for effect in effects:
            if isinstance(effect, Wake) and effect.waiter in self.waiters:
                rid, tokens = self.waiters.pop(effect.waiter)
                assert isinstance(effect.value, CoreLease)
                self.model.leases[rid] = effect.value, tokens
        return effects

    @property
    def saves_ahead(self) -> bool:
        """The end of any section may make room on the host."""
        return self.core.state.residents.protects_dirty

    def name(self) -> str:
        self.made += 1
        return f"r{self.made}"

    def pick(self, data: st.DataObject) -> tuple[CoreLease, Toks]:
        return self.model.leases[data.draw(st.sampled_from(sorted(self.model.leases)))]

    def end(self, lease: CoreLease, event: object) -> None:
        private = unpack_slots(lease.private_slots())
        drains = bool(lease.events or lease.holds or event)
        if not drains:
            for slot in private:
                self.model.memory[DEVICE][slot] = GARBAGE
        del self.model.leases[lease.rid]
        self.core.release(lease, event)
        self.core.release(lease, event)
        for effect in self.section(may_evict=False):
            if isinstance(effect, StartDrain):
                self.model.drained[effect.job] = private

    # -- the engine ---------------------------------------------------------------------------------------------------------

    @rule(tokens=prompts)
    def match(self, tokens: Toks) -> None:
        before = self.core.state_digest()
        found = self.core.match(tokens)
        assert (found.device // PAGE, found.loading // PAGE, found.host // PAGE) == self.model.match(tokens)
        assert found.host <= found.storage_hint <= max(0, len(tokens) - 1)
        assert self.core.state_digest() == before, "match changes nothing"

    @rule(tokens=prompts, data=st.data())
    def lease(self, tokens: Toks, data: st.DataObject) -> None:
        if len(self.model.leases) >= 3:
            return
        expected = self.model.match(tokens)
        rid = self.name()
        lease = self.core.lease(tokens, rid)
        assert (lease.ready_tokens, lease.usable_tokens) == (expected[0] * PAGE, expected[1] * PAGE)
        assert list(lease.pages) == [self.model.held[DEVICE][p] for p in paths(tokens, expected[1])]
        account = lease.account
        assert account.device + account.host + account.storage + account.computed == len(tokens)
        assert sum(account.reasons.values()) == account.computed
        self.model.leases[rid] = lease, tokens
        self.section()

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), limit=st.one_of(st.none(), st.integers(0, 40)))
    def load(self, data: st.DataObject, limit: int | None) -> None:
        lease, _ = self.pick(data)
        free = self.core.usage().device
        answer = self.core.load(lease, limit)
        if isinstance(answer, Shortfall):
            if answer.reason == "device_capacity":
                assert answer.missing_pages > 0
            assert self.core.usage().device.free_pages == free.free_pages, "a refusal has evicted nothing"
        account = lease.account
        assert account.device + account.host + account.storage + account.computed == len(lease.tokens)
        assert sum(account.reasons.values()) == account.computed
        self.section()

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), n_tokens=st.integers(0, 40))
    def allocate(self, data: st.DataObject, n_tokens: int) -> None:
        lease, _ = self.pick(data)
        before = self.core.usage().device
        held = len(lease.pages)
        need = max(0, -(-(lease.capacity_tokens + n_tokens) // PAGE) - held)
        lost = self.core.counts.get("dropped_dirty_pages", 0)
        answer = self.core.allocate(lease, n_tokens)
        fits = need <= before.free_pages + before.evictable_pages
        if self.core.counts.get("dropped_dirty_pages", 0) == lost:
            assert (answer is None) == fits, "evictable is exact"
        else:
            assert (answer, fits) == (None, False), "dirty pages go when nothing else will do"
        if answer is not None:
            assert self.core.usage().device == before, "a refusal has evicted nothing"
            assert answer.missing_pages == need - before.free_pages - before.evictable_pages
            assert answer.freeing_pages <= before.total_pages
        else:
            for slot in lease.pages[held:]:
                self.model.memory[DEVICE][slot] = GARBAGE
        self.section()

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), event=st.booleans())
    def commit(self, data: st.DataObject, event: bool) -> None:
        lease, tokens = self.pick(data)
        n_tokens = data.draw(st.integers(0, min(lease.capacity_tokens, len(tokens))))
        if lease.failed is None:
            self.model.compute(lease, tokens, n_tokens)
        done = self.core.commit(lease, n_tokens, object() if event else None)
        assert done.failed == lease.failed
        if done.failed is None:
            self.model.commit(lease, tokens, n_tokens)
        self.section()

    @rule(tokens=prompts, loads=st.integers(0, 3), releases=st.integers(0, 3))
    def serve(self, tokens: Toks, loads: int, releases: int) -> None:
        """A whole request."""
        if len(self.model.leases) >= 3:
            return
        rid = self.name()
        lease = self.core.lease(tokens, rid)
        self.model.leases[rid] = lease, tokens
        if loads:
            self.core.load(lease)
        self.section()
        held = len(lease.pages)
        if self.core.allocate(lease, max(0, len(tokens) - lease.capacity_tokens)) is None:
            for slot in lease.pages[held:]:
                self.model.memory[DEVICE][slot] = GARBAGE
            self.section()
            self.model.compute(lease, tokens, len(tokens))
            if self.core.commit(lease, len(tokens)).failed is None:
                self.model.commit(lease, tokens, len(tokens))
        self.section()
        if releases:
            self.end(lease, None)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), event=st.booleans())
    def release(self, data: st.DataObject, event: bool) -> None:
        lease, _ = self.pick(data)
        self.end(lease, object() if event else None)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        self.core.hold(self.pick(data)[0], object())

    # -- storage and waiters ------------------------------------------------------------------------------------------------

    @rule(tokens=prompts, stop=st.booleans())
    def prefetch(self, tokens: Toks, stop: bool) -> None:
        rid = self.name()
        job = self.core.prefetch(tokens, rid)
        if stop and job is not None:
            self.core.stop_prefetch(job, rid)
        self.section(may_evict=False)

    @rule(tokens=prompts)
    def acquire(self, tokens: Toks) -> None:
        if len(self.waiters) + len(self.model.leases) < 4:
            rid = self.name()
            self.waiters[self.core.acquire(tokens, rid)] = rid, tokens
            self.section()

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(sorted(self.waiters)))
        del self.waiters[waiter]
        self.core.cancel_acquire(waiter)
        self.core.cancel_acquire(waiter)
        self.section(may_evict=False)

    @rule(tokens=prompts)
    def stored(self, tokens: Toks) -> None:
        waiter = self.core.stored(tokens)
        answered = [e for e in self.section(may_evict=False) if isinstance(e, Wake) and e.waiter == waiter]
        if not answered:
            answer = self.core.cancel_waiter(waiter)
            assert isinstance(answer, tuple)
            assert answer[1] == "pending"

    @rule()
    def drained(self) -> None:
        waiter = self.core.drained()
        answered = [e for e in self.section(may_evict=False) if isinstance(e, Wake) and e.waiter == waiter]
        usage = self.core.usage()
        phases = (
            ("run", "limbo") if self.saves_ahead and usage.dirty_pages else ("run",)
        )  # their host pages may come free
        idle = not any(f"{kind}.{phase}" in usage.jobs for kind in ("write_back", "backup") for phase in phases)
        rest = usage.retries + usage.backlog_nodes
        assert bool(answered) == (self.core.degraded or (idle and not rest))
        self.core.cancel_waiter(waiter)

    # -- agreed inputs ------------------------------------------------------------------------------------------------------

    def round(self, hit, result, *, everything: bool = False, data: st.DataObject | None = None) -> None:  # type: ignore[no-untyped-def]
        wire = self.core.wire()
        values: list[tuple[int, Phase, int]] = []
        for job, phase in wire.slots:
            if not everything and data is not None and not data.draw(st.booleans()):
                continue
            if phase is Phase.HIT:
                values.append((job, phase, hit(ALL)))
            else:
                pages, sound = result(len(self.model.jobs[job].pages))
                values.append((job, phase, encode_result(pages, sound=sound)))
        rows = [job for job in wire.rows if everything or data is None or data.draw(st.booleans())]
        # one input at a time, so that the model can look between them; their order is that of one apply
        for job, phase, value in values:
            if phase is Phase.RUN:
                self.model.result(job, value >> 1, bool(value & 1))
            self.core.apply(self.now_ms, [(job, phase, value)], [])
            self.section()
        for job in rows:
            self.model.released(job)
            self.core.apply(self.now_ms, [], [job])
            self.section()

    @precondition(lambda self: self.core.needs_step)
    @rule(data=st.data())
    def agree(self, data: st.DataObject) -> None:
        def result(pages: int) -> tuple[int, bool]:
            if data.draw(st.integers(0, 3)):
                return pages, True
            return data.draw(st.integers(0, pages)), data.draw(st.integers(0, 3)) > 0

        self.round(lambda _: data.draw(st.integers(0, 12)), result, data=data)

    @rule(rounds=st.integers(1, 3))
    def agree_fully(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round(lambda n: n, lambda pages: (pages, True), everything=True)

    @rule(seconds=st.sampled_from([0, 1, 5]))
    def clock(self, seconds: int) -> None:
        self.now_ms += 1000 * seconds
        self.core.apply(self.now_ms, [], [])
        self.section(may_evict=False)
        assert self.core.next_due_ms is None or self.core.next_due_ms > self.now_ms

    @rule(
        odds=st.integers(0, 4),
        write_policy=st.sampled_from(POLICIES),
        eviction=st.sampled_from(EVICTIONS),
        store_on=st.sampled_from(STORE_ON),
    )
    def change(self, odds: int, write_policy: WritePolicy, eviction: Eviction, store_on: StoreOn) -> None:
        if odds == 0:
            self.core.set_eviction(eviction)
        elif odds == 2:
            other_time = store_on != self.core.state.policies.store_on
            assert (self.core.set_store_on(store_on) is not None) == (other_time and self.core.degraded)
        elif odds == 1:
            dirty, gaps = self.core.usage().dirty_pages, self.core.state.residents.gaps
            lossy = self.saves_ahead and bool(dirty or gaps)
            other = write_policy != self.core.state.policies.write
            refused = self.core.set_write_policy(write_policy)
            assert (refused is not None) == (other and (self.core.degraded or lossy))
        self.section(may_evict=False)

    @rule(odds=st.integers(0, 9))
    def reset(self, odds: int) -> None:
        if odds == 7:
            self.core.reset()
            self.model.reset()
            self.section(may_evict=False)

    @rule(odds=st.integers(0, 29))
    def degrade(self, odds: int) -> None:
        if odds == 17:
            self.core.degrade()
            self.model.reset()
            for job in self.model.jobs.values():
                job.settled = True
            self.section(may_evict=False)
            assert self.core.match(prompt(0, 40, 0, 40)).host == 0


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
