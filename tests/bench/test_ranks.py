"""The suite of ranks with tiny sizes: every figure is there, and a step costs one collective however many jobs are open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache_actors.bench.figures import flat
from hicache_actors.bench.ranks import JOBS, measure, measure_alone
from hicache_actors.ranks.group import TransportKind
from hicache_actors.testing.processes import Crew, crew, free_port

SMALL = 40  #: this fraction of the work
TIMES = ("begin_step_us.p50", "begin_step_us.p99", "end_step_us.p50", "end_step_us.p99")
WAITS = ("begin_step_wait_us.p50", "begin_step_wait_us.p99")


@pytest.fixture(scope="module")
def two() -> Iterator[Crew]:
    with crew(2) as ranks:
        yield ranks


def test_alone(two: Crew) -> None:
    (alone,) = two.run(measure_alone, SMALL, size=1)
    assert set(flat(alone)) == set(TIMES)


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_ranks(two: Crew, kind: TransportKind) -> None:
    for figures in two.run(measure, 2, free_port(), kind, SMALL):
        for jobs in JOBS:
            found = flat(figures[f"jobs_{jobs}"])
            assert set(found) == {"collectives_per_step", *TIMES, *WAITS}
            assert found["collectives_per_step"] == 1.0
        assert set(figures) == {"bare_round_us", "matmul", "idle_cpu_percent", *(f"jobs_{jobs}" for jobs in JOBS)}
