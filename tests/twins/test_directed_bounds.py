"""Directed scenarios on twins: what grows, starves, spins or waits for ever if built otherwise (B9 to B16)."""

from __future__ import annotations

from functools import partial

import pytest

from hicache_actors.core import CoreLease
from hicache_actors.core.words import (
    Phase,
    Settled,
    Shortfall,
    StartBackup,
    StartDrain,
    StartLoad,
    StartPrefetch,
    StartWriteBack,
    Wake,
    encode_result,
)
from hicache_actors.errors import PeerError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.testing.twins import TwinRank

from .stage import (
    CALM,
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
NEVER = stuck_at(0)


@seeds
def test_b9_one_section_opens_one_write_back_one_backup_one_drain(seed: int) -> None:
    twins = stage(seed)
    prompts = [prompt_of(2 * PAGE + 1, 1000 * n) for n in range(4)]
    leases = [begin(twins, prompt, f"r{n}") for n, prompt in enumerate(prompts)]

    def commit_all(rank: TwinRank) -> None:
        for n, prompt in enumerate(prompts):
            rank.core.commit(leases[n][rank.rank], len(prompt), (f"r{n}", "pass"))

    twins.step(commit_all)
    for rank in twins.ranks:
        (write_back,) = started(rank, StartWriteBack)
        assert isinstance(write_back, StartWriteBack)
        assert len(write_back.source) == len(write_back.target) == 4 * 8
    until(twins, lambda: started(twins.ranks[0], StartBackup))
    (backup,) = started(twins.ranks[0], StartBackup)
    assert isinstance(backup, StartBackup)
    assert sum(path.pages for path in backup.paths) == 8

    def release_all(rank: TwinRank) -> None:
        for n in range(4):
            rank.core.release(leases[n][rank.rank], (f"r{n}", "pass"))

    twins.step(release_all)
    assert [len(started(rank, StartDrain)) for rank in twins.ranks] == [1, 1]
    twins.settle()
    twins.must_be_whole()


@seeds
def test_b9_hung_prefetches_leave_room_in_the_tables_for_loads(seed: int) -> None:
    wanted = [prompt_of(5 * PAGE, 1000 * n) for n in range(1, 7)]
    twins = stage(seed, table_slots=4, table_rows=4, stored=[(prompt, (4, 4)) for prompt in wanted])
    host_only(twins, A)
    with_faults(twins, NEVER)
    for n, prompt in enumerate(wanted):
        twins.step(partial(prefetch, prompt=prompt, rid=f"p{n}"))
    idle(twins, 30)
    with_faults(twins, CALM)
    wire = twins.ranks[0].core.wire()
    assert len(wire.slots) == 2, "half of the table at most"
    leases = begin(twins, A, "a")
    (job,) = leases[0].loads
    until(twins, lambda: twins.ranks[0].core.load_result(job) is not None)
    assert {rank.core.match(A).device for rank in twins.ranks} == {10 * PAGE}


@seeds
def test_b9_few_retries_fall_due_in_one_apply(seed: int) -> None:
    twins = stage(seed, device_pages=120, host_pages=120)
    prompts = [prompt_of(PAGE + 1, 1000 * n) for n in range(20)]
    for n, prompt in enumerate(prompts):
        leases = publish(twins, prompt, f"r{n}")
        until(twins, lambda: started(twins.ranks[0], StartBackup))
        backup = [e for e in twins.ranks[0].effects if isinstance(e, StartBackup)]
        for rank in twins.ranks:
            rank.board.done(backup[0].job, Phase.RUN, encode_result(0))
        release(twins, leases)
    twins.settle()
    for rank in twins.ranks:
        rank.world.advance(60_000)
    seen = []

    def count(rank: TwinRank) -> int:
        return rank.core.usage().nodes

    for n in range(12):
        twins.step(count)
        opened = [e for e in twins.ranks[0].effects if isinstance(e, StartBackup)]
        seen.append(sum(path.pages for effect in opened for path in effect.paths))
        if not n:
            begin(twins, prompt_of(3, 90_000), "ticker")  # a round must happen for the clock to move
    assert max(seen) <= 8


@seeds
def test_b10_decode_commits_leave_few_nodes(seed: int) -> None:
    twins = stage(seed, device_pages=80, host_pages=80)
    prompt = prompt_of(PAGE + 1)
    leases = publish(twins, prompt, "a")

    def commit(rank: TwinRank, page: int) -> None:
        rank.core.commit(leases[rank.rank], page * PAGE, ("a", page))

    for page in range(2, 40):
        more = range(page * PAGE - PAGE + 1, page * PAGE + 1)
        prompt.append(more)

        def decode(rank: TwinRank, page: int = page) -> None:
            lease = leases[rank.rank]
            if len(prompt) > lease.capacity_tokens:
                assert rank.core.allocate(lease, len(prompt) - lease.capacity_tokens) is None
            keys = rank.world.prompt_keys(prompt, page)
            rank.world.forward(("a", page), [], [(lease.pages[page - 1], keys[page - 1])], ())

        twins.step(decode)
        twins.step(partial(commit, page=page))
    twins.settle()
    release(twins, leases, ("a", 39))
    twins.settle()
    for rank in twins.ranks:
        assert rank.core.match(prompt).device == 39 * PAGE
        assert rank.core.usage().nodes <= 3
    twins.must_be_whole()


@seeds
def test_b11_an_acquire_is_settled_in_an_apply_on_all_ranks_at_once(seed: int) -> None:
    twins = stage(seed, stored=[(A, (10, 8))])
    waiters = twins.step(lambda rank: rank.core.acquire(A, "a", None, 0))
    assert len(set(waiters)) == 1
    woken: list[object] = []

    def both_woken() -> bool:
        woken[:] = [wake.value for rank in twins.ranks for wake in rank.effects if isinstance(wake, Wake)]
        assert len(woken) != 1, "in the same apply on both ranks"
        return bool(woken)

    until(twins, both_woken)
    for lease in woken:
        assert isinstance(lease, CoreLease)
        assert (lease.usable_tokens, len(lease.loads)) == (8 * PAGE, 1)
    leases = [lease for lease in woken if isinstance(lease, CoreLease)]
    twins.step(lambda rank: forward(rank, leases[rank.rank], A, ("a", "pass")))
    twins.settle()
    for rank in twins.ranks:
        rank.world.emit(("a", "pass"))
        account = leases[rank.rank].account
        assert account.storage == 8 * PAGE
    release(twins, leases, ("a", "pass"))
    twins.settle()
    twins.must_be_whole()


@seeds
def test_b12_a_prefetch_pins_nothing_on_device(seed: int) -> None:
    longer = prompt_of(16 * PAGE)
    twins = stage(seed, stored=[(longer, (15, 15))])
    host_only(twins, A)
    leases = begin(twins, A, "a")
    twins.settle()
    release(twins, leases, ("a", "pass"))
    twins.settle()
    twins.step(lambda rank: rank.core.prefetch(longer, "p"))
    with_faults(twins, NEVER)
    until(twins, lambda: twins.ranks[0].core.wire().slots[0][1] is Phase.RUN)

    def take_all(rank: TwinRank) -> None:
        lease = rank.core.lease(prompt_of(1, 9000), "big")
        assert rank.core.allocate(lease, rank.options.device_pages * PAGE) is None
        rank.core.release(lease)

    twins.step(take_all)
    for rank in twins.ranks:
        assert rank.core.match(A).device == 0
        assert rank.core.match(A).host == 10 * PAGE, "the anchor stays on the host"


@seeds
def test_b12_an_anchor_pin_ends_at_result_and_a_lost_anchor_publishes_nothing(seed: int) -> None:
    longer = prompt_of(16 * PAGE)
    twins = stage(seed, stored=[(longer, (15, 15))])
    host_only(twins, A)
    (job, _) = twins.step(lambda rank: rank.core.prefetch(longer, "p"))
    assert job is not None
    with_faults(twins, NEVER)  # the query is answered, the reads hang
    until(twins, lambda: twins.ranks[0].core.wire().slots[0][1] is Phase.RUN)
    leases = begin(twins, A, "a")
    (load,) = leases[0].loads
    for rank in twins.ranks:
        rank.board.done(load, Phase.RUN, encode_result(6, sound=False))  # the anchor loses its last pages
    idle(twins, 6)
    for rank in twins.ranks:
        rank.board.done(job, Phase.RUN, encode_result(5))
    idle(twins, 6)
    for rank in twins.ranks:
        assert rank.core.match(longer).host == 6 * PAGE
        for ended in (job, load):
            rank.board.released(ended)
        rank.world.fire(("load", load))
    release(twins, leases, ("a", "pass"))
    twins.settle()
    twins.must_be_whole()


@seeds
def test_b13_an_open_hold_lets_empty_steps_pace_themselves(seed: int) -> None:
    twins = stage(seed)
    leases = begin(twins, A, "a")

    def let_go(rank: TwinRank) -> None:
        rank.core.hold(leases[rank.rank], "thread")
        rank.core.release(leases[rank.rank], ("a", "pass"))

    twins.step(let_go)
    idle(twins, 20)
    assert twins.needs_step
    for driver in twins.drivers:
        driver.begin_step()
        driver.end_step()
    assert [driver.pace_s for driver in twins.drivers] == [0.005, 0.005]
    for rank in twins.ranks:
        rank.world.fire("thread")
    twins.settle()
    assert [driver.pace_s for driver in twins.drivers] == [0.0, 0.0]
    twins.must_be_whole()


@seeds
def test_b14_a_copy_behind_a_long_forward_is_not_late(seed: int) -> None:
    twins = stage(seed)
    leases = twins.step(lambda rank: rank.core.lease(A, "a"))

    def allocate(rank: TwinRank) -> None:
        assert rank.core.allocate(leases[rank.rank], len(A)) is None
        slots = leases[rank.rank].pages[:10]
        rank.world.plan(slots, rank.world.prompt_keys(A, 10))

    twins.step(allocate)
    twins.step(lambda rank: rank.core.commit(leases[rank.rank], len(A), "long pass"))
    idle(twins, 60, by_ms=100)  # fifteen deadlines
    for rank in twins.ranks:
        assert rank.core.match(A).host == 10 * PAGE, "on device; the write-back waits"
        for slot, key in zip(leases[rank.rank].pages[:10], rank.world.prompt_keys(A, 10), strict=True):
            rank.world.device[slot] = key
        rank.world.fire("long pass")
    twins.settle()
    release(twins, leases)
    twins.settle()
    clear_device(twins)
    assert {rank.core.match(A).host for rank in twins.ranks} == {10 * PAGE}
    twins.must_be_whole()


@seeds
@pytest.mark.parametrize("killed", [0, 1])
def test_b15_degrade_fails_open_loads_and_leaves_other_leases_whole(seed: int, killed: int) -> None:
    other = prompt_of(6 * PAGE + 1, 800)
    twins = stage(seed, device_pages=60, stored=[(prompt_of(9 * PAGE, 3000), (8, 8))])
    host_only(twins, A)
    computed = publish(twins, other, "computed")
    with_faults(twins, NEVER)
    twins.step(lambda rank: rank.core.prefetch(prompt_of(9 * PAGE, 3000), "p"))
    loading = begin(twins, A, "loading")
    (job,) = loading[0].loads
    twins.kill(killed)
    until(twins, lambda: all(rank.core.degraded for rank in twins.ranks))
    for rank in twins.ranks:
        assert loading[rank.rank].failed is not None
        result = rank.core.load_result(job)
        assert result is not None
        assert result.failed is not None
        assert len(computed[rank.rank].pages) == 7
        assert (rank.core.match(A).host, rank.core.match(other).device) == (0, 0)

    def live_on(rank: TwinRank) -> None:
        lease = computed[rank.rank]
        other.append(range(1)) if rank.rank == 0 else None
        assert rank.core.allocate(lease, PAGE) is None
        assert rank.core.commit(lease, len(other), ("computed", "pass")).published_pages == 0
        assert isinstance(rank.core.load(rank.core.lease(A, "later")), Shortfall)

    twins.step(live_on)
    for rank in twins.ranks:
        assert not [e for e in rank.effects if isinstance(e, StartLoad | StartPrefetch | StartWriteBack)]
    release(twins, computed, ("computed", "pass"))
    release(twins, loading, ("loading", "pass"))
    idle(twins, 50)
    for rank in twins.ranks:
        if job in rank.core.wire().rows:
            rank.board.released(job)  # the hung copy has ended
        rank.world.fire(("load", job))
    idle(twins, 50)
    for rank in twins.ranks:
        assert rank.core.degraded, "final"


@seeds
def test_b15_survivors_of_a_vanished_peer_live_on_without_the_cache(seed: int) -> None:
    twins = stage(seed)
    host_only(twins, A)
    with_faults(twins, NEVER)
    leases = begin(twins, A, "loading")
    rank, driver = twins.ranks[0], twins.drivers[0]
    for _ in range(2 * driver.lag + 2):  # the peer makes no step any more
        driver.begin_step(timeout_s=0)
        driver.end_step()
    assert isinstance(driver.failure, PeerError)
    assert rank.core.degraded
    assert not driver.needs_step, "there is nobody to agree with"
    lease = leases[0]
    assert (lease.failed, len(lease.pages)) == ("load_failed", 11)
    driver.begin_step()
    with driver.section():
        assert rank.core.match(A).host == 0
        later = rank.core.lease(A, "later")
        assert rank.core.allocate(later, 2 * PAGE) is None
        rank.core.release(later)
        rank.core.release(lease, ("loading", "pass"))
    driver.end_step()
    rank.core.check()


@seeds
def test_b16_a_refused_write_back_is_asked_again_by_the_next_that_passes(seed: int) -> None:
    twins = stage(seed, host_pages=12)
    host_only(twins, A)
    with_faults(twins, NEVER)
    first = begin(twins, A, "first")  # its load hangs, and pins 10 of the 12 host pages
    (load,) = first[0].loads
    with_faults(twins, CALM)
    other = prompt_of(5 * PAGE + 1, 600)
    second = begin(twins, other, "second")
    twins.step(lambda rank: rank.core.commit(second[rank.rank], len(other), ("second", "pass")))
    assert [sum(len(e.source) for e in writes(rank)) for rank in twins.ranks] == [2 * 4] * 2, (
        "there is room for two pages"
    )
    for rank in twins.ranks:
        rank.board.done(load, Phase.RUN, encode_result(0))
        rank.board.released(load)
        rank.world.fire(("load", load))
    idle(twins, 6)
    release(twins, first, ("first", "pass"))
    for _ in range(60):
        twins.step(lambda rank: None)
        assert not any(writes(rank) for rank in twins.ranks), "no timer asks"
    passing = twins.step(lambda rank: rank.core.lease(other, "passing"))
    assert [sum(len(e.source) for e in writes(rank)) for rank in twins.ranks] == [3 * 4] * 2
    twins.settle()
    release(twins, passing)
    release(twins, second, ("second", "pass"))
    twins.settle()
    twins.must_be_whole()


def prefetch(rank: TwinRank, prompt: Prompt, rid: str) -> int | None:
    return rank.core.prefetch(prompt, rid)


def writes(rank: TwinRank) -> list[StartWriteBack]:
    return [effect for effect in rank.effects if isinstance(effect, StartWriteBack)]


def test_settled_names_the_pages_of_a_declined_prefetch() -> None:
    twins = stage(0, stored=[])
    (job, _) = twins.step(lambda rank: rank.core.prefetch(Prompt(range(40)), "p"))
    until(twins, lambda: started(twins.ranks[1], Settled))
    settled = [e for e in twins.ranks[1].effects if isinstance(e, Settled)]
    assert (settled[0].job, settled[0].pages) == (job, 0)
    twins.must_be_whole()
