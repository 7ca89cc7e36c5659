"""A host pool that grows by agreed chunks: nobody gets a slot before all ranks have its memory."""

from __future__ import annotations

import pytest

from hicache_actors.core import Core
from hicache_actors.core.words import (
    HOST,
    Effect,
    Forget,
    Grant,
    Phase,
    Settled,
    StartOpen,
    encode_result,
    unpack_slots,
)
from hicache_actors.errors import ConfigError

from .kit import Toks, make


def new_core(host_pages: int = 10, chunk_pages: int = 4) -> Core:
    return make(8, host_pages, host_chunk_pages=chunk_pages)


def applied(core: Core, *answers: tuple[int, int], released: tuple[int, ...] = ()) -> list[Effect]:
    """``answers``: (job, pages that the rank with the fewest has ready)."""
    core.apply(0, [(job, Phase.RUN, encode_result(pages)) for job, pages in answers], released)
    effects = core.take_effects()
    core.check()
    return effects


def test_chunks_open_one_after_the_other() -> None:
    core = new_core()
    assert (core.usage().host.free_pages, core.usage().host.closed_pages) == (4, 6)
    assert core.next_due_ms == 0, "the first apply is asked for"
    assert core.needs_step
    assert applied(core) == [StartOpen(1, 4, 4)]
    assert core.next_due_ms is None
    assert core.needs_step
    assert core.usage().jobs == {"open.run": 1}
    assert applied(core, (1, 4)) == [Settled(1, 4), StartOpen(2, 8, 2)]
    assert (core.usage().host.free_pages, core.usage().host.closed_pages) == (8, 2)
    assert applied(core, (2, 2), released=(1,)) == [Settled(2, 2), Forget(1)]
    assert applied(core, released=(2,)) == [Forget(2)]
    assert (core.usage().host.free_pages, core.usage().host.closed_pages) == (10, 0)
    assert not core.needs_step


def test_slots_of_a_new_chunk_come_after_those_that_are_free() -> None:
    core = new_core()
    applied(core)
    applied(core, (1, 4))
    assert core.state.pools[HOST].free_slots() == [7, 6, 5, 4, 3, 2, 1, 0], "the last is handed out first"


def test_a_chunk_that_a_rank_cannot_have_stays_closed_with_those_behind_it() -> None:
    core = new_core()
    applied(core)
    assert applied(core, (1, 0)) == [Settled(1, 0)]
    assert applied(core, released=(1,)) == [Forget(1)]
    assert (core.usage().host.free_pages, core.usage().host.closed_pages) == (4, 6)
    assert not core.needs_step
    core.reset()
    core.check()
    assert (core.usage().host.free_pages, core.usage().host.closed_pages) == (4, 6)


def test_a_reset_meanwhile_changes_nothing() -> None:
    core = new_core()
    applied(core)
    core.reset()
    assert applied(core, (1, 4)) == [Settled(1, 4), StartOpen(2, 8, 2)]
    assert core.usage().host.free_pages == 8


def test_nothing_opens_in_a_degraded_cache() -> None:
    core = new_core()
    core.degrade()
    assert applied(core) == []
    assert core.next_due_ms is None
    core = new_core()
    applied(core)
    core.degrade()
    assert applied(core, (1, 4)) == [Settled(1, 0, "degraded")]
    assert applied(core, released=(1,)) == [Forget(1)]
    assert core.usage().host.closed_pages == 6


def test_fetches_hold_half_of_what_is_open() -> None:
    granted = []
    for opened in (False, True):
        core = new_core()
        (opening,) = applied(core)
        assert isinstance(opening, StartOpen)
        if opened:
            applied(core, (opening.job, 4))
        fetch = core.prefetch(Toks(range(41)), "a")
        assert fetch is not None
        core.take_effects()
        core.apply(0, [(fetch, Phase.HIT, 10)], [])
        granted += [len(unpack_slots(effect.slots)) for effect in core.take_effects() if isinstance(effect, Grant)]
        core.check()
    assert granted == [2, 4]


@pytest.mark.parametrize("chunk", [0, 10, 11])
def test_a_pool_of_one_chunk_is_open(chunk: int) -> None:
    core = new_core(chunk_pages=chunk)
    assert core.usage().host.free_pages == 10
    assert core.next_due_ms is None
    assert applied(core) == []
    with pytest.raises(ConfigError, match="host_chunk_pages"):
        new_core(chunk_pages=-1)
