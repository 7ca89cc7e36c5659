"""Random engines on simulated ranks: equal decisions after every step, right bytes, no hang in virtual time, nothing left behind.

A failing seed names the command that replays it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from hicache_actors.testing.ranks import RankOptions, Trouble, run_ranks

QUICK_BATCH, SLOW_BATCH = 10, 100


def run_seeds(ranks: int, steps: int, first: int, seeds: int) -> None:
    for seed in range(first, first + seeds):
        harness = run_ranks(RankOptions(seed=seed, ranks=ranks, steps=steps, lag=1 + seed % 2))
        assert harness.stats["tokens"] + harness.stats["computed"] > 0


@pytest.mark.parametrize("first", range(0, 100, QUICK_BATCH))
def test_four_ranks(first: int) -> None:
    run_seeds(4, 24, first, QUICK_BATCH)


@pytest.mark.parametrize("first", range(100, 200, QUICK_BATCH))
def test_eight_ranks(first: int) -> None:
    run_seeds(8, 12, first, QUICK_BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, SLOW_BATCH))
def test_many_runs_of_four_ranks(first: int) -> None:
    run_seeds(4, 40, first, SLOW_BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2000, 3000, SLOW_BATCH))
def test_many_runs_of_eight_ranks(first: int) -> None:
    run_seeds(8, 20, first, SLOW_BATCH)


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (run_ranks(RankOptions(seed=5)) for _ in range(2))
    assert first.stats == second.stats
    assert first.ranks[3].decisions() == second.ranks[3].decisions()


def test_all_tiers_are_used() -> None:
    total: Counter[str] = Counter()
    for seed in range(4):
        total += run_ranks(RankOptions(seed=seed, trouble="none")).stats
    assert all(total[tier] for tier in ("device", "host", "storage", "computed")), total


@pytest.mark.parametrize("trouble", ["crash", "cut"])
def test_survivors_notice_a_lost_peer_in_time(trouble: Trouble) -> None:
    harness = run_ranks(RankOptions(seed=3, trouble=trouble))
    assert len(harness.detected_s) >= harness.options.ranks - 1
    assert max(harness.detected_s.values()) <= harness.options.round_deadline_s + 2.0
