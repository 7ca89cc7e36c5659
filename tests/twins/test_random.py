"""One composed random scenario on twin replicas: 300 operations, 200 seeds, lag 1 and 2; and its smaller relatives.

A failing seed names the command that replays it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from hicache_actors.core.config import WritePolicy
from hicache_actors.core.order import EVICTIONS
from hicache_actors.testing.mover import Faults
from hicache_actors.testing.script import SWITCHED_POLICIES
from hicache_actors.testing.twin_options import TwinOptions
from hicache_actors.testing.twins import TwinFailure, main, run, run_twins

CHUNK = 20
HAPPENED = (
    "lease",
    "load",
    "prefetch",
    "prefetch_stopped",
    "acquire",
    "acquire_cancelled",
    "published",
    "allocate_short",
    "commit_load_failed",
    "emitted",
    "withheld",
    "reset",
    "stored",
    "drained",
    "policy_set",
)


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_composed_scenario(first: int, lag: int) -> None:
    stats: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        options = TwinOptions(
            seed=seed, lag=lag, check_every=4, write_policy=None, eviction=None, switches=seed % 2 == 1
        )
        stats.update(run(options).script.stats)
    assert [what for what in HAPPENED if not stats[what]] == [], "the scenario has lost a part"


@pytest.mark.parametrize("seed", range(4))
def test_check_holds_after_every_step(seed: int) -> None:
    assert run(TwinOptions(seed=seed, lag=1 + seed % 3)).script.operations >= 300


@pytest.mark.parametrize("seed", range(8))
def test_three_ranks(seed: int) -> None:
    assert run(TwinOptions(seed=seed, ranks=3, operations=150, check_every=4)).script.stats["emitted"]


@pytest.mark.parametrize("first", range(0, 40, CHUNK))
def test_auto_driver(first: int) -> None:
    emitted = 0
    for seed in range(first, first + CHUNK):
        emitted += run(TwinOptions(seed=seed, auto=True, check_every=4)).script.stats["emitted"]
    assert emitted


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("first", range(0, 40, CHUNK))
def test_a_rank_whose_movers_die(first: int, lag: int) -> None:
    degraded = 0
    for seed in range(first, first + CHUNK):
        twins = run_twins(TwinOptions(seed=seed, lag=lag, kill_step=20 + seed % 60, check_every=4))
        assert len({rank.core.degraded for rank in twins.ranks}) == 1
        degraded += twins.ranks[0].core.degraded
    assert degraded > CHUNK // 2, "a rank that has died with work open takes all ranks with it"


@pytest.mark.parametrize("lag", [1, 2])
def test_a_host_pool_that_opens_in_chunks(lag: int) -> None:
    """Its memory is ready on one rank long before it is on the other, or never is."""
    closed = Counter[bool]()
    for seed in range(12):
        options = TwinOptions(seed=seed, lag=lag, host_chunk_pages=12, check_every=4, faults=Faults(fail=0.05))
        twins = run_twins(options)
        assert twins.ranks[0].script.stats["emitted"]
        closed[twins.ranks[0].core.usage().host.closed_pages > 0] += 1
    assert len(closed) == 2, "some pools open whole, some do not"
    assert run(TwinOptions(auto=True, host_chunk_pages=12)).core.usage().host.closed_pages == 0


@pytest.mark.parametrize("write_policy", SWITCHED_POLICIES)
@pytest.mark.parametrize("lag", [1, 2])
def test_each_write_policy_on_small_pools(write_policy: WritePolicy, lag: int) -> None:
    """Every order of eviction, on pools that are full all the time, the host smaller or larger than the device."""
    counts: Counter[str] = Counter()
    for seed in range(7):
        options = TwinOptions(
            seed=seed,
            lag=lag,
            check_every=4,
            operations=200,
            device_pages=40,
            host_pages=(32, 80)[seed % 2],
            write_policy=write_policy,
            eviction=EVICTIONS[seed],
        )
        counts.update(run(options).core.counts)
    assert counts["evicted_device_pages"]
    assert counts["evicted_host_pages"]
    assert bool(counts["reclaimed_host_pages"]) == (write_policy == "write_back")


@pytest.mark.parametrize("lag", [1, 2])
def test_pages_are_stored_before_they_leave_the_host(lag: int) -> None:
    """Every order and policy of writing, changed on the way, on a host that is full or not."""
    counts: Counter[str] = Counter()
    for seed in range(16):
        options = TwinOptions(
            seed=seed,
            lag=lag,
            check_every=4,
            operations=150,
            host_pages=(40, 80)[seed % 2],
            write_policy=None,
            eviction=None,
            store_on="host_evict",
            switches=seed % 2 == 1,
            kill_step=40 if seed % 8 == 7 else None,
        )
        counts.update(run(options).core.counts)
    assert counts["stored_ahead_pages"]
    assert counts["backup_failed_pages"]
    assert counts["evicted_host_pages"]


@pytest.mark.parametrize(("slots", "rows"), [(8, 8), (4, 4), (4, 64), (64, 4)])
def test_small_tables(slots: int, rows: int) -> None:
    for seed in range(6):
        rank = run(TwinOptions(seed=seed, table_slots=slots, table_rows=rows, check_every=4))
        assert not rank.core.needs_step


@pytest.mark.parametrize(("device", "host"), [(40, 40), (96, 32), (48, 160)])
def test_other_pool_sizes(device: int, host: int) -> None:
    for seed in range(6):
        rank = run(TwinOptions(seed=seed, device_pages=device, host_pages=host, check_every=4))
        assert not rank.core.needs_step


@pytest.mark.parametrize("seed", range(6))
def test_much_goes_wrong(seed: int) -> None:
    rank = run(TwinOptions(seed=seed, lag=1 + seed % 3, check_every=4, faults=Faults(hang=0.3, fail=0.3, unsound=0.5)))
    assert rank.core.counts["backup_failed_pages"]


def test_a_failure_names_its_replay_and_the_replay_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TwinOptions(
        seed=3, lag=2, operations=40, host_pages=70, eviction=None, switches=True, faults=Faults(hang=0.1)
    )
    with monkeypatch.context() as broken:
        broken.setattr("hicache_actors.core.Core.state_digest", lambda core: id(core))
        with pytest.raises(TwinFailure, match="diverged at step 1 of seed 3") as caught:
            run(options)
    (note,) = caught.value.__notes__
    command = "python -m hicache_actors.testing.twins --seed 3 --operations 40 --lag 2 --host-pages 70 --eviction any"
    command += " --hang 0.1 --switches"
    assert note == f"replay: {command}"
    assert main(command.split()[3:]) == 0
    assert capsys.readouterr().out.startswith("1 clean")
    assert TwinOptions(auto=True).command().endswith("--seed 0 --auto")
