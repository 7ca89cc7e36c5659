"""The two transports, between real processes."""

from __future__ import annotations

import re

import pytest

from hicache_actors.errors import ConfigError, PeerError
from hicache_actors.ranks.group import RankGroup, TransportKind
from hicache_actors.ranks.tcp import TcpTransport
from hicache_actors.testing.processes import Crew, free_port, group_of

from . import bodies

KINDS: tuple[TransportKind, ...] = ("gloo", "tcp")


@pytest.mark.parametrize("kind", KINDS)
def test_reductions_keep_their_order_and_broadcasts_pass_beside_them(four: Crew, kind: TransportKind) -> None:
    for answer in four.run(bodies.transport_contract, 4, free_port(), kind):
        assert answer["reduced"] == [[at, -3, at] for at in range(3)]
        assert answer["said"]
        assert answer["told"] == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_peer_is_told_and_a_new_epoch_needs_no_new_process(four: Crew, kind: TransportKind) -> None:
    *survivors, gone = four.run(bodies.lose_a_peer, 4, free_port(), kind)
    assert gone is None
    for errors, reduced in survivors:
        assert len(errors) == 2, "the group is lost for good"
        assert reduced == [8]


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_agreed_by_min(four: Crew, kind: TransportKind) -> None:
    answers = four.run(bodies.compare, 2, free_port(), kind, {}, size=2)
    assert answers == [{"device_pages": 100, "host_pages": 49}] * 2


@pytest.mark.parametrize(
    ("kind", "differ", "words"),
    [
        ("gloo", {"page_size": 16}, "page_size.*from 16 to 64"),
        ("tcp", {"model.weights": "v2"}, "model.weights = .*differs between the ranks"),
        ("tcp", {"brand_new": 1}, "compare other facts"),
    ],
)
def test_a_fact_that_differs_is_refused_on_all_ranks(
    four: Crew, kind: TransportKind, differ: dict[str, object], words: str
) -> None:
    answers = four.run(bodies.compare, 2, free_port(), kind, differ, size=2)
    assert all(re.search(words, answer) for answer in answers), answers


def test_a_rank_that_does_not_come_is_a_bounded_wait() -> None:
    with pytest.raises(PeerError, match="did not meet"):
        TcpTransport(group_of(0, 2, free_port(), "tcp", start_deadline_s=0.2))


def test_one_group_spans_the_axes_of_one_replica() -> None:
    group = RankGroup(
        tp_rank=1, tp_size=2, pp_rank=1, pp_size=3, cp_rank=1, cp_size=2, dp_rank=0, dp_size=2, address="h:1"
    )
    assert (group.size, group.rank, group.lag, group.leads) == (12, 7, 3, False)
    other = RankGroup(tp_rank=1, tp_size=2, dp_rank=1, dp_size=2, address="h:1")
    assert other.name != RankGroup(tp_rank=1, tp_size=2, dp_rank=0, dp_size=2, address="h:1").name


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tp_size": 0}, "ranks.tp_size"),
        ({"tp_rank": 2, "tp_size": 2}, "ranks.tp_rank"),
        ({"tp_size": 2, "transport": "mpi"}, "ranks.transport"),
        ({"tp_size": 2, "transport": "tcp"}, "ranks.address"),
        ({"tp_size": 2, "address": "nowhere"}, "ranks.address"),
        ({"deadline_s": 0}, "ranks.deadline_s"),
    ],
)
def test_nonsense_is_refused(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RankGroup(**settings)  # type: ignore[arg-type]
    assert refused.value.field == field
