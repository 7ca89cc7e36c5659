"""Waiters: acquire, stored, drained."""

from __future__ import annotations

import pytest

from hicache_actors.core import Core, CoreLease
from hicache_actors.core.words import HOST, Effect, Phase, StartLoad, StartPrefetch, StopJob, Wake, encode_result
from hicache_actors.errors import UsageError

from .kit import PAGE, Toks, answer, cached, compute, host_only, make, of_type, settle, whole, woken

A = Toks(range(41))


def apply(core: Core, job: int, phase: Phase, value: int) -> list[Effect]:
    core.apply(core.now_ms, [(job, phase, value)], [])
    core.check()
    return core.take_effects()


# -- acquire ----------------------------------------------------------------------------------------------------------------


def test_acquire_of_a_cached_prompt_is_settled_in_its_own_section() -> None:
    core = make()
    host_only(core, A)
    waiter = core.acquire(A, "a")
    effects = core.take_effects()
    lease = woken(effects, waiter)
    assert isinstance(lease, CoreLease)
    assert (lease.usable_tokens, len(lease.loads)) == (40, 1)
    assert of_type(effects, StartLoad)
    settle(core)
    core.release(lease)
    whole(core)


def test_lease_and_load_are_made_in_the_apply_that_settles_the_prefetch() -> None:
    core = make()
    waiter = core.acquire(A, "a", deadline_s=2.0)
    (start,) = core.take_effects()
    assert isinstance(start, StartPrefetch)
    assert start.deadline_s == 2.0
    apply(core, start.job, Phase.HIT, 10)
    effects = apply(core, start.job, Phase.RUN, encode_result(10))
    lease = woken(effects, waiter)
    assert of_type(effects, StartLoad)
    assert (lease.account.storage, lease.account.computed) == (40, 1)
    settle(core)
    core.release(lease)
    whole(core)


def test_a_declined_prefetch_settles_it_too() -> None:
    core = make(prefetch_threshold_tokens=20)
    waiter = core.acquire(A, "a")
    (start,) = core.take_effects()
    lease = woken(apply(core, start.job, Phase.HIT, 1), waiter)  # type: ignore[union-attr]
    assert lease.usable_tokens == 0
    assert lease.account.reasons == {"open_page": 1, "below_threshold": 40}
    core.release(lease)
    whole(core)


def test_what_fits_is_loaded_and_the_reason_is_named() -> None:
    core = make(12, 40)
    host_only(core, A)
    other = core.lease(Toks([9]), "other")
    core.allocate(other, 9 * PAGE)
    waiter = core.acquire(A, "a")
    lease = woken(core.take_effects(), waiter)
    assert lease.usable_tokens == 12
    assert lease.account.reasons == {"open_page": 1, "device_capacity": 28}
    settle(core)
    for each in (lease, other):
        core.release(each)
    whole(core)


def test_two_acquires_share_the_fetch_and_the_fill() -> None:
    core = make()
    first, second = core.acquire(A, "a"), core.acquire(A, "b")
    starts = of_type(core.take_effects(), StartPrefetch)
    assert len(starts) == 1
    answer(core)
    effects = answer(core)
    leases = [woken(effects, waiter) for waiter in (first, second)]
    assert len(of_type(effects, StartLoad)) == 1
    assert leases[0].loads == leases[1].loads
    assert [lease.account.storage for lease in leases] == [40, 40], "both waited for the fetch"
    settle(core)
    for lease in leases:
        core.release(lease)
    whole(core)


def test_who_joined_a_shorter_fetch_asks_for_the_rest() -> None:
    core = make()
    core.acquire(Toks(range(21)), "short")
    long = core.acquire(A, "long")
    (start,) = core.take_effects()
    apply(core, start.job, Phase.HIT, 5)  # type: ignore[union-attr]
    effects = apply(core, start.job, Phase.RUN, encode_result(5))  # type: ignore[union-attr]
    (rest,) = of_type(effects, StartPrefetch)
    assert (rest.rid, rest.path.first_page, rest.path.pages) == ("long", 5, 5)
    assert not [effect for effect in effects if isinstance(effect, Wake) and effect.waiter == long]
    lease = woken(settle(core), long)
    assert lease.account.storage == 40
    core.release(lease)
    core.release(core.state.leases["short"])
    whole(core)


def test_best_effort_stops_at_the_first_apply_after_hit() -> None:
    core = make(prefetch_policy="best_effort")
    waiter = core.acquire(A, "a")
    (start,) = core.take_effects()
    job = start.job  # type: ignore[union-attr]
    assert StopJob(job) not in apply(core, job, Phase.HIT, 10)
    core.apply(0, [], [])
    assert core.take_effects() == [StopJob(job)]
    lease = woken(apply(core, job, Phase.RUN, encode_result(3)), waiter)
    assert lease.account.storage == 12
    settle(core)
    core.release(lease)
    whole(core)


def test_a_cancelled_acquire_leaves_nothing_behind() -> None:
    core = make()
    waiter = core.acquire(A, "a")
    (start,) = core.take_effects()
    core.cancel_acquire(waiter)
    core.cancel_acquire(waiter)
    assert core.take_effects() == [StopJob(start.job)]  # type: ignore[union-attr]
    again = core.acquire(A, "a")
    core.take_effects()
    effects = settle(core)
    lease = woken(effects, again)
    assert not [effect for effect in effects if isinstance(effect, Wake) and effect.waiter == waiter]
    core.release(lease)
    whole(core)


def test_cancel_after_the_wake_releases_the_lease_and_drops_its_verdicts() -> None:
    core = make()
    host_only(core, A)
    waiter = core.acquire(A, "a")
    lease = woken(core.take_effects(), waiter)
    (job,) = lease.loads
    core.cancel_acquire(waiter)
    assert lease.closed
    settle(core)
    assert core.load_result(job) is None
    assert core.usage().leases == 0
    whole(core)


def test_an_acquire_needs_a_request_of_its_own() -> None:
    core = make()
    waiter = core.acquire(A, "a")
    with pytest.raises(UsageError, match="'a'"):
        core.acquire(A, "a")
    with pytest.raises(UsageError, match="'a'"):
        core.lease(A, "a")
    core.cancel_acquire(waiter)
    lease = core.lease(A, "a")
    with pytest.raises(UsageError, match="'a'"):
        core.acquire(A, "a")
    core.release(lease)
    whole(core)


# -- stored and drained -----------------------------------------------------------------------------------------------------


def test_stored_answers_when_all_whole_pages_are_acknowledged() -> None:
    core = make()
    lease = compute(core, Toks(range(40)), "a")
    waiter = core.stored(Toks(range(40)))
    effects = settle(core)
    assert woken(effects, waiter) == (40, None), "the last page counts too"
    core.release(lease)
    whole(core)


def test_stored_says_why_not() -> None:
    core = make(retry_delays_s=(1,))
    nothing = core.stored(A)
    assert woken(core.take_effects(), nothing) == (0, "not_committed")
    assert core.cancel_waiter(nothing) is None
    lease = compute(core, A, "a")
    waiter = core.stored(A)
    core.take_effects()
    assert core.cancel_waiter(core.stored(A)) == (0, "pending")
    answer(core)
    (backup,) = [job.id for job in core.state.jobs.open.values() if job.kind == "backup"]
    apply(core, backup, Phase.RUN, encode_result(4))
    assert core.cancel_waiter(core.stored(A)) == (16, "pending"), "a retry is due"
    settle(core)
    core.apply(1000, [], [])
    core.take_effects()
    (backup,) = [job.id for job in core.state.jobs.open.values() if job.kind == "backup"]
    assert woken(apply(core, backup, Phase.RUN, encode_result(0)), waiter) == (16, "given_up")
    core.release(lease)
    whole(core)


def test_stored_returns_when_the_rest_was_evicted() -> None:
    core = make(40, 10, retry_delays_s=(100,))
    lease = compute(core, A, "a")
    waiter = core.stored(A)
    core.take_effects()
    answer(core)
    (backup,) = [job.id for job in core.state.jobs.open.values() if job.kind == "backup"]
    apply(core, backup, Phase.RUN, encode_result(4))
    settle(core)
    core.release(lease)
    other = core.lease(Toks([9]), "b")
    core.allocate(other, 40 * PAGE)  # from the device
    core.release(other)
    third = compute(core, Toks([8] * 29), "c")  # and from the host
    assert woken(core.take_effects(), waiter) == (16, "evicted")
    settle(core)
    core.release(third)
    whole(core)


def test_stored_without_a_storage() -> None:
    core = make(storage=False)
    lease = compute(core, A, "a")
    settle(core)
    assert woken((core.stored(A), core.take_effects())[1], 1) == (0, "no_storage")
    core.release(lease)
    whole(core)


def test_drained_answers_when_nothing_is_under_way() -> None:
    core = make(retry_delays_s=(1,))
    lease = compute(core, A, "a")
    waiter = core.drained()
    assert not [effect for effect in core.take_effects() if isinstance(effect, Wake)]
    answer(core)
    (backup,) = [job.id for job in core.state.jobs.open.values() if job.kind == "backup"]
    apply(core, backup, Phase.RUN, encode_result(4))
    settle(core)
    core.apply(1000, [], [])
    core.take_effects()
    (backup,) = [job.id for job in core.state.jobs.open.values() if job.kind == "backup"]
    assert woken(apply(core, backup, Phase.RUN, encode_result(1)), waiter) == 5, "given up"
    core.release(lease)
    whole(core)


def test_drained_counts_what_is_not_on_the_host_when_there_is_no_storage() -> None:
    core = make(40, 6, storage=False)
    lease = compute(core, A, "a")
    settle(core)
    assert woken((core.drained(), core.take_effects())[1], 1) == 4
    core.release(lease)
    whole(core)


def test_degrade_answers_everybody() -> None:
    core = make()
    lease = compute(core, A, "a")
    stored, drained = core.stored(A), core.drained()
    acquired = core.acquire(Toks(range(100, 150)), "b")
    core.take_effects()
    core.degrade()
    effects = core.take_effects()
    core.check()
    assert woken(effects, stored) == (0, "degraded")
    assert woken(effects, drained) == 0
    late = woken(effects, acquired)
    assert (late.usable_tokens, late.failed) == (0, "degraded")
    core.release(lease)
    core.release(late)
    whole(core)


def test_a_host_page_without_a_way_to_the_storage_is_given_up() -> None:
    core = make(retry_delays_s=())
    cached(core, A)
    nodes = list(core.state.tree.table.values())
    core.state.pins.lose(HOST, nodes)
    for node in nodes:
        core.state.tree.set_stored(node, 0)
    assert woken((core.stored(A), core.take_effects())[1], 1) == (0, "given_up")
    whole(core)
