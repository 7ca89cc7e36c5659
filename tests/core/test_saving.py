"""Write-back and backup: order, events, ranges, retries."""

from __future__ import annotations

from hicache_actors.core import Core
from hicache_actors.core.words import HOST, Phase, StartBackup, StartDrain, StartWriteBack, encode_result, unpack_slots
from hicache_actors.keys.scope import Scope

from .kit import PAGE, Toks, answer, clear_device, compute, make, of_type, pages_of, settle, whole

A = Toks(range(41))


def values(core: Core, kind: str, pages: int) -> None:
    """RESULT for the one open job of a kind."""
    core.take_effects()
    (job,) = [job.id for job in core.state.jobs.open.values() if job.kind == kind and job.phase is Phase.RUN]
    core.apply(core.now_ms, [(job, Phase.RUN, encode_result(pages))], [])
    core.check()


def test_one_job_of_each_kind_in_a_section_ranges_in_order() -> None:
    core = make(80, 80)
    leases = [compute(core, Toks([n] * 9, Scope(salt=str(n))), f"r{n}", after=f"event {n}") for n in range(3)]
    effects = core.take_effects()
    (start,) = of_type(effects, StartWriteBack)
    assert unpack_slots(start.source) == [slot for lease in leases for slot in lease.pages[:2]]
    assert start.events == ("event 0", "event 1", "event 2")
    assert len(core.wire().slots) == 1
    effects = answer(core)
    (backup,) = of_type(effects, StartBackup)
    assert [(p.scope, p.first_page, p.pages) for p in backup.paths] == [(Scope(salt=str(n)), 0, 2) for n in range(3)]
    assert backup.source == start.target
    assert [p.prompt for p in backup.paths] == [lease.tokens for lease in leases]
    for lease in leases:
        core.release(lease)
    whole(core)


def test_a_decoding_batch_opens_two_jobs_a_step() -> None:
    core = make(600, 600)
    leases = [core.lease(Toks(range(n << 20, (n << 20) + 40)), f"r{n}") for n in range(64)]
    for step in range(1, 10):
        for lease in leases:
            core.allocate(lease, PAGE)
            core.commit(lease, step * PAGE, after=("forward", step))
        answer(core)
        assert len(core.state.jobs.open) <= 4
    for lease in leases:
        core.release(lease)
    core.take_effects()
    assert len(core.wire().rows) <= 4, "one drain for all of them"
    whole(core)


def test_an_event_is_kept_until_the_write_back_is_agreed_and_a_split_copies_it() -> None:
    core = make()
    lease = compute(core, A, "a", after="event")
    values(core, "write_back", 0)
    other = core.lease(Toks(range(17)), "b")  # splits, and asks again
    (again,) = of_type(core.take_effects(), StartWriteBack)
    assert (len(again.source) // 4, again.events) == (4, ("event",))
    settle(core)
    core.release(other)
    third = core.lease(A, "c")
    (rest,) = of_type(core.take_effects(), StartWriteBack)
    assert (len(rest.source) // 4, rest.events) == (6, ("event",))
    settle(core)
    assert all(node.events == () for node in core.state.tree.table.values())
    core.release(lease)
    core.release(third)
    whole(core)


def test_ancestors_first() -> None:
    """A commit below device-only pages asks for these before its own."""
    core = make()
    lease = core.lease(A, "a")
    core.allocate(lease, 41)
    core.commit(lease, 20)
    values(core, "write_back", 0)
    core.commit(lease, 40)
    (start,) = of_type(core.take_effects(), StartWriteBack)
    assert unpack_slots(start.source) == list(lease.pages[:10])
    core.release(lease)
    whole(core)


def test_a_failed_write_back_is_not_asked_again_by_a_timer() -> None:
    core = make()
    lease = compute(core, A, "a")
    values(core, "write_back", 4)
    answer(core)
    core.apply(10**6, [], [])
    effects = settle(core)
    assert not of_type(effects, StartWriteBack)
    assert pages_of(core.match(A)) == (10, 10, 10)
    core.release(lease)
    core.release(core.lease(A, "b"))
    (start,) = of_type(core.take_effects(), StartWriteBack)
    assert len(start.source) // 4 == 6
    whole(core)


def test_a_write_back_takes_the_first_pages_if_the_host_has_no_more() -> None:
    core = make(40, 7)
    lease = compute(core, A, "a")
    (start,) = of_type(core.take_effects(), StartWriteBack)
    assert unpack_slots(start.source) == list(lease.pages[:7])
    assert core.counts["write_back_refused_pages"] == 3
    settle(core)
    core.release(lease)
    clear_device(core)
    assert pages_of(core.match(A)) == (0, 0, 7)
    whole(core)


def test_making_room_does_not_take_the_path_s_own_host_pages() -> None:
    core = make(40, 10)
    lease = core.lease(A, "a")
    core.allocate(lease, 41)
    core.commit(lease, 20)
    settle(core)
    core.commit(lease, 40)
    settle(core)
    core.release(lease)
    clear_device(core)
    assert pages_of(core.match(A)) == (0, 0, 10)
    whole(core)


def test_a_backup_stops_at_the_first_failure_and_retries_the_rest() -> None:
    core = make(retry_delays_s=(1, 4, 16))
    lease = compute(core, A, "a")
    core.take_effects()
    values(core, "write_back", 10)
    values(core, "backup", 4)
    assert core.usage().stored_pages == 4
    assert core.usage().host.evictable_pages == 0, "pinned until RELEASED"
    settle(core)
    assert core.usage().host.evictable_pages == 10, "a retry pins nothing"
    for delay, due in ((1, 1000), (4, 5000), (16, 21000)):
        assert core.next_due_ms == due
        assert not core.needs_step, "a due retry does not ask for a step"
        core.apply(due - 1, [], [])
        assert not of_type(core.take_effects(), StartBackup)
        core.apply(due, [], [])
        core.check()
        (backup,) = of_type(core.take_effects(), StartBackup)
        assert [(path.first_page, path.pages) for path in backup.paths] == [(4, 6)], delay
        assert bytes(backup.paths[0].tokens) == bytes(A.packed)[: 40 * 8]
        values(core, "backup", 0)
        settle(core)
    assert core.next_due_ms is None
    assert core.counts["backup_given_up_pages"] == 6
    core.release(lease)
    whole(core)


def test_at_most_eight_retries_in_one_apply() -> None:
    core = make(100, 100)
    leases = [compute(core, Toks([n] * 9), f"r{n}") for n in range(12)]
    core.take_effects()
    values(core, "write_back", 24)
    values(core, "backup", 0)
    settle(core)
    core.apply(1000, [], [])
    (first,) = of_type(core.take_effects(), StartBackup)
    assert len(first.paths) == 8
    assert core.next_due_ms == 1000
    core.apply(1000, [], [])
    (second,) = of_type(core.take_effects(), StartBackup)
    assert len(second.paths) == 4
    settle(core)
    assert core.usage().stored_pages == 24
    for lease in leases:
        core.release(lease)
    whole(core)


def test_a_retry_takes_what_is_still_on_the_host() -> None:
    core = make(40, 12)
    lease = compute(core, A, "a")
    core.take_effects()
    values(core, "write_back", 10)
    values(core, "backup", 0)
    settle(core)
    core.release(lease)
    core.release(core.lease(Toks(range(17)), "split"))
    other = compute(core, Toks([7] * 24), "b")  # evicts the lower part from the host
    settle(core)
    core.check()
    core.apply(1000, [], [])
    (backup,) = of_type(core.take_effects(), StartBackup)
    assert [(path.first_page, path.pages) for path in backup.paths] == [(0, 4)]
    settle(core)
    core.release(other)
    whole(core)


def test_a_backup_starts_at_the_first_page_that_is_not_stored() -> None:
    """No hole: what an earlier backup could not store is taken along."""
    core = make(retry_delays_s=())
    lease = core.lease(A, "a")
    core.allocate(lease, 41)
    core.commit(lease, 20)
    core.take_effects()
    values(core, "write_back", 5)
    values(core, "backup", 2)  # given up at once
    settle(core)
    core.commit(lease, 40)
    effects = settle(core)
    (backup,) = of_type(effects, StartBackup)
    assert [(path.first_page, path.pages) for path in backup.paths] == [(2, 8)]
    assert core.usage().stored_pages == 10
    core.release(lease)
    whole(core)


def test_without_storage_nothing_is_backed_up() -> None:
    core = make(storage=False)
    lease = compute(core, A, "a")
    assert not of_type(settle(core), StartBackup)
    core.release(lease)
    whole(core)


def test_stored_pages_are_not_stored_again() -> None:
    core = make(12, 40)
    core.release(compute(core, A, "a"))
    settle(core)
    core.state.pins.lose(HOST, list(core.state.tree.table.values()))
    core.check()
    core.release(core.lease(A, "b"))
    effects = settle(core)
    assert of_type(effects, StartWriteBack)
    assert not of_type(effects, StartBackup)
    whole(core)


def test_a_failed_pass_is_told_of_twice() -> None:
    """By the drain that waits for it, and by the write-back: what is gone is not taken out again."""
    core = make(60, 60)
    lease = compute(core, A, "a", after="pass")
    core.release(lease)
    effects = core.take_effects()
    (saving,), (drain,) = of_type(effects, StartWriteBack), of_type(effects, StartDrain)
    core.apply(core.now_ms, [], [-drain.job])
    core.check()
    assert pages_of(core.match(A)) == (0, 0, 0)
    core.apply(core.now_ms, [(saving.job, Phase.RUN, encode_result(0, sound=False))], [])
    core.check()
    assert core.state.counts["uncomputed_pages"] == core.state.counts["write_back_failed_pages"] == 10
    settle(core)
    assert core.usage().device.limbo_pages == core.usage().host.limbo_pages == 0
    whole(core)


def test_a_range_that_hangs_below_one_of_a_failed_pass_goes_with_it() -> None:
    core = make(60, 60)
    leases = [compute(core, A, "a", after="pass"), compute(core, A.plus(range(100, 111)), "b", after="next pass")]
    (start,) = of_type(core.take_effects(), StartWriteBack)
    assert len(unpack_slots(start.source)) == 13
    core.apply(core.now_ms, [(start.job, Phase.RUN, encode_result(0, sound=False))], [])
    core.check()
    assert pages_of(core.match(A)) == (0, 0, 0)
    assert [lease.failed for lease in leases] == ["twin_failed", "load_failed"], (
        "the second has read what the first should have computed"
    )
    for lease in leases:
        core.release(lease)
    settle(core)
    assert core.usage().device.limbo_pages == core.usage().host.limbo_pages == 0
    whole(core)
