"""Field reports on agreement between ranks, by number, with real processes.

Each is one run of `bodies.traffic`: the same requests on all ranks, something wrong on one of them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hicache_actors.ranks.group import TransportKind
from hicache_actors.testing.processes import Crew, free_port

from . import bodies
from .bodies import Trouble

TENSOR_2 = [{"tp_rank": rank, "tp_size": 2} for rank in range(2)]
TENSOR_4 = [{"tp_rank": rank, "tp_size": 4} for rank in range(4)]
STAGES_2 = [{"pp_rank": rank, "pp_size": 2} for rank in range(2)]
STAGES_2_TENSOR_2 = [{"pp_rank": at // 2, "pp_size": 2, "tp_rank": at % 2, "tp_size": 2} for at in range(4)]
REPLICAS_2_TENSOR_2 = [{"dp_rank": at // 2, "dp_size": 2, "tp_rank": at % 2, "tp_size": 2} for at in range(4)]


def run(
    four: Crew, axes: list[dict[str, int]], trouble: Trouble, kind: TransportKind = "gloo", steps: int = 40
) -> list[dict[str, Any]]:
    records = four.run(bodies.traffic, axes, free_port(), kind, msgspec.structs.asdict(trouble), steps, size=len(axes))
    for record in records:
        assert len(record["accounts"]) == steps, "every request is served"
    return records


def must_be_equal(records: list[dict[str, Any]]) -> None:
    first, *others = records
    for other in others:
        assert other["steps"] == first["steps"], "decisions and free pages, step by step"
        assert other == first


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_b001_a_rank_with_less_device_space_admits_the_same_requests(four: Crew, kind: TransportKind) -> None:
    records = run(four, TENSOR_2, Trouble(1, device_pages=9), kind)
    must_be_equal(records)
    assert records[0]["sizes"]["device_pages"] == 9


def test_b002_writes_that_fail_on_one_rank_leave_no_page_locked(four: Crew) -> None:
    must_be_equal(run(four, TENSOR_2, Trouble(0, fail_copies=6)))


def test_b003_a_fetch_that_one_of_four_ranks_cannot_have(four: Crew) -> None:
    records = run(four, TENSOR_4, Trouble(3, miss=1.0), "tcp")
    must_be_equal(records)
    assert all(account["storage"] == 0 for _, account in records[0]["accounts"]), "the smallest common prefix"


def test_b004_groups_over_stages_and_replicas_need_nobody_outside(four: Crew) -> None:
    must_be_equal(run(four, STAGES_2_TENSOR_2, Trouble(3), steps=10))
    records = run(four, REPLICAS_2_TENSOR_2, Trouble(3), steps=10)
    assert [record["replica"] for record in records] == [(0, 0), (0, 0), (1, 1), (1, 1)]


def test_b005_copies_that_end_later_on_one_stage_retire_in_the_same_step(four: Crew) -> None:
    must_be_equal(run(four, STAGES_2, Trouble(1, slow_device_s=0.05), steps=15))


def test_b007_a_rank_with_one_page_less_loads_the_same_pages(four: Crew) -> None:
    records = run(four, TENSOR_2, Trouble(1, device_pages=15), "tcp")
    must_be_equal(records)
    hosts = [account["host"] for _, account in records[0]["accounts"]]
    assert any(hosts)
    assert all(tokens % 4 == 0 for tokens in hosts)


def test_b008_a_smaller_host_pool_shortens_the_hit_on_all_ranks(four: Crew) -> None:
    records = run(four, TENSOR_2, Trouble(1, host_pages=12), "tcp")
    must_be_equal(records)
    assert records[0]["sizes"]["host_pages"] == 12


def test_b010_random_delays_leave_free_pages_equal_in_every_step(four: Crew) -> None:
    must_be_equal(run(four, TENSOR_2, Trouble(1, slow_store_s=0.02, slow_device_s=0.005), "tcp"))


def test_b011_a_store_that_fails_a_quarter_of_its_keys_on_one_rank(four: Crew) -> None:
    must_be_equal(run(four, TENSOR_2, Trouble(1, miss=0.25)))


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_b088_a_store_that_one_rank_cannot_reach_is_told_to_all(four: Crew, kind: TransportKind) -> None:
    said, *others = four.run(bodies.open_with_a_store_that_fails, 4, free_port(), kind)
    assert said.startswith("rank 2 cannot use its storage: nobody listens at 10.0.0.7:6379")
    assert all(other == said for other in others), "all stop with the same message"


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_settings_that_one_rank_cannot_honour_are_told_to_all(four: Crew, kind: TransportKind) -> None:
    *others, own = four.run(bodies.open_with_settings_of_one_rank, 3, free_port(), kind, size=3)
    assert own.startswith("shadow = True: works on one rank")
    assert all(other.startswith(f"ranks = 2: rank 2 cannot open its cache: {own[:20]}") for other in others), others


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_b013_two_nodes_of_one_rank_each_hit_all_that_they_have_stored(four: Crew, kind: TransportKind) -> None:
    """No shared folder, no shared memory, no socket in a folder: a store of its own for each, and one address."""
    assert four.run(bodies.two_nodes, 2, free_port(), kind, size=2) == [{"storage": 12, "computed": 1}] * 2
