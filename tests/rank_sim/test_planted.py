"""Rule breaks that hung or corrupted engines in the field: each must be caught by the same random scenario that passes without it.

A harness that does not see these would not see a real one either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hicache_actors.core.fetch import PrefetchJob
from hicache_actors.core.words import Phase
from hicache_actors.ranks import Pending, Round
from hicache_actors.testing.broken_rounds import MapOfToday, PackedRows
from hicache_actors.testing.ranks import RankFailure, RankOptions, SimRank, run_ranks

SEEDS = 25


def caught(
    kinds: set[str], attach: Callable[[SimRank], None], *, lag: int = 1, ranks: int = 4, steps: int = 30
) -> None:
    """The break is found within `SEEDS` seeds, and as what it is."""
    found: list[str] = []
    for seed in range(SEEDS):
        try:
            run_ranks(RankOptions(seed=seed, lag=lag, ranks=ranks, steps=steps, trouble="none"), attach=attach)
        except RankFailure as failure:
            found.append(failure.kind)
            if failure.kind in kinds:
                return
    raise AssertionError(f"not caught as {kinds} in {SEEDS} seeds: {found}")


def plant(target: object, name: str, replacement: object) -> None:
    setattr(target, name, replacement)


def skip_one_round(rank: SimRank) -> None:
    """Rank 1 leaves out its fifth round."""
    driver, rounds = rank.driver, []
    issue = driver._issue

    def skip() -> tuple[Round, Pending] | None:
        rounds.append(1)
        return None if len(rounds) == 5 else issue()

    if rank.number == 1:
        plant(driver, "_issue", skip)


def return_early_without_news(rank: SimRank) -> None:
    """No round by a rank that has nothing to say (B002)."""
    driver = rank.driver
    issue = driver._issue

    def only_with_news() -> tuple[Round, Pending] | None:
        return issue() if any(driver.board.answers(driver.core.wire())) else None

    plant(driver, "_issue", only_with_news)


def reserve_in_the_pipeline(rank: SimRank) -> None:
    """Host slots are taken when this rank's pipeline gets to it."""
    state, fetches = rank.cache.core.state, rank.cache.core._fetches
    grant = fetches.grant

    def grant_later(job: PrefetchJob, hit: int) -> None:
        job.phase = Phase.RUN  # or the same hit would be taken again

        def reserve() -> None:
            if job.id in state.jobs.open and job.phase is Phase.RUN:
                grant(job, hit)

        asyncio.get_running_loop().call_later(rank.local.expovariate(1 / 0.01), reserve)

    plant(fetches, "grant", grant_later)


def test_a_skipped_round() -> None:
    caught({"diverged", "hang"}, skip_one_round)


def test_an_early_return_that_only_one_rank_takes() -> None:
    caught({"diverged", "hang"}, return_early_without_news)


def test_a_pipeline_that_reserves_for_itself() -> None:
    caught({"diverged"}, reserve_in_the_pipeline)


def packed_rows(rank: SimRank) -> None:
    """With few ranks, whose copies and reads end late: each has ended what the other has not."""
    plant(rank.driver, "_vector", PackedRows())
    if rank.number % 2:
        rank.device.throttle(None, 0.2)
    else:
        rank.slow_store(0.4)


def map_of_today(rank: SimRank) -> None:
    plant(rank.driver, "_vector", MapOfToday(rank.cache.core.wire))
    rank.slow_store(0.2)


def test_limbo_bits_packed_into_a_mask() -> None:
    caught({"freed early", "wrong bytes"}, packed_rows, ranks=2, steps=80)


def test_a_stale_hit_taken_as_a_result() -> None:
    caught({"wrong bytes"}, map_of_today, lag=2)
