"""Sums over all requests and all fetches: they balance, whatever has happened."""

from __future__ import annotations

import random

import pytest

from hicache_actors.core import Core
from hicache_actors.core.words import Match, encode_result

from .kit import PAGE, Toks, answer, cached, compute, host_only, make, settle, whole

A = Toks(range(41))


def _balanced(core: Core) -> None:
    usage = core.usage()
    served, fetches = usage.served, usage.fetches
    assert sum(served.reasons.values()) == served.computed
    assert fetches.hit_pages == fetches.fulfilled_pages + sum(fetches.unfulfilled_pages.values())


def test_a_lease_counts_when_it_ends_and_once() -> None:
    core = make(storage=False)
    cached(core, A)
    before = core.usage().served
    lease = core.lease(A, "a")
    core.allocate(lease, 1)
    assert core.usage().served == before
    core.release(lease)
    core.release(lease)
    usage = core.usage()
    assert (usage.served.device - before.device, usage.served.computed - before.computed) == (40, 1)
    assert (usage.served_leases, usage.returned_leases) == (2, 0)


def test_a_lease_that_has_computed_nothing_is_given_back() -> None:
    core = make(storage=False)
    cached(core, A)
    before = core.usage().served
    core.release(core.lease(A, "a"))
    assert core.usage().served == before
    assert core.usage().returned_leases == 1


def test_tokens_are_counted_by_tier() -> None:
    core = make()
    host_only(core, A)
    before = core.usage().served
    lease = core.lease(A, "a")
    core.load(lease)
    settle(core)
    core.allocate(lease, 1)
    core.release(lease)
    assert core.usage().served.host - before.host == 40
    _balanced(core)


@pytest.mark.parametrize(
    ("hit", "host", "arrived", "unfulfilled"),
    [
        (10, 40, 10, {}),
        (10, 40, 7, {"fetch_incomplete": 3}),
        (10, 8, 4, {"host_capacity": 6}),
        (10, 8, 3, {"host_capacity": 6, "fetch_incomplete": 1}),
        (0, 40, 0, {}),
    ],
)
def test_each_page_that_storage_has_promised_is_fulfilled_or_has_a_reason(
    hit: int, host: int, arrived: int, unfulfilled: dict[str, int]
) -> None:
    core = make(host=host)
    job = core.prefetch(A, "a")
    assert job is not None
    settle(core, {job: encode_result(arrived)}, {job: hit})
    fetches = core.usage().fetches
    assert (fetches.hit_pages, fetches.fulfilled_pages) == (hit, arrived)
    assert fetches.unfulfilled_pages == unfulfilled


def test_a_short_hit_is_below_the_threshold() -> None:
    core = make(prefetch_threshold_tokens=4 * PAGE)
    job = core.prefetch(A, "a")
    assert job is not None
    settle(core, hits={job: 3})
    assert core.usage().fetches.unfulfilled_pages == {"below_threshold": 3}


def test_a_fetch_that_is_reset_or_degraded_keeps_the_books() -> None:
    for end, reason in (("reset", "reset"), ("degrade", "degraded")):
        core = make()
        job = core.prefetch(A, "a")
        assert job is not None
        answer(core, hits={job: 10})
        getattr(core, end)()
        settle(core)
        assert core.usage().fetches.unfulfilled_pages == {reason: 10}
        _balanced(core)


def test_the_sums_balance_under_random_requests() -> None:
    draw = random.Random(5)
    core = make(device=24, host=20)
    prompts = [Toks([*range(draw.randrange(30)), *range(1000 * family, 1000 * family + 20)]) for family in range(6)]
    asked = 0
    for number in range(200):
        tokens = draw.choice(prompts)
        core.prefetch(tokens, f"r{number}")
        if draw.random() < 0.8:
            settle(core, hits={job: draw.randrange(12) for job in core.state.jobs.open})
        lease = core.lease(tokens, f"r{number}")
        core.load(lease)
        if draw.random() < 0.9 and core.allocate(lease, len(tokens) - lease.usable_tokens) is None:
            asked += len(tokens)
            settle(core)
            core.commit(lease, len(tokens))
        core.release(lease)
        if draw.random() < 0.05:
            core.reset()
        _balanced(core)
    served = core.usage().served
    assert served.device + served.host + served.storage + served.computed == asked
    assert min(served.device, served.host, served.storage) > 0
    assert core.usage().staged_pages == 0 or core.state.jobs.open


def test_a_blank_lease_takes_nothing_and_publishes_what_is_new() -> None:
    core = make(storage=False)
    cached(core, Toks(range(21)))
    lease = core.lease(A, "a", blank=True)
    assert (list(lease.pages), lease.usable_tokens) == ([], 0)
    assert core.allocate(lease, 41) is None
    committed = core.commit(lease, 41)
    assert (committed.published_pages, committed.private_pages) == (5, 6), "five twins, and the open page"
    assert lease.account.reasons == {"shadow": 40, "open_page": 1}
    core.release(lease)
    settle(core)
    whole(core)


def test_a_disabled_core_hands_out_slots_and_keeps_nothing() -> None:
    core = make(host=0, storage=False, enabled=False)
    lease = compute(core, A, "a")
    assert lease.failed is None
    assert core.match(A) == Match(0, 0, 0)
    waiter = core.acquire(A, "b")
    (wake,) = core.take_effects()
    assert getattr(wake, "waiter", None) == waiter
    account = core.state.leases["b"].account
    assert account.reasons == {"open_page": 1, "disabled": 40}
    core.release(core.state.leases["b"])
    core.release(lease)
    assert core.needs_step is False
    whole(core)
