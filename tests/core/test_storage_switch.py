"""Another store, or none: what counts as stored, what is backed up, and what becomes of jobs that began before."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hicache_actors.core import Core
from hicache_actors.core.backlog import JOB_PAGES
from hicache_actors.core.words import Phase, StartBackup, StartPrefetch, UseStorage, encode_result

from .kit import PAGE, Toks, answer, cached, clear_device, compute, make, of_type, settle, whole, woken


def prompt(pages: int, family: int = 0) -> Toks:
    return Toks(range(1000 * family, 1000 * family + pages * PAGE + 1))


def saved_pages(effects: list[Any]) -> list[tuple[int, int]]:
    """(first page, pages) of each path that the backups save."""
    return [(path.first_page, path.pages) for backup in of_type(effects, StartBackup) for path in backup.paths]


def test_without_a_store_nothing_is_saved_and_one_can_be_attached() -> None:
    core = make(storage=False)
    cached(core, prompt(3))
    assert core.usage().stored_pages == 0
    core.set_storage(True)
    core.check()
    effects = core.take_effects()
    assert [type(effect) for effect in effects] == [UseStorage, StartBackup]
    assert effects[0] == UseStorage(True)
    assert saved_pages(effects) == [(0, 3)]
    settle(core)
    assert core.usage().stored_pages == 3
    assert core.usage().backlog_nodes == 0
    whole(core)


def test_a_detached_store_has_nothing_and_is_asked_for_nothing() -> None:
    core = make()
    cached(core, prompt(3))
    assert core.usage().stored_pages == 3
    core.set_storage(False)
    assert core.take_effects() == [UseStorage(False)]
    core.check()
    assert core.usage().stored_pages == 0
    cached(core, prompt(3, family=1))
    assert core.usage().stored_pages == 0
    core.reset()
    assert core.prefetch(prompt(3), "later") is None
    assert core.counts["prefetch_no_storage"] == 1
    whole(core)


def test_the_wait_for_stored_ends_with_the_store() -> None:
    core = make()
    compute(core, prompt(3), "maker")
    waiter = core.stored(prompt(3))
    core.set_storage(False)
    assert woken(core.take_effects(), waiter) == (0, "no_storage")
    waiter = core.stored(prompt(3))
    assert woken(core.take_effects(), waiter) == (0, "no_storage")


def test_what_waits_for_the_backlog_is_pending() -> None:
    pages = JOB_PAGES - 100  # a job is of two families; the third waits for its turn
    core = make(device=4 * pages, host=4 * pages, storage=False)
    for family in range(1, 4):
        cached(core, prompt(pages, family=family))
    core.set_storage(True)
    assert core.usage().backlog_nodes == 1
    waiter, drain = core.stored(prompt(pages, family=3)), core.drained()
    effects = settle(core)
    assert woken(effects, waiter) == (pages * PAGE, None)
    assert woken(effects, drain) == 0
    whole(core)


def test_the_backlog_is_saved_a_job_at_a_time_and_shallow_nodes_first() -> None:
    core = make(device=2000, host=2000, storage=False)
    stem = prompt(10)
    cached(core, stem)
    for family in range(1, 6):  # five branches of 150 pages on a stem of 10
        cached(core, Toks([*range(10 * PAGE), *range(10_000 * family, 10_000 * family + 150 * PAGE + 1)]))
    core.set_storage(True)
    effects = core.take_effects()
    jobs = []
    while effects:
        assert len(of_type(effects, StartBackup)) <= 1
        jobs.append(saved_pages(effects))
        effects = answer(core)
    assert jobs[0][0] == (0, 10)  # the stem: without it nothing is found
    assert sum(pages for job in jobs for _, pages in job) == 10 + 5 * 150
    assert all(sum(pages for _, pages in job) <= JOB_PAGES + 150 for job in jobs)
    assert len([job for job in jobs if job]) >= 2
    assert core.usage().stored_pages == core.usage().tree_pages
    whole(core)


def test_a_failing_store_is_not_flooded_by_the_backlog() -> None:
    pages = JOB_PAGES + 88  # each a job of its own
    core = make(device=5 * pages, host=5 * pages, storage=False, retry_delays_s=(1,))
    for family in range(1, 5):
        cached(core, prompt(pages, family=family))
    core.set_storage(True)
    (first,) = of_type(core.take_effects(), StartBackup)
    core.apply(0, [(first.job, Phase.RUN, encode_result(0))], [first.job])
    assert not of_type(core.take_effects(), StartBackup)
    assert core.next_due_ms == 1000
    core.apply(1000, [], [])
    (retry,) = of_type(core.take_effects(), StartBackup)
    assert retry.paths[0].pages == first.paths[0].pages
    core.apply(1001, [], [])
    assert not of_type(core.take_effects(), StartBackup)
    core.apply(1002, [(retry.job, Phase.RUN, encode_result(0))], [retry.job])
    assert core.usage().retries == 0  # given up; the others get their chance
    assert of_type(core.take_effects(), StartBackup)
    settle(core)
    assert core.usage().stored_pages == 3 * pages
    whole(core)


def test_a_backup_that_began_at_the_old_store_does_not_count_at_the_new() -> None:
    core = make()
    lease = compute(core, prompt(3), "maker")
    answer(core)  # the write-back
    old = core.state.jobs.last
    core.release(lease)
    core.set_storage(True)
    core.check()
    (new,) = of_type(core.take_effects(), StartBackup)
    assert new.job != old
    core.apply(0, [(old, Phase.RUN, encode_result(3))], [old])
    core.check()
    assert core.usage().stored_pages == 0
    core.apply(0, [(new.job, Phase.RUN, encode_result(3))], [new.job])
    core.check()
    assert core.usage().stored_pages == 3
    whole(core)


def test_a_backup_that_fails_at_the_old_store_is_not_tried_again() -> None:
    core = make()
    compute(core, prompt(3), "maker")
    answer(core)
    old = core.state.jobs.last
    core.set_storage(False)
    core.apply(0, [(old, Phase.RUN, encode_result(1))], [old])
    core.check()
    assert core.usage().retries == 0
    assert core.next_due_ms is None


def test_retries_end_with_their_store() -> None:
    core = make()
    compute(core, prompt(3), "maker")
    answer(core)
    core.apply(0, [(core.state.jobs.last, Phase.RUN, encode_result(1))], [core.state.jobs.last])
    assert core.usage().retries == 1
    core.set_storage(False)
    core.check()
    assert core.usage().retries == 0
    core.set_storage(True)
    assert saved_pages(core.take_effects()) == [(0, 1), (1, 2)]
    settle(core)
    assert core.usage().stored_pages == 3


def test_what_one_section_wanted_saved_goes_to_the_store_that_it_knew() -> None:
    core = make()
    compute(core, prompt(3), "maker")
    core.take_effects()
    (write_back,) = core.state.jobs.open
    core.apply(
        0,
        [(write_back, Phase.RUN, encode_result(3))],
        [write_back],
        [lambda core: core.set_storage(True)],
    )
    kinds = [type(effect) for effect in core.take_effects() if isinstance(effect, (StartBackup, UseStorage))]
    assert kinds == [StartBackup, UseStorage, StartBackup]
    settle(core)
    assert core.usage().stored_pages == 3


@pytest.mark.parametrize("attached", [False, True])
def test_a_fetch_that_began_at_the_old_store_is_published_and_not_stored(attached: bool) -> None:
    core = make()
    job = core.prefetch(prompt(4), "asker")
    assert job is not None
    (start,) = of_type(core.take_effects(), StartPrefetch)
    assert start.job == job
    core.set_storage(attached)
    core.apply(0, [(job, Phase.HIT, 4)], [])
    core.apply(0, [(job, Phase.RUN, encode_result(4))], [job])
    core.check()
    assert core.prefetch_agreed(job) == 4 * PAGE
    assert core.usage().stored_pages == 0
    assert core.match(prompt(4)).storage_hint == core.match(prompt(4)).host == 4 * PAGE
    settle(core)
    assert core.usage().stored_pages == (4 if attached else 0)
    whole(core)


def test_nodes_that_have_gone_are_passed_over() -> None:
    pages = JOB_PAGES + 48
    core = make(device=4 * pages, host=4 * pages, storage=False)
    for family in range(1, 4):
        cached(core, prompt(pages, family=family))
    core.set_storage(True)
    core.take_effects()
    assert core.usage().backlog_nodes == 2
    core.reset()
    core.check()
    assert core.usage().backlog_nodes == 0
    whole(core)


def test_a_degraded_core_knows_its_store_and_saves_nothing() -> None:
    core = make(storage=False)
    cached(core, prompt(3))
    core.degrade()
    core.set_storage(True)
    assert not of_type(core.take_effects(), StartBackup)
    assert core.next_due_ms is None


@pytest.mark.parametrize("seed", range(40))
def test_switches_at_random_moments_keep_every_invariant(seed: int) -> None:
    rng = random.Random(seed)
    core = make(device=40, host=40, storage=rng.random() < 0.5, retry_delays_s=(0.5, 1))
    leases = []
    for step in range(120):
        match rng.randrange(8):
            case 0:
                core.set_storage(rng.random() < 0.7)
            case 1 | 2:
                lease = core.lease(prompt(rng.randrange(2, 9), family=rng.randrange(4)), f"r{step}")
                core.load(lease)
                tokens = len(lease.tokens)
                if core.allocate(lease, tokens - lease.capacity_tokens) is None:
                    core.commit(lease, tokens)
                leases.append(lease)
            case 3 if leases:
                core.release(leases.pop(rng.randrange(len(leases))))
            case 4:
                core.prefetch(prompt(rng.randrange(2, 9), family=rng.randrange(4)), f"f{step}")
            case 5:
                clear_device(core) if not leases else None
            case _:
                _answer_some(core, rng)
        core.check()
    for lease in leases:
        core.release(lease)
    whole(core)


def _answer_some(core: Core, rng: random.Random) -> None:
    core.take_effects()
    wire = core.wire()
    values = [
        (job, phase, rng.randrange(9) if phase is Phase.HIT else encode_result(rng.randrange(9)))
        for job, phase in wire.slots
        if rng.random() < 0.6
    ]
    core.apply(core.now_ms + rng.randrange(1000), values, [job for job in wire.rows if rng.random() < 0.6])
