"""Whoever hears the events and nothing else knows what is where, after every section, on one rank and on several."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest

from hicache_actors.core import CoreConfig
from hicache_actors.core.changes import Changes
from hicache_actors.core.config import SlotOwner
from hicache_actors.events import PagesRemoved, PagesStored, TiersCleared
from hicache_actors.testing.twin_options import TwinOptions
from hicache_actors.testing.twins import run_auto, run_twins
from tests.core.kit import PAGE, Toks, answer
from tests.events.kit import HeardCore

SMALL: dict[str, Any] = {"device_pages": 40, "host_pages": 32, "check_every": 50, "operations": 150}
ANY: dict[str, Any] = {**SMALL, "write_policy": None, "eviction": None}


class LateCore(HeardCore):
    start, nodes = 40, 3


@pytest.mark.parametrize("slots", ["owned", "engine"])
def test_all_ranks_tell_the_same_and_it_is_right(slots: SlotOwner) -> None:
    kinds: set[type] = set()
    for seed in range(8):
        options = TwinOptions(seed=seed, lag=1 + seed % 2, slots=slots, **SMALL)
        twins = run_twins(options, make_core=HeardCore)
        first, second = (cast(HeardCore, rank.core).batches for rank in twins.ranks)
        assert first == second
        assert all(before.id == batch.after < batch.id for before, batch in pairwise(first))
        kinds |= {type(event) for batch in first for event in batch.events}
    assert kinds == {PagesStored, PagesRemoved, TiersCleared}


@pytest.mark.parametrize("seed", range(6))
def test_one_rank_whose_policies_change(seed: int) -> None:
    core = cast(HeardCore, run_auto(TwinOptions(seed=seed, switches=True, **ANY), make_core=HeardCore).core)
    assert len(core.batches) > 20


@pytest.mark.parametrize("seed", range(6))
def test_what_was_there_before_is_told_piece_by_piece_while_it_changes(seed: int) -> None:
    core = cast(LateCore, run_twins(TwinOptions(seed=seed, **ANY), make_core=LateCore).ranks[0].core)
    assert core.mirror.complete
    assert core.batches


@pytest.mark.parametrize("seed", range(3))
def test_a_cache_that_has_degraded_tells_that_all_is_lost(seed: int) -> None:
    twins = run_twins(TwinOptions(seed=seed, kill_step=30, **ANY), make_core=HeardCore)
    assert twins.ranks[0].core.degraded
    for rank in twins.ranks:
        core = cast(HeardCore, rank.core)
        assert TiersCleared(("device", "host"), "degraded") in [
            event for batch in core.batches for event in batch.events
        ]
        assert not core.directory.pages["device"] | core.directory.pages["host"]


@pytest.mark.parametrize("hook", ["split", "joining", "came", "left", "stored", "removing", "cleared", "added"])
def test_a_hook_that_is_missing_is_noticed(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Changes, hook, lambda *_: None)
    # what is wrong shows by its effect: a page too many, too few, or one of a node that nobody has heard of
    with pytest.raises((AssertionError, KeyError)):
        _some_runs()


def _some_runs() -> None:
    for seed in range(8):
        run_auto(TwinOptions(seed=seed, **SMALL), make_core=HeardCore)


def test_with_other_weights_nothing_is_stored_any_more() -> None:
    core = HeardCore(CoreConfig(PAGE, device_pages=16, host_pages=16))
    lease = core.lease(prompt := Toks(range(3 * PAGE)), "r")
    core.allocate(lease, len(prompt))
    core.commit(lease, len(prompt))
    core.release(lease)
    while core.needs_step:
        answer(core)
    assert len(core.directory.pages["storage"]) == 3
    core.advance_epoch("others")
    core.take_effects()
    assert not any(core.directory.pages.values())
