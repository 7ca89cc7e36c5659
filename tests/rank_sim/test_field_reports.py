"""Reports from the field on several ranks, by number, in virtual time: each is a world that hung or split an engine.

Whatever the world, the harness holds every rank to the same decisions after every step (free pages, jobs, accounts and every answer
included), to right bytes, and to whole pools at the end; a test adds what its report is about.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import msgspec
import pytest

from hicache_actors.backends.wrappers import Fault, at_random
from hicache_actors.cache.api import HiCache
from hicache_actors.errors import BackendError, ConfigError, TransferError
from hicache_actors.memory.kv import KVTensors
from hicache_actors.testing.lives import run_checked
from hicache_actors.testing.ranks import RankHarness, RankOptions, SimNetwork, SimRank
from hicache_actors.testing.sim_device import SimDevice
from hicache_actors.testing.small import SHAPE, small_config

SEEDS = range(3)


def runs(
    attach: Callable[[SimRank], None] | None = None, *, ranks: int = 2, lag: int = 1, steps: int = 40
) -> list[RankHarness]:
    options = [RankOptions(seed=seed, ranks=ranks, lag=lag, steps=steps, trouble="none") for seed in SEEDS]
    done = [RankHarness(each, attach=attach).run() for each in options]
    for harness in done:
        assert harness.stats["tokens"], "an engine that serves nothing shows nothing"
        first, *others = harness.network.collectives
        assert all(other == first for other in others), "each rank has issued as many collectives as the others"
        assert first["round"] <= harness.ranks[0].engine.steps + 8, "one a step, and a few at the start"
    return done


def least_pages(harness: RankHarness) -> None:
    """What was offered differs, what is used does not, and the smallest counts."""
    offered = [rank.cache.kv.pages for rank in harness.ranks]
    totals = {rank.cache.core.usage().device.total_pages for rank in harness.ranks}
    assert totals == {min(offered)}


def test_b001_less_device_room_on_one_rank_admits_the_same_requests() -> None:
    for harness in runs(ranks=4):
        least_pages(harness)


def test_b002_a_rank_without_pending_writes_makes_the_same_rounds() -> None:
    def fail_write_backs(rank: SimRank) -> None:
        if rank.number == 0:
            rank.device.fail_next(TransferError("no write ends well here"), works=1000, stream="write_back")

    for harness in runs(fail_write_backs):
        assert harness.stats["host"] == harness.stats["storage"] == 0  # nothing was written on all ranks


def test_b003_a_prefetch_that_one_rank_cannot_serve_is_served_with_the_smallest_prefix() -> None:
    def find_nothing(rank: SimRank) -> None:
        if rank.number == 3:
            rank.faulty.schedule = lambda access: Fault.MISS if access.verb == "exists" else None

    for harness in runs(find_nothing, ranks=4):
        assert harness.stats["storage"] == 0
        assert harness.ranks[0].cache.core.counts["prefetches"] > 0


def test_b005_completions_of_a_later_stage_retire_in_the_same_steps() -> None:
    def slow_second_stage(rank: SimRank) -> None:
        if rank.number >= 1:
            rank.device.throttle(None, 0.05)
            rank.slow_store(0.2)

    runs(slow_second_stage, lag=2)


def test_b007_a_page_less_on_one_rank_loads_the_same_pages() -> None:
    harnesses = runs(ranks=2)
    assert any(len({rank.cache.kv.pages for rank in harness.ranks}) > 1 for harness in harnesses)
    for harness in harnesses:
        least_pages(harness)


def test_b008_a_hit_that_was_agreed_is_not_taken_away_by_pressure_on_one_rank() -> None:
    def reads_are_slow_here(rank: SimRank) -> None:
        if rank.number == 1:
            rank.slow_store(0.15)

    # The engine checks each prefix that it was promised, and the harness that all ranks were promised the same.
    served = sum(harness.stats["host"] + harness.stats["storage"] for harness in runs(reads_are_slow_here))
    assert served > 0


def test_b010_random_delays_change_no_free_count() -> None:
    def delays(rank: SimRank) -> None:
        rank.device.throttle(None, rank.local.uniform(0.0, 0.05))
        rank.slow_store(rank.local.uniform(0.0, 0.05))

    for harness in runs(delays, steps=150):
        assert harness.ranks[0].engine.steps >= 150


def test_b011_acknowledgements_that_differ_leave_no_lock_behind() -> None:
    def fail_a_quarter(rank: SimRank) -> None:
        if rank.number == 1:
            rank.faulty.schedule = at_random(rank.options.seed, {("write", Fault.FAIL): 0.25})

    for harness in runs(fail_a_quarter, steps=80):
        for rank in harness.ranks:
            rank.cache.core.check()
        assert harness.ranks[1].faulty.injected["write_fail"] > 0


def test_b013_ranks_that_share_no_host_hit_storage() -> None:
    # Nothing but messages passes between them: each has a store of its own.
    assert sum(harness.stats["storage"] for harness in runs()) > 0


def test_b088_a_store_that_hangs_on_one_rank_at_the_start_is_told_to_all_in_time() -> None:
    options = RankOptions(ranks=4)
    network = SimNetwork(4, 0)
    ranks = [SimRank(options, network.transport(number), number) for number in range(4)]
    ranks[1].doors["first"] = "hung"
    said: list[str] = []

    async def open_one(rank: SimRank) -> None:
        with pytest.raises(BackendError) as refused:
            async with rank.open():
                raise AssertionError("opened")
        said.append(str(refused.value))

    async def main() -> float:
        async with anyio.create_task_group() as group:
            for rank in ranks:
                group.start_soon(open_one, rank)
        return anyio.current_time()

    assert run_checked(main, 0) < 12.0
    assert len(said) == 4
    assert len(set(said)) == 1
    assert said[0].startswith("rank 1 cannot use its storage: open")
    assert "no answer within 10.0 s" in said[0]


def test_settings_that_one_rank_cannot_honour_are_told_to_all() -> None:
    """And not as a peer that did not come."""
    network = SimNetwork(4, 0)
    said: list[str] = []

    async def open_one(number: int) -> None:
        group = RankOptions(ranks=4).group(number)
        config = msgspec.structs.replace(small_config(), shadow=number == 2)
        with pytest.raises(ConfigError) as refused:
            async with HiCache.open(
                config,
                KVTensors.make(SHAPE, 8),
                driver="step",
                device=SimDevice(),
                ranks=group,
                transport=network.transport(number),
            ):
                raise AssertionError("opened")
        said.append(str(refused.value))

    async def main() -> float:
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(open_one, number)
        return anyio.current_time()

    assert run_checked(main, 0) < 5.0
    own = "shadow = True: works on one rank"
    assert sum(each.startswith(own) for each in said) == 1
    assert sum(each.startswith(f"ranks = 2: rank 2 cannot open its cache: {own}") for each in said) == 3


def test_who_cannot_open_does_not_wait_for_ever_to_tell() -> None:
    async def main() -> float:
        group = msgspec.structs.replace(RankOptions(ranks=2).group(1), start_deadline_s=3.0)
        with pytest.raises(ConfigError, match="shadow"):
            async with HiCache.open(
                msgspec.structs.replace(small_config(), shadow=True),
                KVTensors.make(SHAPE, 8),
                driver="step",
                ranks=group,
                transport=SimNetwork(2, 0).transport(1),
            ):
                raise AssertionError("opened")
        return anyio.current_time()

    assert run_checked(main, 0) < 4.0
