"""Twin replicas of an engine that owns its blocks: a random scenario, and the rule breaks that it must see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from hicache_actors.testing.block_script import BlockScript
from hicache_actors.testing.mover import Faults
from hicache_actors.testing.twin_options import TwinOptions
from hicache_actors.testing.twins import TwinFailure, TwinRank, run, run_twins

CHUNK = 12
HAPPENED = (
    "aborted",
    "emitted",
    "ended_while_loading",
    "load",
    "load_load_failed",
    "load_settled",
    "lookup_waits",
    "no_blocks",
    "reset",
    "retried",
    "save",
    "save_gap",
    "save_save_failed",
    "saved_pages",
)


def composed_scenario(first: int, lag: int) -> None:
    stats: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        stats.update(run(TwinOptions(seed=seed, lag=lag, slots="engine", check_every=4)).script.stats)
    assert [what for what in HAPPENED if not stats[what]] == [], "the scenario has lost a part"


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("first", range(0, 24, CHUNK))
def test_composed_scenario(first: int, lag: int) -> None:
    composed_scenario(first, lag)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("first", range(24, 120, CHUNK))
def test_composed_scenario_at_length(first: int, lag: int) -> None:
    composed_scenario(first, lag)


@pytest.mark.parametrize("seed", range(4))
def test_check_holds_after_every_step(seed: int) -> None:
    assert run(TwinOptions(seed=seed, lag=1 + seed % 3, slots="engine", host_pages=40)).script.operations >= 300


@pytest.mark.parametrize("seed", range(3))
def test_three_ranks(seed: int) -> None:
    options = TwinOptions(seed=seed, ranks=3, operations=150, slots="engine", check_every=4)
    assert run(options).script.stats["emitted"]


@pytest.mark.parametrize("seed", range(4))
def test_much_goes_wrong(seed: int) -> None:
    faults = Faults(hang=0.3, fail=0.3, unsound=0.5)
    rank = run(TwinOptions(seed=seed, lag=1 + seed % 3, slots="engine", check_every=4, faults=faults))
    assert rank.core.counts["write_back_failed_pages"]


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_whose_movers_die_gives_all_blocks_back(seed: int) -> None:
    options = TwinOptions(seed=seed, lag=1 + seed % 2, slots="engine", kill_step=20 + 7 * seed, check_every=4)
    twins = run_twins(options)
    assert len({rank.core.degraded for rank in twins.ranks}) == 1


# -- rule breaks ------------------------------------------------------------------------------------------------------------


def caught(break_it: Callable[[BlockScript], None], seeds: int = 12) -> None:
    """It is seen within so many seeds, as wrong bytes."""

    def attach(rank: TwinRank) -> None:
        assert isinstance(rank.script, BlockScript)
        break_it(rank.script)

    found: list[str] = []
    for seed in range(seeds):
        try:
            run_twins(TwinOptions(seed=seed, slots="engine", check_every=10**9), attach=attach)
        except TwinFailure as failure:
            found.append(failure.kind)
            if failure.kind == "wrong bytes":
                return
    raise AssertionError(f"not caught in {seeds} seeds: {found}")


def test_blocks_that_are_used_again_at_their_result_are_seen() -> None:
    def break_it(script: BlockScript) -> None:
        script.reuse = "result"

    caught(break_it)


def test_a_load_that_does_not_wait_for_the_last_pass_is_seen() -> None:
    def break_it(script: BlockScript) -> None:
        script.after_loads = False

    caught(break_it)
