"""Loads: joined fills, failures, verdicts."""

from __future__ import annotations

import pytest

from hicache_actors.core import Core, CoreLease
from hicache_actors.core.words import (
    LoadResult,
    Phase,
    Settled,
    Shortfall,
    StartLoad,
    StartWriteBack,
    encode_result,
    unpack_slots,
)

from .kit import PAGE, Toks, answer, clear_device, compute, host_only, make, of_type, pages_of, settle, whole

A = Toks(range(41))


def loading(core: Core) -> tuple[CoreLease, int]:
    host_only(core, A)
    lease = core.lease(A, "a")
    jobs = core.load(lease)
    assert isinstance(jobs, tuple)
    return lease, jobs[0]


def end(core: Core, job: int, pages: int, *, sound: bool = True) -> None:
    """RESULT alone."""
    core.take_effects()
    core.apply(core.now_ms, [(job, Phase.RUN, encode_result(pages, sound=sound))], [])
    core.check()


def test_a_load_moves_host_slots_to_the_lease_s_pages() -> None:
    core = make()
    lease, job = loading(core)
    (start,) = of_type(core.take_effects(), StartLoad)
    assert unpack_slots(start.target) == list(lease.pages)
    assert (lease.ready_tokens, lease.usable_tokens) == (0, 40)
    assert core.load(lease) == (job,), "asking again is free"
    assert core.load_result(job) is None
    end(core, job, 10)
    assert core.load_result(job) == LoadResult(40, None)
    assert (lease.ready_tokens, lease.failed) == (40, None)
    assert core.usage().device.evictable_pages == 0
    answer(core)
    core.release(lease)
    assert core.load_result(job) == LoadResult(40, None), "answerable after the release"
    core.forget_load(job, lease.number)
    assert core.load_result(job) is None
    whole(core)


def test_a_second_lease_joins_the_fill() -> None:
    core = make()
    first, job = loading(core)
    second = core.lease(A, "b")
    assert (second.ready_tokens, second.usable_tokens, second.loads) == (0, 40, [job])
    assert core.load(second) == (job,)
    end(core, job, 10)
    assert second.ready_tokens == 40
    core.forget_load(job, second.number)
    core.forget_load(job, second.number)
    assert core.load_result(job) is not None, "the other lease may still ask"
    core.forget_load(job, first.number)
    assert core.load_result(job) is None
    for rid in "ab":
        core.release(core.state.leases[rid])
    whole(core)


@pytest.mark.parametrize("order", [0, 1])
def test_a_failed_load_fails_all_that_read_it_and_its_slots_drain(order: int) -> None:
    core = make()
    lease, job = loading(core)
    second = core.lease(A, "b")
    pages = list(lease.pages)
    for holder in (lease, second):
        core.allocate(holder, 1)
    end(core, job, 4)
    assert (lease.failed, second.failed) == ("load_failed", "load_failed")
    assert core.load_result(job) == LoadResult(16, "load_failed")
    assert pages_of(core.match(A)) == (4, 4, 10), "the good part stays, the host copy too"
    assert core.usage().device.limbo_pages == 6
    assert core.commit(lease, 40).failed == "load_failed"
    assert lease.account.reasons == {"open_page": 1, "load_failed": 24}
    refused = core.load(lease)
    assert isinstance(refused, Shortfall)
    assert refused.reason == "load_failed"
    ends = (lease, second) if order else (second, lease)
    core.release(ends[0])
    core.check()
    core.release(ends[1], after="event")
    core.check()
    again = core.lease(A, "c")
    assert isinstance(core.load(again), tuple)
    assert not set(again.pages[4:]) & set(pages[4:]), "not into slots that still drain"
    core.release(again)
    whole(core)


def test_a_lease_of_the_good_part_is_untouched() -> None:
    core = make()
    lease, job = loading(core)
    short = core.lease(Toks(range(13)), "b")
    end(core, job, 4)
    assert (lease.failed, short.failed, short.usable_tokens) == ("load_failed", None, 12)
    core.release(lease)
    core.release(short)
    whole(core)


def test_twin_failed_if_the_request_only_hung_below_the_load() -> None:
    core = make(60, 60)
    host_only(core, A)
    own = core.lease(A, "own")
    core.allocate(own, 41)
    reader = core.lease(A, "reader")
    (job,) = core.load(reader)  # type: ignore[misc]
    done = core.commit(own, 40)
    assert (done.published_pages, done.private_pages, done.failed) == (0, 11, None), (
        "a filling twin counts as published"
    )
    longer = A.plus(range(100, 111))
    own.tokens = longer
    core.allocate(own, 11)
    assert core.commit(own, 52).published_pages == 3
    assert pages_of(core.match(longer)) == (0, 12, 12)
    end(core, job, 4)
    assert (own.failed, reader.failed) == ("twin_failed", "load_failed")
    assert core.commit(own, 52).failed == "twin_failed"
    assert pages_of(core.match(longer)) == (4, 4, 10)
    core.release(own)
    core.release(reader)
    whole(core)


def test_a_bad_host_copy_is_dropped_from_the_bad_page_on() -> None:
    core = make()
    lease, job = loading(core)
    end(core, job, 4, sound=False)
    assert pages_of(core.match(A)) == (4, 4, 4)
    assert core.counts["bad_sources"] == 1
    core.release(lease)
    whole(core)


def test_unproven_pages_are_written_back_when_the_load_is_agreed() -> None:
    core = make(60, 60)
    lease, job = loading(core)
    longer = A.plus(range(100, 111))
    lease.tokens = longer
    core.allocate(lease, 12)
    core.commit(lease, 52, after="event")
    assert not of_type(core.take_effects(), StartWriteBack)
    end(core, job, 10)
    (start,) = of_type(core.take_effects(), StartWriteBack)
    assert (len(start.source) // 4, start.events) == (3, ("event",))
    settle(core)
    core.release(lease)
    whole(core)


def test_pages_below_any_part_of_a_load_are_written_back_when_it_is_agreed() -> None:
    """A second request joins the first half of a fill, and commits beside the second half."""
    core = make(60, 60)
    first, job = loading(core)
    other = Toks([*range(20), *range(200, 221)])
    second = core.lease(other, "b")
    assert second.loads == [job]
    core.allocate(second, 41 - second.usable_tokens)
    assert core.commit(second, 40, after="event").published_pages == 5
    assert not of_type(core.take_effects(), StartWriteBack)
    end(core, job, 10)
    (start,) = of_type(core.take_effects(), StartWriteBack)
    assert (len(start.source) // 4, start.events) == (5, ("event",))
    settle(core)
    core.release(first)
    core.release(second)
    whole(core)


def test_a_load_above_that_fails_takes_the_load_below_along() -> None:
    core = make()
    host_only(core, A)
    upper = core.lease(Toks(range(21)), "upper")
    (first,) = core.load(upper)  # type: ignore[misc]
    lower = core.lease(A, "lower")
    jobs = core.load(lower)
    assert isinstance(jobs, tuple)
    assert jobs == (first, first + 1), "it waits for both"
    end(core, first, 2)
    assert (upper.failed, lower.failed) == ("load_failed", "load_failed")
    end(core, first + 1, 5)
    assert core.load_result(first + 1) == LoadResult(8, "load_failed")
    assert pages_of(core.match(A)) == (2, 2, 10)
    core.release(upper)
    core.release(lower)
    whole(core)


def test_load_comes_before_allocate() -> None:
    core = make()
    host_only(core, A)
    lease = core.lease(A, "a")
    core.allocate(lease, 4)
    refused = core.load(lease)
    assert isinstance(refused, Shortfall)
    assert refused.reason == "after_allocate"
    core.release(lease)
    whole(core)


def test_all_of_the_asked_part_or_nothing() -> None:
    core = make(12, 40)
    host_only(core, A)
    other = core.lease(Toks([9]), "other")
    core.allocate(other, 4 * PAGE)
    lease = core.lease(A, "a")
    refused = core.load(lease)
    assert refused == Shortfall("device_capacity", 2, 0)
    assert not of_type(core.take_effects(), StartLoad)
    assert isinstance(core.load(lease, 8 * PAGE), tuple)
    assert lease.usable_tokens == 32
    settle(core)
    core.release(lease)
    core.release(other)
    whole(core)


def test_a_released_lease_leaves_its_load_running() -> None:
    core = make()
    lease, job = loading(core)
    core.take_effects()
    core.release(lease)
    assert core.usage().device.evictable_pages == 0, "the copy still writes"
    refused = core.allocate(core.lease(Toks([9]), "b"), 31 * PAGE)
    assert refused == Shortfall("device_capacity", 1, 10)
    effects = answer(core)
    assert Settled(job, 10) in effects
    answer(core)
    assert core.usage().device.evictable_pages == 10
    assert pages_of(core.match(A)) == (10, 10, 10)
    core.release(core.state.leases["b"])
    whole(core)


def test_reset_while_loading_fails_the_lease() -> None:
    core = make()
    lease, job = loading(core)
    core.take_effects()
    core.reset()
    core.check()
    assert lease.failed == "reset"
    assert core.usage().device.limbo_pages == 10
    refused = core.load(lease)
    assert isinstance(refused, Shortfall)
    assert refused.reason == "reset"
    answer(core)
    assert core.load_result(job) == LoadResult(0, "reset")
    assert core.match(A).host == 0
    core.release(lease)
    whole(core)


def test_pages_loaded_by_others_are_taken_before_the_rest_is_loaded() -> None:
    core = make()
    host_only(core, A)
    first, second = core.lease(A, "a"), core.lease(A, "b")
    core.load(first, 20)
    jobs = core.load(second)
    assert isinstance(jobs, tuple)
    assert len(jobs) == 2
    assert list(second.pages[:5]) == list(first.pages)
    settle(core)
    assert second.ready_tokens == 40
    core.release(first)
    core.release(second)
    clear_device(core)
    whole(core)


def test_compute_is_not_needed_for_what_was_loaded() -> None:
    core = make()
    lease, _ = loading(core)
    settle(core)
    core.allocate(lease, 1)
    assert core.commit(lease, 41).published_pages == 0
    core.release(lease)
    again = compute(core, A, "b")
    assert again.account.device == 40
    core.release(again)
    whole(core)
