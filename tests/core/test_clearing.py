"""Clearing the store is a job: what is stored counts for nothing from its agreed RESULT on, whatever became of it."""

from __future__ import annotations

import pytest

from hicache_actors.core import Core
from hicache_actors.core.words import (
    OPENED,
    Cleared,
    Effect,
    NotOpened,
    Phase,
    Settled,
    StartBackup,
    StartClear,
    StopJob,
    Wake,
    encode_result,
    not_opened,
)

from .kit import PAGE, Toks, answer, cached, compute, host_only, make, of_type, settle, whole


def prompt(pages: int, family: int = 0) -> Toks:
    return Toks(range(1000 * family, 1000 * family + pages * PAGE + 1))


def asked(core: Core) -> tuple[int, int]:
    """-> waiter, job."""
    core.take_effects()
    waiter = core.clear_storage(5.0)
    (start,) = core.take_effects()
    assert isinstance(start, StartClear)
    assert start.deadline_s == 5.0
    return waiter, start.job


def agreed(core: Core, job: int, value: int, *, alive: bool = True) -> list[Effect]:
    core.apply(0, [(job, Phase.RUN, encode_result(value))], [], alive=alive)
    return core.take_effects()


def test_both_tiers_stay_and_are_stored_again() -> None:
    core = make()
    host_only(core, prompt(5, family=1))
    cached(core, prompt(3))
    assert core.usage().stored_pages == 8
    waiter, job = asked(core)
    assert core.needs_step
    assert core.usage().stored_pages == 8, "what is stored is gone once all ranks have said so"
    effects = agreed(core, job, OPENED)
    assert Settled(job, 1) in effects
    assert Wake(waiter, Cleared(job=job)) in effects
    assert core.usage().stored_pages == 0
    assert (core.match(prompt(3)).device, core.match(prompt(5, family=1)).host) == (3 * PAGE, 5 * PAGE)
    assert of_type(effects, StartBackup)
    core.apply(0, [], [job])
    settle(core)
    assert core.usage().stored_pages == 8
    whole(core)


@pytest.mark.parametrize("why", ["refused", "failed", "late", "stopped"])
def test_what_is_left_half_done_counts_for_nothing_all_the_same(why: NotOpened) -> None:
    core = make()
    cached(core, prompt(3))
    waiter, job = asked(core)
    effects = agreed(core, job, min(OPENED, not_opened(3, "failed"), not_opened(1, why)))
    assert Settled(job, 0, why) in effects
    assert Wake(waiter, Cleared(why, 1, job)) in effects
    assert core.usage().stored_pages == 0


def test_what_was_being_saved_meanwhile_does_not_count() -> None:
    """It may have been written before its turn to be removed came, or after."""
    core = make()
    lease = compute(core, prompt(4), "a")
    effects: list[Effect] = []
    while not of_type(effects, StartBackup):
        effects += answer(core)
    (old,) = of_type(effects, StartBackup)
    _, job = asked(core)
    agreed(core, job, OPENED)
    core.apply(0, [(old.job, Phase.RUN, encode_result(4))], [old.job])
    assert core.usage().stored_pages == 0
    settle(core)
    assert core.usage().stored_pages == 4, "saved once more, behind the clear"
    core.release(lease)
    whole(core)


def test_what_a_fetch_brings_meanwhile_is_served_and_stored_again() -> None:
    core = make()
    fetch = core.prefetch(prompt(4), "a")
    assert fetch is not None
    answer(core, hits={fetch: 4})  # the HIT
    _, job = asked(core)
    agreed(core, job, OPENED)
    core.apply(0, [(fetch, Phase.RUN, encode_result(4))], [fetch])
    assert core.match(prompt(4)).host == 4 * PAGE
    assert core.usage().stored_pages == 0
    settle(core)
    assert core.usage().stored_pages == 4
    whole(core)


def test_who_asked_may_go() -> None:
    core = make()
    cached(core, prompt(3))
    waiter, job = asked(core)
    assert core.cancel_waiter(waiter) == Cleared("stopped")
    assert core.cancel_waiter(waiter) is None
    assert core.take_effects() == [StopJob(job)]
    effects = agreed(core, job, not_opened(0, "stopped"))
    assert not of_type(effects, Wake)
    assert core.usage().stored_pages == 0


def test_without_a_store_there_is_nothing_to_clear() -> None:
    core = make(storage=False)
    waiter = core.clear_storage(1.0)
    assert core.take_effects() == [Wake(waiter, Cleared("no_storage"))]
    assert not core.state.jobs.open


def test_a_cache_that_degrades_answers() -> None:
    core = make()
    waiter, job = asked(core)
    assert Wake(waiter, Cleared("degraded")) in agreed(core, job, OPENED, alive=False)
    later = core.clear_storage(1.0)
    assert core.take_effects() == [Wake(later, Cleared("degraded"))]


def test_a_store_that_goes_meanwhile_is_cleared_for_nothing() -> None:
    core = make()
    cached(core, prompt(3))
    _, job = asked(core)
    core.set_storage(False)
    core.take_effects()
    effects = agreed(core, job, not_opened(0, "failed"))
    assert not of_type(effects, StartBackup)
    assert not core.state.storage
    core.apply(0, [], [job])
    settle(core)
    whole(core)
