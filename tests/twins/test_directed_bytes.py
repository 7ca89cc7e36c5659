"""Directed scenarios on twins: what gives wrong bytes or divergence if built otherwise (A1 to A8).

Every step compares the replicas' digests, checks Core and asks the worlds for wrong bytes; the tests assert the rest.
"""

from __future__ import annotations

import pytest

from hicache_actors.core.words import LoadResult, Phase, Shortfall, StartDrain, StartWriteBack, encode_result
from hicache_actors.testing.mover import Faults
from hicache_actors.testing.twins import TwinRank

from .stage import (
    PAGE,
    SEEDS,
    begin,
    clear_device,
    forward,
    host_only,
    idle,
    prompt_of,
    publish,
    release,
    stage,
    started,
    stuck_at,
    until,
    with_faults,
)

seeds = pytest.mark.parametrize("seed", SEEDS)
A = prompt_of(10 * PAGE + 1)


@seeds
def test_a1_released_on_one_rank_each_is_released_on_none(seed: int) -> None:
    twins = stage(seed)
    first, second = begin(twins, A, "a"), begin(twins, prompt_of(9, 500), "b")

    def let_go(rank: TwinRank) -> None:
        for lease, hold in ((first, "hold a"), (second, "hold b")):
            rank.core.hold(lease[rank.rank], hold)
            rank.core.release(lease[rank.rank])

    twins.step(let_go)
    for rank, hold in zip(twins.ranks, ("hold a", "hold b"), strict=True):
        rank.world.fire(hold)
    idle(twins, 20)
    for rank in twins.ranks:
        assert rank.core.usage().device.free_pages == rank.options.device_pages - 11 - 3
    for rank, hold in zip(twins.ranks, ("hold b", "hold a"), strict=True):
        rank.world.fire(hold)
    twins.settle()
    twins.must_be_whole()


@seeds
@pytest.mark.parametrize("lag", [2, 3])
def test_a2_a_hit_sent_twice_is_never_taken_as_a_result(seed: int, lag: int) -> None:
    twins = stage(seed, lag=lag, stored=[(A, (10, 9))])
    (job, _) = twins.step(lambda rank: rank.core.prefetch(A, "a"))
    assert job is not None
    with_faults(twins, stuck_at(4), ranks=[1])  # rank 1 answers the query and then reads for ever
    for _ in range(40):
        twins.step(lambda rank: None)
        for rank in twins.ranks:
            assert rank.core.match(A).host == 0, "nothing has been read on rank 1"
    assert any(phase is Phase.RUN for _, phase in twins.ranks[0].core.wire().slots)
    for rank in twins.ranks:
        rank.board.done(job, Phase.RUN, encode_result(4))  # the deadline
    idle(twins, 2 * lag + 2)
    assert {rank.core.match(A).host for rank in twins.ranks} == {4 * PAGE}


@seeds
def test_a3_a_release_drains_whether_or_not_its_event_has_fired_here(seed: int) -> None:
    twins = stage(seed)
    leases = begin(twins, A, "a")
    twins.ranks[0].world.advance(10_000)  # the pass has ended on rank 0, surely not everywhere
    twins.step(lambda rank: rank.core.release(leases[rank.rank], ("a", "pass")), by_ms=0)
    assert all(len(started(rank, StartDrain)) == 1 for rank in twins.ranks)
    assert all(rank.core.needs_step for rank in twins.ranks)
    twins.settle()
    twins.must_be_whole()


@seeds
@pytest.mark.parametrize("owner_first", [True, False])
def test_a4_slots_of_a_failed_load_are_a_stray_of_all_who_hold_them(seed: int, owner_first: bool) -> None:
    twins = stage(seed)
    host_only(twins, A)
    with_faults(twins, stuck_at(4))
    owner = begin(twins, A, "owner")
    joined = begin(twins, A, "joined")
    assert all(lease.usable_tokens == 10 * PAGE for lease in joined)
    (job,) = owner[0].loads
    for rank in twins.ranks:
        rank.board.done(job, Phase.RUN, encode_result(4))
    idle(twins, 6)
    for rank in twins.ranks:
        assert {owner[rank.rank].failed, joined[rank.rank].failed} == {"load_failed"}
        match = rank.core.match(A)
        assert (match.device, match.loading, match.host) == (4 * PAGE, 4 * PAGE, 10 * PAGE)
    old = set(owner[0].pages[4:10])
    first, second = (owner, joined) if owner_first else (joined, owner)
    release(twins, first)
    with_faults(twins, Faults(hang=0.0, fail=0.0))

    def again(rank: TwinRank) -> set[int]:
        lease = rank.core.lease(A, "again")
        assert not isinstance(rank.core.load(lease), Shortfall)
        forward(rank, lease, A, ("again", "pass"))
        return set(lease.pages[4:10])

    assert not twins.step(again)[0] & old, "loaded again into slots that the hung copy may still write"
    release(twins, second, ("owner", "pass"))
    idle(twins, 20)
    for rank in twins.ranks:
        rank.board.released(job)  # the hung copy has ended at last
        rank.world.fire(("load", job))
    twins.settle()
    for rank in twins.ranks:
        rank.world.emit(("again", "pass"))
        assert rank.core.match(A).device == 10 * PAGE
    assert all(not rank.world.violations for rank in twins.ranks)


@seeds
def test_a5_target_slots_of_a_load_are_free_at_released_not_at_result(seed: int) -> None:
    twins = stage(seed)
    host_only(twins, A)
    with_faults(twins, stuck_at(0))
    leases = begin(twins, A, "a")
    (job,) = leases[0].loads
    targets = set(leases[0].pages[:10])
    for rank in twins.ranks:
        rank.board.done(job, Phase.RUN, encode_result(0))  # the deadline
    until(twins, lambda: twins.ranks[0].core.load_result(job) is not None)
    release(twins, leases)
    free_pages = twins.ranks[0].core.usage().device.free_pages

    def take(rank: TwinRank) -> set[int]:
        lease = rank.core.lease(prompt_of(1, 7000), "taker")
        assert rank.core.allocate(lease, free_pages * PAGE) is None
        assert isinstance(rank.core.allocate(lease, PAGE), Shortfall)
        pages = set(lease.pages)
        rank.core.release(lease)
        return pages

    assert not twins.step(take)[0] & targets
    assert all(job in rank.core.wire().rows for rank in twins.ranks)
    for rank in twins.ranks:
        rank.board.released(job)
        rank.world.fire(("load", job))
    twins.settle()
    assert {rank.core.usage().device.free_pages for rank in twins.ranks} == {free_pages + 10}
    twins.must_be_whole()


@seeds
def test_a6_a_reset_outlives_open_prefetches_and_old_leases(seed: int) -> None:
    other = prompt_of(9, 700)
    twins = stage(seed, stored=[(A, (10, 10))])
    leases = begin(twins, other, "old")
    (job, _) = twins.step(lambda rank: rank.core.prefetch(A, "a"))
    assert job is not None
    until(twins, lambda: any(phase is Phase.RUN for _, phase in twins.ranks[0].core.wire().slots), by_ms=5)
    twins.step(lambda rank: rank.core.reset())
    committed = twins.step(lambda rank: rank.core.commit(leases[rank.rank], len(other), ("old", "pass")))
    assert [(c.published_pages, c.failed) for c in committed] == [(0, "reset")] * 2
    twins.settle()
    for rank in twins.ranks:
        assert (rank.core.match(A).host, rank.core.match(other).host) == (0, 0)
    release(twins, leases, ("old", "pass"))
    twins.settle()
    twins.must_be_whole()


@seeds
@pytest.mark.parametrize("released_first", [True, False])
def test_a7_a_verdict_belongs_to_the_load_and_names_its_cause(seed: int, released_first: bool) -> None:
    twins = stage(seed)
    host_only(twins, A)
    with_faults(twins, stuck_at(6))
    leases = begin(twins, A, "a")
    (job,) = leases[0].loads
    assert all(rank.core.load_result(job) is None for rank in twins.ranks)
    if released_first:
        release(twins, leases, ("a", "pass"))
    twins.ranks[0].board.done(job, Phase.RUN, encode_result(6))
    twins.ranks[1].board.done(job, Phase.RUN, encode_result(3, sound=False))
    idle(twins, 6)
    results = [rank.core.load_result(job) for rank in twins.ranks]
    assert results == [LoadResult(3 * PAGE, "load_failed")] * 2
    for rank in twins.ranks:
        assert rank.core.match(A).host == 3 * PAGE, "the bad page is gone on every rank"
    if not released_first:
        release(twins, leases, ("a", "pass"))
    assert [rank.core.load_result(job) for rank in twins.ranks] == results
    twins.step(lambda rank: rank.core.forget_load(job, leases[rank.rank].number))


@seeds
def test_a7_a_short_load_with_a_good_source_may_be_tried_again(seed: int) -> None:
    twins = stage(seed)
    host_only(twins, A)
    with_faults(twins, stuck_at(3))
    leases = begin(twins, A, "a")
    (job,) = leases[0].loads
    for rank in twins.ranks:
        rank.board.done(job, Phase.RUN, encode_result(3))
    idle(twins, 6)
    for rank in twins.ranks:
        match = rank.core.match(A)
        assert (match.device, match.host) == (3 * PAGE, 10 * PAGE)
        rank.board.released(job)
        rank.world.fire(("load", job))
    release(twins, leases, ("a", "pass"))
    with_faults(twins, Faults(hang=0.0, fail=0.0))
    again = begin(twins, A, "again")
    twins.settle()
    assert [rank.core.load_result(again[rank.rank].loads[0]) for rank in twins.ranks] == [LoadResult(10 * PAGE)] * 2
    release(twins, again, ("again", "pass"))
    twins.settle()
    twins.must_be_whole()


@seeds
def test_a8_what_is_lost_on_both_tiers_leaves_with_all_below_it(seed: int) -> None:
    longer = prompt_of(14 * PAGE + 1)
    twins = stage(seed)
    host_only(twins, longer)
    with_faults(twins, stuck_at(4))
    leases = begin(twins, A, "a")
    (job,) = leases[0].loads
    for rank in twins.ranks:
        rank.board.done(job, Phase.RUN, encode_result(4, sound=False))
    idle(twins, 6)
    for rank in twins.ranks:
        match = rank.core.match(longer)
        assert (match.device, match.host) == (4 * PAGE, 4 * PAGE)
        rank.board.released(job)
        rank.world.fire(("load", job))
    with_faults(twins, Faults(hang=0.0, fail=0.0))
    release(twins, leases, ("a", "pass"))
    twins.settle()
    clear_device(twins)
    fresh = publish(twins, longer, "fresh")  # the same place is filled anew
    twins.settle()
    for rank in twins.ranks:
        assert rank.core.match(longer).host == 14 * PAGE
    release(twins, fresh)
    twins.settle()
    twins.must_be_whole()


@seeds
def test_a8_an_unproven_page_is_no_source_of_a_write_back(seed: int) -> None:
    longer = prompt_of(13 * PAGE + 1)
    twins = stage(seed)
    host_only(twins, A)
    with_faults(twins, stuck_at(2))
    leases = begin(twins, longer, "a")
    (job,) = leases[0].loads
    twins.step(lambda rank: rank.core.commit(leases[rank.rank], len(longer), ("a", "pass")))
    for rank in twins.ranks:
        assert rank.core.match(longer).loading == 13 * PAGE
        assert not started(rank, StartWriteBack), "it hangs below pages that may never arrive"
    for rank in twins.ranks:
        rank.board.done(job, Phase.RUN, encode_result(2))
    idle(twins, 6)
    for rank in twins.ranks:
        match = rank.core.match(longer)
        assert (match.device, match.loading, match.host) == (2 * PAGE, 2 * PAGE, 10 * PAGE)
    release(twins, leases, ("a", "pass"))
