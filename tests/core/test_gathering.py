"""gather_s: one backup for what comes to the host in a while, and none that waits when somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hicache_actors.core import Core
from hicache_actors.core.words import Gather, Phase, StartBackup, UseStorage, UseWeights, encode_result
from hicache_actors.errors import ConfigError

from .kit import PAGE, Toks, answer, compute, make, of_type, whole, woken

GATHER_MS = 50


def gathering(host: int = 400, **settings: Any) -> Core:
    return make(400, host, gather_s=GATHER_MS / 1000, **settings)


def prompt(family: int, pages: int = 3) -> Toks:
    return Toks(range(family << 20, (family << 20) + pages * PAGE + 1))


def publish(core: Core, family: int, pages: int = 3) -> list[Any]:
    """A prompt comes to the host, and its request goes -> effects."""
    lease = compute(core, prompt(family, pages), f"maker of {family}")
    effects = answer(core)
    core.release(lease)
    return effects + answer(core)


def pass_ms(core: Core, ms: int) -> list[Any]:
    core.apply(core.now_ms + ms, [], [])
    core.check()
    return core.take_effects()


def finish(core: Core) -> None:
    pass_ms(core, GATHER_MS)
    whole(core)


def test_what_comes_in_time_is_stored_by_one_job_in_order() -> None:
    core = gathering()
    assert of_type(publish(core, 1), StartBackup) == []
    assert of_type(pass_ms(core, GATHER_MS - 1), StartBackup) == []
    assert of_type(publish(core, 2), StartBackup) == []
    (backup,) = of_type(pass_ms(core, 1), StartBackup)
    families = [memoryview(path.tokens).cast("B").cast("q")[0] >> 20 for path in backup.paths]
    assert families == [1, 2]
    assert [(path.first_page, path.pages) for path in backup.paths] == [(0, 3), (0, 3)]
    answer(core)
    assert core.usage().stored_pages == 6
    assert of_type(publish(core, 3), StartBackup) == []
    finish(core)


def test_the_first_that_gathers_says_when_it_ends() -> None:
    core = gathering()
    publish(core, 1)
    assert core.next_due_ms == GATHER_MS
    pass_ms(core, 20)
    publish(core, 2)
    assert core.next_due_ms == GATHER_MS
    finish(core)


def test_a_job_that_gathers_is_open_and_has_no_place_on_the_wire() -> None:
    core = gathering()
    publish(core, 1)
    assert core.needs_step
    assert core.wire().slots == ()
    assert core.usage().host.evictable_pages == 0, "its pages are pinned"
    pass_ms(core, GATHER_MS)
    assert [phase for _, phase in core.wire().slots] == [Phase.RUN]
    finish(core)


def test_it_is_announced_once_so_that_nobody_takes_the_cache_for_idle() -> None:
    core = gathering()
    (gathers,) = of_type(publish(core, 1), Gather)
    effects = publish(core, 2) + pass_ms(core, GATHER_MS)
    assert of_type(effects, Gather) == []
    (backup,) = of_type(effects, StartBackup)
    assert backup.job == gathers.job
    finish(core)


@pytest.mark.parametrize("ask", [lambda core: core.stored(prompt(1)), lambda core: core.drained()])
def test_who_waits_ends_the_gathering(ask: Callable[[Core], int]) -> None:
    core = gathering()
    publish(core, 1)
    waiter = ask(core)
    assert len(of_type(core.take_effects(), StartBackup)) == 1
    effects = answer(core)
    assert woken(effects, waiter) in ((3 * PAGE, None), 0)
    assert of_type(publish(core, 2), StartBackup) == [], "nobody waits any more"
    finish(core)


def test_nothing_gathers_while_somebody_waits() -> None:
    core = gathering()
    lease = compute(core, prompt(1), "maker")
    core.stored(prompt(1))
    assert len(of_type(answer(core), StartBackup)) == 1
    core.release(lease)
    finish(core)


def test_many_pages_do_not_wait() -> None:
    core = gathering(host=400)
    assert of_type(publish(core, 1, pages=49), StartBackup) == []
    (backup,) = of_type(publish(core, 2, pages=1), StartBackup)
    assert sum(path.pages for path in backup.paths) == 50, "an eighth of the host"
    finish(core)


def test_a_small_host_does_not_gather() -> None:
    core = gathering(host=7)
    assert len(of_type(publish(core, 1, pages=1), StartBackup)) == 1
    finish(core)


def test_a_retry_does_not_wait_again() -> None:
    core = gathering(retry_delays_s=(1,))
    publish(core, 1)
    pass_ms(core, GATHER_MS)
    answer(core, {job: encode_result(0) for job in core.state.jobs.open})
    answer(core)
    assert of_type(publish(core, 2), StartBackup) == []
    (backup,) = of_type(pass_ms(core, 1000), StartBackup)
    assert len(backup.paths) == 2
    finish(core)


def test_a_store_that_is_exchanged_gets_what_has_gathered_for_it() -> None:
    core = gathering()
    publish(core, 1)
    core.set_storage(True)
    kinds = [type(effect) for effect in core.take_effects()]
    assert kinds.index(StartBackup) < kinds.index(UseStorage)
    finish(core)


def test_pages_keep_the_names_of_the_weights_that_computed_them() -> None:
    core = gathering()
    publish(core, 1)
    core.advance_epoch("other weights")
    kinds = [type(effect) for effect in core.take_effects()]
    assert kinds.index(StartBackup) < kinds.index(UseWeights)
    finish(core)


@pytest.mark.parametrize("end", [Core.reset, Core.degrade])
def test_reset_and_degrade_start_it_so_that_it_can_end(end: Callable[[Core], None]) -> None:
    core = gathering()
    publish(core, 1)
    end(core)
    assert len(of_type(core.take_effects(), StartBackup)) == 1
    answer(core)
    answer(core)
    assert not core.state.jobs.open
    whole(core)


def test_a_cache_that_closes_does_not_wait() -> None:
    core = gathering()
    publish(core, 1)
    core.hurry()
    assert len(of_type(core.take_effects(), StartBackup)) == 1
    assert len(of_type(publish(core, 2), StartBackup)) == 1
    finish(core)


@pytest.mark.parametrize("gather_s", [-0.1, float("inf"), float("nan")])
def test_impossible_times_are_refused(gather_s: float) -> None:
    with pytest.raises(ConfigError, match="gather_s"):
        make(gather_s=gather_s)
