"""The leader's intake on two replicas, without a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hicache_actors.core import Core, CoreConfig, CoreLease
from hicache_actors.core.words import Wake
from hicache_actors.errors import PeerError, UsageError
from hicache_actors.keys.scope import Scope
from hicache_actors.ranks.intake import Intake
from hicache_actors.ranks.intents import (
    AdvanceEpoch,
    AnyTold,
    AskAcquire,
    AskDrained,
    Release,
    Reset,
    SetEviction,
    SetStoreOn,
    SetWritePolicy,
    TakeBack,
    decode,
    encode,
)
from hicache_actors.ranks.intents import Batch as IntakeBatch
from hicache_actors.testing.pools import check_whole
from hicache_actors.testing.small import prompt


class Replica:
    """One rank: its Core, and the answers that came."""

    def __init__(self, *, leads: bool) -> None:
        self.core = Core(CoreConfig(page_size=4, device_pages=8, host_pages=8, storage=False))
        self.intake = Intake(leads=leads)
        self.answers: list[object] = []

    def apply(self, data: bytes) -> None:
        self.core.apply(0, [], [], self.intake.admit(data))
        for effect in self.core.take_effects():
            if isinstance(effect, Wake):
                self.intake.woken(effect.waiter, effect.value)
                self.answers.append(effect.value)


class Two:
    def __init__(self) -> None:
        self.leader, self.other = Replica(leads=True), Replica(leads=False)
        self.waiters: dict[int, int] = {}

    def post(self, told: AnyTold, intent: Callable[[Core], Any]) -> None:
        self.leader.intake.post(intent, told)

    def ask(self, number: int) -> None:
        def acquire(core: Core) -> None:
            self.waiters[number] = core.acquire(prompt(2), f"r{number}", None, 0)

        self.post(AskAcquire(number, prompt(2), f"r{number}", None, 0), acquire)

    def take_back(self, number: int) -> None:
        def cancel(core: Core) -> None:
            if number in self.waiters:
                core.cancel_acquire(self.waiters[number])

        self.post(TakeBack(number, True), cancel)

    def step(self) -> None:
        data = self.leader.intake.take_bytes()
        self.leader.apply(data)
        self.other.apply(data)
        assert self.leader.core.log_digest == self.other.core.log_digest
        assert self.leader.core.state_digest() == self.other.core.state_digest()


def test_an_ask_is_admitted_alike_and_its_lease_given_back_by_number() -> None:
    two = Two()
    two.ask(1)
    two.step()
    (lease,) = two.leader.answers
    assert isinstance(lease, CoreLease)
    two.post(Release("r1", lease.number, False), lambda core: core.release(lease))
    two.step()
    check_whole(two.other.core)
    two.ask(2)
    two.step()
    two.post(Release("r2", lease.number, False), lambda core: None)  # of the lease before: it must not touch this one
    two.step()
    assert two.other.core.usage().leases == 1


@pytest.mark.parametrize("steps_between", [0, 1, 2])
def test_a_caller_that_has_gone_leaves_nothing_on_any_rank(steps_between: int) -> None:
    """Before it was admitted, just when its lease has come, and later."""
    two = Two()
    two.ask(1)
    for _ in range(steps_between):
        two.step()
    two.take_back(1)
    two.step()
    two.step()
    for replica in (two.leader, two.other):
        check_whole(replica.core)
    two.post(AskDrained(2), lambda core: core.drained())
    two.step()
    assert two.other.answers[-1] == 0
    assert not two.other.intake._asked


def test_what_core_refuses_is_refused_alike() -> None:
    two = Two()
    two.ask(1)
    two.step()

    def refused(core: Core) -> None:
        with pytest.raises(UsageError):
            core.acquire(prompt(2), "r1", None, 0)

    two.post(AskAcquire(2, prompt(2), "r1", None, 0), refused)
    two.step()
    assert len(two.other.answers) == 1


def test_another_policy_holds_on_all_ranks() -> None:
    two = Two()
    two.post(SetWritePolicy("write_back"), lambda core: core.set_write_policy("write_back"))
    two.post(SetEviction("slru"), lambda core: core.set_eviction("slru"))
    two.post(SetStoreOn("host_evict"), lambda core: core.set_store_on("host_evict"))
    two.step()
    for rank in (two.leader, two.other):
        policies = rank.core.state.policies
        assert (policies.write, policies.eviction.name, policies.store_on) == ("write_back", "slru", "host_evict")
    assert two.leader.core.state_digest() == two.other.core.state_digest()
    with pytest.raises(PeerError, match="not an intake"):
        decode(encode(IntakeBatch(1, [SetEviction("random")])))  # type: ignore[arg-type]


def test_other_weights_come_to_all_ranks_in_the_same_step() -> None:
    two = Two()
    two.post(AdvanceEpoch("v2"), lambda core: core.advance_epoch("v2"))
    epochs = two.leader.core.epoch
    two.step()
    assert two.leader.core.epoch == two.other.core.epoch == epochs + 1


def test_an_intake_is_applied_once_in_order() -> None:
    two = Two()
    first, second = two.leader.intake.take_bytes(), two.leader.intake.take_bytes()
    with pytest.raises(UsageError, match="in order"):
        two.other.apply(second)
    two.other.apply(first)
    with pytest.raises(UsageError, match="in order"):
        two.other.apply(first)
    with pytest.raises(PeerError, match="not an intake"):
        two.other.apply(b"\xc1")


def test_only_the_leader_decides() -> None:
    two = Two()
    with pytest.raises(UsageError, match="the leader's"):
        two.other.intake.post(lambda core: None, Reset())
    with pytest.raises(UsageError, match="the leader's"):
        two.other.intake.take_bytes()


def test_without_its_peers_the_leader_runs_what_was_left() -> None:
    two = Two()
    ran: list[int] = []
    two.post(Reset(), lambda core: ran.append(1))
    two.leader.intake.take_bytes()
    two.post(Reset(), lambda core: ran.append(2))
    for intent in two.leader.intake.give_up():
        intent(two.leader.core)
    assert ran == [1, 2]


def test_prompts_travel_with_their_scope() -> None:
    asked = prompt(3, scope=Scope(lora="a", salt="tenant"))
    (told,) = decode(encode(IntakeBatch(1, [AskAcquire(1, asked, "r", 0.5, 2)]))).told
    assert isinstance(told, AskAcquire)
    assert (told.prompt.tolist(), told.prompt.scope) == (asked.tolist(), asked.scope)
    assert (told.rid, told.deadline_s, told.priority) == ("r", 0.5, 2)
