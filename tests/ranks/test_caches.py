"""Whole caches on several ranks, as real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_actors.ranks.group import TransportKind
from hicache_actors.testing.processes import Crew, free_port

from . import bodies


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_all_ranks_serve_alike_from_all_tiers(four: Crew, kind: TransportKind) -> None:
    size = 2 if kind == "gloo" else 4
    first, *others = four.run(bodies.serve, size, free_port(), kind, size=size)
    rounds = first[0]
    for other in others:
        assert other == first, "same answers, accounts, rounds and state"
    accounts = [account for turn in rounds for _, _, account in turn]
    assert sum(account["host"] for account in accounts) > 0
    assert sum(account["storage"] for turn in rounds[2:] for _, _, account in turn) == 0, (
        "one rank's store has lost its pages"
    )


@pytest.mark.parametrize(("kind", "own_channel"), [("gloo", True), ("tcp", True), ("tcp", False)])
def test_frontends_act_on_the_leader_and_all_ranks_follow(four: Crew, kind: TransportKind, own_channel: bool) -> None:
    answers = four.run(bodies.frontends, 2, [free_port(), free_port()], kind, own_channel, size=2)
    (digest, asked, committed, seen), other = answers
    assert other[:3] == (digest, asked, committed)
    assert committed
    assert asked == 0, "nothing of what was asked is left"
    assert seen[0] == ("acquired", "a", 0)
    assert (seen[1].tokens, seen[1].reason) == (12, None)
    assert "the leader's" in other[3][0]


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_stores_are_switched_on_all_ranks_or_on_none(four: Crew, kind: TransportKind, tmp_path: Path) -> None:
    answers = four.run(bodies.switch_stores, 2, [free_port(), free_port()], kind, str(tmp_path), size=2)
    (agreed, said), (also_agreed, nothing) = answers
    assert agreed == also_agreed
    refused, kept, *others = said
    assert "rank 1 could not open it" in refused
    assert "nothing has changed" in refused
    assert kept == "Hanging"
    assert others[:3] == ["12", "0", "0"], "stored in the first; no call hangs in it; all is stored in the second"
    assert others[3:] == ["3", "0"], "the leader's pages have gone from it, and all is stored again"
    assert nothing == []
    assert agreed[1]["storage"] == 12, agreed[1]
    assert agreed[2] == f"file://{tmp_path}/second"


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_room_is_given_in_order_on_all_ranks(four: Crew, kind: TransportKind) -> None:
    (agreed, order), *others = four.run(bodies.rooms, 3, [free_port(), free_port()], kind, size=3)
    assert [other[0] for other in others] == [agreed, agreed]
    assert agreed[1] == ["first", "holder", "second"]
    assert order == ["device_capacity", "first", "second"]


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_a_closed_cache_leaves_no_thread_that_polls(four: Crew, kind: TransportKind) -> None:
    assert four.run(bodies.close_after_steps, 2, free_port(), kind, size=2) == [0, 0]
