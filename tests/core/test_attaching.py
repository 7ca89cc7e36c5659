"""Attaching a store is a job: decided by its agreed RESULT, in the same section on all ranks."""

from __future__ import annotations

import pytest

from hicache_actors.core import Core, CoreConfig
from hicache_actors.core.words import (
    OPENED,
    Attached,
    Effect,
    Forget,
    NotOpened,
    Phase,
    Settled,
    StartAttach,
    StopJob,
    UseStorage,
    Wake,
    attached,
    encode_result,
    not_opened,
)

URL = "file:///somewhere"


def new_core() -> Core:
    return Core(CoreConfig(page_size=4, device_pages=8, host_pages=8, storage=False))


def asked(core: Core, number: int = 1) -> tuple[int, int]:
    """-> waiter, job."""
    waiter = core.attach(number, URL, 2.0)
    (start,) = core.take_effects()
    assert isinstance(start, StartAttach)
    assert (start.number, start.url, start.deadline_s) == (number, URL, 2.0)
    return waiter, start.job


def agreed(core: Core, job: int, value: int, alive: bool = True) -> list[Effect]:
    core.apply(0, [(job, Phase.RUN, encode_result(value))], [], alive=alive)
    return core.take_effects()


def test_it_is_used_once_all_ranks_have_opened_it() -> None:
    core = new_core()
    waiter, job = asked(core)
    assert core.needs_step
    assert not core.state.storage
    assert agreed(core, job, OPENED) == [UseStorage(True, 1, 2.0), Settled(job, 1), Wake(waiter, Attached())]
    assert core.state.storage
    core.apply(0, [], [job])
    assert core.take_effects() == [Forget(job)]
    assert not core.needs_step


@pytest.mark.parametrize("why", ["refused", "failed", "late", "stopped"])
def test_one_rank_without_it_keeps_all_from_it(why: NotOpened) -> None:
    core = new_core()
    waiter, job = asked(core)
    assert agreed(core, job, min(OPENED, not_opened(3, "failed"), not_opened(2, why))) == [
        Settled(job, 0, why),
        Wake(waiter, Attached(why, 2)),
    ]
    assert not core.state.storage
    assert core.state.storage_epoch == 0


def test_every_answer_is_less_than_that_it_is_open() -> None:
    values = [not_opened(rank, why) for rank in (0, 1, 65_534) for why in ("refused", "stopped")]
    assert values == sorted(values)
    assert values[0] > 0
    assert values[-1] < OPENED
    assert attached(0) == Attached("given_up")


def test_what_is_opened_after_nobody_wants_it_is_not_used() -> None:
    core = new_core()
    waiter, job = asked(core)
    assert core.cancel_waiter(waiter) == Attached("stopped")
    assert core.cancel_waiter(waiter) is None
    assert core.take_effects() == [StopJob(job)]
    assert agreed(core, job, OPENED) == [Settled(job, 0, "stopped")]
    assert not core.state.storage


def test_a_cache_that_degrades_answers_and_attaches_nothing() -> None:
    core = new_core()
    waiter, job = asked(core)
    effects = agreed(core, job, OPENED, alive=False)
    assert Wake(waiter, Attached("degraded")) in effects
    assert not any(isinstance(effect, UseStorage) for effect in effects)
    later = core.attach(2, URL, 2.0)
    assert core.take_effects() == [Wake(later, Attached("degraded"))]
