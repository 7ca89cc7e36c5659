"""Prefetch: HIT, grant, RESULT; joining, stopping, anchors, the staging budget."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_actors.core import Core, fetch
from hicache_actors.core.words import (
    Forget,
    Grant,
    Phase,
    Settled,
    StartBackup,
    StartPrefetch,
    StopJob,
    encode_result,
    unpack_slots,
)

from .kit import PAGE, Toks, cached, clear_device, compute, host_only, make, of_type, pages_of, settle, whole

A = Toks(range(41))


def hit(core: Core, job: int, pages: int) -> list[object]:
    core.take_effects()
    core.apply(core.now_ms, [(job, Phase.HIT, pages)], [])
    core.check()
    return list(core.take_effects())


def result(core: Core, job: int, pages: int) -> list[object]:
    core.apply(core.now_ms, [(job, Phase.RUN, encode_result(pages))], [])
    core.check()
    return list(core.take_effects())


def test_what_has_arrived_everywhere_becomes_host_only_nodes() -> None:
    core = make()
    cached(core, Toks(range(9)))
    job = core.prefetch(A, "a", deadline_s=0.5, priority=3)
    assert job is not None
    (start,) = of_type(core.take_effects(), StartPrefetch)
    assert (start.job, start.rid, start.deadline_s, start.priority) == (job, "a", 0.5, 3)
    assert (start.path.first_page, start.path.pages, start.path.prompt) == (2, 8, A)
    assert bytes(start.path.tokens) == bytes(A.packed)[: 40 * 8]
    (grant,) = hit(core, job, 6)
    assert isinstance(grant, Grant)
    assert len(unpack_slots(grant.slots)) == 6
    assert result(core, job, 4) == [Settled(job, 4, "fetch_incomplete")]
    assert pages_of(core.match(A)) == (2, 2, 6)
    assert core.match(A).storage_hint == 8 * PAGE
    assert core.prefetch_agreed(job) == 4 * PAGE
    assert core.usage().host.limbo_pages == 2, "hung reads may still write there"
    core.apply(0, [], [job])
    core.check()
    assert core.take_effects() == [Forget(job)]
    assert core.usage().host.limbo_pages == 0
    whole(core)


def test_pages_of_a_prefetch_are_stored_already() -> None:
    core = make()
    core.prefetch(A, "a")
    settle(core)
    assert core.usage().stored_pages == 10
    lease = core.lease(A, "a")
    core.load(lease)
    effects = settle(core)
    assert not of_type(effects, StartBackup)
    assert lease.account.storage == 40
    core.release(lease)
    whole(core)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"storage": False}, "no_storage"), ({"prefetch_threshold_tokens": 44}, "below_threshold")],
)
def test_nothing_to_do_is_counted(settings: dict[str, Any], reason: str) -> None:
    core = make(**settings)
    assert core.prefetch(A, "a") is None
    assert core.counts == {f"prefetch_{reason}": 1}
    lease = core.lease(A, "a")
    assert lease.account.reasons == {"open_page": 1, reason: 40}
    core.release(lease)
    whole(core)


def test_nothing_is_fetched_that_is_there() -> None:
    core = make()
    host_only(core, A)
    assert core.prefetch(A, "a") is None
    assert core.prefetch(Toks([]), "b") is None
    whole(core)


@pytest.mark.parametrize("threshold", [17, 20])
def test_a_hit_below_the_threshold_is_declined_and_the_job_ends(threshold: int) -> None:
    core = make(prefetch_threshold_tokens=threshold)
    job = core.prefetch(A, "a")
    assert job is not None
    assert hit(core, job, 4) == [Settled(job, 0, "below_threshold"), Forget(job)]
    assert not core.needs_step
    job = core.prefetch(A, "a")
    assert job is not None
    assert isinstance(hit(core, job, 5)[0], Grant)
    whole(core)


def test_a_hit_longer_than_asked_is_cut() -> None:
    core = make()
    job = core.prefetch(A, "a")
    assert job is not None
    (grant,) = hit(core, job, 99)
    assert isinstance(grant, Grant)
    assert len(grant.slots) == 10 * 4
    whole(core)


def test_staging_is_at_most_half_of_the_host_limbo_included() -> None:
    core = make(40, 20)
    jobs = [core.prefetch(Toks([n] * 33), f"r{n}") for n in range(3)]
    first, second, third = (job for job in jobs if job is not None)
    assert isinstance(hit(core, first, 8)[0], Grant)
    (grant,) = hit(core, second, 8)
    assert isinstance(grant, Grant)
    assert len(grant.slots) == 2 * 4, "what is left of ten"
    assert hit(core, third, 8) == [Settled(third, 0, "host_capacity"), Forget(third)]
    assert result(core, second, 2) == [Settled(second, 2, "host_capacity")]
    result(core, first, 0)
    assert core.prefetch(Toks([9] * 33), "late") is not None
    late = core.wire().slots[0][0]
    (grant,) = hit(core, late, 8)
    assert isinstance(grant, Grant)
    assert len(grant.slots) == 2 * 4, "eight hang in limbo"
    whole(core)


def test_fewer_pages_if_the_host_has_less() -> None:
    core = make(40, 12)
    lease = compute(core, Toks([7] * 36), "pinned")  # its write-back holds nine host pages
    job = core.prefetch(A, "a")
    assert job is not None
    effects = hit(core, job, 10)
    (grant,) = of_type(effects, Grant)  # type: ignore[arg-type]
    assert len(grant.slots) == 3 * 4
    core.release(lease)
    whole(core)


def test_overlapping_prefetches_join() -> None:
    core = make()
    job = core.prefetch(A, "a")
    assert core.prefetch(A.plus(range(500, 540)), "b") == job
    assert core.prefetch(Toks([*range(20), *range(70, 90)]), "c") == job, "its first missing page is fetched"
    assert core.prefetch(Toks(range(41, 80)), "d") != job
    assert core.counts["prefetches_joined"] == 2
    core.release(compute(core, Toks(range(9)), "x"))
    assert core.prefetch(A, "e") == job, "the first missing page is in the middle of it"
    whole(core)


def test_the_job_stops_when_nobody_wants_it() -> None:
    core = make()
    job = core.prefetch(A, "a")
    assert job is not None
    core.prefetch(A, "b")
    core.take_effects()
    core.stop_prefetch(job, "a")
    core.stop_prefetch(job, "a")
    assert core.take_effects() == []
    core.stop_prefetch(job, "b")
    assert core.take_effects() == [StopJob(job)]
    assert core.prefetch(A, "c") != job, "not joined any more"
    assert hit(core, job, 10) == [Settled(job, 0, "stopped"), Forget(job)]
    assert core.prefetch_agreed(job) == 0
    whole(core)


def test_what_arrived_before_the_stop_counts() -> None:
    core = make()
    job = core.prefetch(A, "a")
    assert job is not None
    hit(core, job, 10)
    core.stop_prefetch(job, "a")
    assert core.take_effects() == [StopJob(job)]
    result(core, job, 3)
    assert pages_of(core.match(A)) == (0, 0, 3)
    whole(core)


def test_best_effort_stops_at_the_lease_of_that_request() -> None:
    core = make(prefetch_policy="best_effort")
    job = core.prefetch(A, "a")
    core.take_effects()
    core.release(core.lease(A, "b"))
    assert core.take_effects() == []
    core.release(core.lease(A, "a"))
    assert core.take_effects() == [StopJob(job)] if job else False
    whole(core)


@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
def test_other_policies_do_not_stop_at_the_lease(policy: str) -> None:
    core = make(prefetch_policy=policy)
    core.prefetch(A, "a")
    core.take_effects()
    core.release(core.lease(A, "a"))
    assert core.take_effects() == []
    whole(core)


def test_the_anchor_is_pinned_on_the_host_until_result_and_not_on_the_device() -> None:
    core = make(40, 20)
    host_only(core, Toks(range(9)))
    job = core.prefetch(A, "a")
    assert job is not None
    assert core.usage().host.evictable_pages == 0
    core.release(compute(core, Toks([5] * 37), "b"))
    assert core.usage().device.evictable_pages < 9, "that is the write-back's"
    hit(core, job, 2)
    result(core, job, 2)
    assert pages_of(core.match(A)) == (0, 0, 4)
    assert core.usage().host.evictable_pages == 4, "hung reads pin nothing"
    settle(core)
    assert core.usage().device.evictable_pages == 9
    whole(core)


def test_nothing_is_published_below_an_anchor_that_is_gone() -> None:
    core = make(40, 40, write_policy="none")
    core.release(compute(core, Toks(range(9)), "x"))
    job = core.prefetch(A, "a")
    assert job is not None
    hit(core, job, 8)
    clear_device(core)
    assert result(core, job, 8) == [Settled(job, 0, "anchor_lost")]
    assert core.match(A).host == 0
    assert core.counts["prefetch_anchor_lost"] == 1
    whole(core)


def test_nodes_that_came_meanwhile_keep_their_slots() -> None:
    core = make()
    job = core.prefetch(A, "a")
    assert job is not None
    hit(core, job, 10)
    core.release(compute(core, Toks([*range(17), 7, 7, 7, 7, 7]), "b"))  # four pages in common
    core.take_effects()
    result(core, job, 10)
    assert core.usage().host.limbo_pages == 4, "their host twins fill; ours are left over"
    assert pages_of(core.match(A)) == (4, 4, 10)
    settle(core)
    whole(core)


def test_device_only_nodes_adopt_what_was_fetched() -> None:
    core = make(write_policy="none")
    job = core.prefetch(A, "a")
    assert job is not None
    hit(core, job, 10)
    core.release(compute(core, Toks(range(17)), "b"))
    result(core, job, 10)
    assert core.usage().host.limbo_pages == 0
    clear_device(core)
    assert pages_of(core.match(A)) == (0, 0, 10)
    whole(core)


@pytest.mark.parametrize("phase", ["hit", "run"])
def test_bytes_of_an_older_epoch_are_not_published(phase: str) -> None:
    core = make()
    job = core.prefetch(A, "a")
    assert job is not None
    if phase == "run":
        hit(core, job, 10)
    core.reset()
    core.check()
    if phase == "run":
        assert result(core, job, 10) == [Settled(job, 0, "reset")]
    else:
        assert hit(core, job, 10) == [Settled(job, 0, "reset"), Forget(job)]
    assert core.match(A).host == 0
    assert core.prefetch(A, "b") != job
    whole(core)


def test_account_counts_what_the_request_waited_for() -> None:
    core = make()
    cached(core, Toks(range(9)))
    job = core.prefetch(A, "a")
    assert job is not None
    settle(core, {job: encode_result(5)})
    lease = core.lease(A, "a")
    core.load(lease)
    account = lease.account
    assert (account.device, account.host, account.storage, account.computed) == (8, 0, 20, 13)
    assert account.reasons == {"open_page": 1, "fetch_incomplete": 12}
    other = core.lease(A, "b")
    assert (other.account.device, other.account.host, other.account.storage) == (8, 20, 0), "it waited for nothing"
    settle(core)
    core.release(lease)
    core.release(other)
    whole(core)


def test_a_fetch_that_has_been_forgotten_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_KEPT", 2)
    core = make()
    jobs = [core.prefetch(Toks(range(100 * at, 100 * at + 9)), f"r{at}") for at in range(3)]
    first = jobs[0]
    assert first is not None
    assert core.prefetch_agreed(first) is None
    settle(core)
    assert [core.prefetch_agreed(job) for job in jobs if job is not None] == [0, 2 * PAGE, 2 * PAGE]
    assert core.prefetch_reason(first) is None
    whole(core)
