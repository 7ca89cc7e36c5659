"""Waiting for device pages: in order, holding nothing, with reservations that own their slots."""

from __future__ import annotations

import pytest

from hicache_actors.core import Core, CoreLease
from hicache_actors.core.reservation import CoreRoom
from hicache_actors.core.words import Committed, Shortfall, Wake
from hicache_actors.errors import UsageError

from .kit import PAGE, Toks, cached, host_only, make, settle, whole, woken

A = Toks(range(40))


def holder(core: Core, pages: int, rid: str) -> CoreLease:
    lease = core.lease(Toks([]), rid)
    assert core.allocate(lease, pages * PAGE) is None
    core.take_effects()
    return lease


def reserve(core: Core, pages: int) -> CoreRoom:
    waiter = core.room(pages * PAGE)
    room = woken(core.take_effects(), waiter)
    core.check()
    assert isinstance(room, CoreRoom)
    return room


def test_room_that_is_there_is_granted_at_the_end_of_its_section() -> None:
    core = make(device=10)
    room = reserve(core, 4)
    assert room.pages == 4
    usage = core.usage()
    assert (usage.device.free_pages, usage.device.owned_pages, usage.reserved_pages) == (6, 4, 4)
    core.leave_room(room.waiter)
    core.leave_room(room.waiter)  # idempotent
    core.check()
    assert core.usage().device.free_pages == 10
    whole(core)


def test_room_evicts_what_nobody_uses() -> None:
    core = make(device=10)
    cached(core, A)
    room = reserve(core, 10)
    assert core.match(A).device == 0
    core.leave_room(room.waiter)
    whole(core)


def test_who_waits_is_served_in_order() -> None:
    core = make(device=10)
    first, second = holder(core, 6, "a"), holder(core, 4, "b")
    big, small = core.room(8 * PAGE), core.room(1 * PAGE)
    assert core.take_effects() == []
    core.release(second)
    assert core.take_effects() == [], "four pages are free, and the first in the line needs eight"
    core.release(first)
    effects = core.take_effects()
    assert [effect.waiter for effect in effects if isinstance(effect, Wake)] == [big, small]
    assert core.usage().waiting_rooms == 0
    core.leave_room(big)
    core.leave_room(small)
    whole(core)


def test_while_one_waits_older_leases_pass_and_newer_ones_get_nothing() -> None:
    core = make(device=10, host=40)
    host_only(core, Toks(range(1000, 1013)))
    old = holder(core, 5, "old")
    waiter = core.room(6 * PAGE)
    assert core.take_effects() == []
    new = core.lease(Toks(range(1000, 1013)), "new")
    load = core.load(new)
    assert isinstance(load, Shortfall)
    assert (load.reason, load.missing_pages) == ("device_capacity", 3)
    refused = core.allocate(new, PAGE)
    assert isinstance(refused, Shortfall)
    assert (refused.reason, refused.missing_pages) == ("device_capacity", 1)
    assert core.allocate(new, 0) is None
    assert core.allocate(old, PAGE) is None, "older: it may be what the other waits for"
    core.release(old)
    assert isinstance(woken(core.take_effects(), waiter), CoreRoom)
    assert core.allocate(new, PAGE) is None, "nobody waits any more"
    core.release(new)
    core.leave_room(waiter)
    whole(core)


def test_an_acquire_while_one_waits_is_a_lease_without_loads() -> None:
    core = make(device=10, host=40)
    host_only(core, Toks(range(1000, 1013)))
    old = holder(core, 5, "old")
    waiting = core.room(6 * PAGE)
    waiter = core.acquire(Toks(range(1000, 1013)), "new")
    lease = woken(core.take_effects(), waiter)
    assert isinstance(lease, CoreLease)
    assert (lease.usable_tokens, lease.loads) == (0, [])
    assert lease.account.reasons["device_capacity"] == 12
    core.release(lease)
    core.leave_room(waiting)
    core.release(old)
    whole(core)


def test_an_acquire_takes_the_pages_of_its_reservation_first() -> None:
    core = make(device=10, host=40)
    host_only(core, Toks(range(1000, 1013)))
    room = reserve(core, 5)
    old = holder(core, 5, "old")
    waiting = core.room(PAGE)
    waiter = core.acquire(Toks(range(1000, 1013)), "r", room=room.waiter)
    lease = woken(core.take_effects(), waiter)
    assert isinstance(lease, CoreLease)
    assert lease.usable_tokens == 12
    assert room.pages == 2
    assert core.allocate(lease, PAGE) is None
    assert isinstance(core.allocate(lease, 2 * PAGE), Shortfall), "one is left of its own, and somebody waits"
    assert room.pages == 1
    core.check()
    core.leave_room(room.waiter)
    core.check()
    assert isinstance(woken(core.take_effects(), waiting), CoreRoom), "what was left goes to who waits"
    settle(core)
    assert core.commit(lease, 13) == Committed(0, 1)
    core.release(lease)
    core.release(old)
    core.leave_room(waiting)
    whole(core)


def test_a_reservation_that_was_left_before_its_acquire_gives_nothing() -> None:
    core = make(device=10)
    room = reserve(core, 10)
    waiter = core.acquire(A, "r", room=room.waiter)
    core.leave_room(room.waiter)
    lease = woken(core.take_effects(), waiter) if not core.state.jobs.open else woken(settle(core), waiter)
    assert isinstance(lease, CoreLease)
    core.release(lease)
    whole(core)


def test_what_can_never_be_is_answered_at_once() -> None:
    core = make(device=10)
    waiter = core.room(41 * PAGE)
    assert woken(core.take_effects(), waiter) == Shortfall("device_capacity", 31)
    for n_tokens, deadline_s in ((0, 1.0), (-1, 1.0), (4, -1.0)):
        with pytest.raises(UsageError, match="room"):
            core.room(n_tokens, deadline_s)
    whole(core)


def test_a_deadline_counts_from_the_apply_after_the_call() -> None:
    core = make(device=10)
    lease = holder(core, 10, "a")
    core.apply(1000, [], [])
    waiter, patient = core.room(PAGE, 0.5), core.room(PAGE)
    core.take_effects()
    assert core.needs_step, "only the clock ends it"
    assert core.next_due_ms == 1000, "the next apply starts it"
    core.apply(5000, [], [])
    assert core.take_effects() == []
    assert core.next_due_ms == 5500
    core.apply(5499, [], [])
    assert core.take_effects() == []
    core.apply(5500, [], [])
    late = woken(core.take_effects(), waiter)
    assert late == Shortfall("device_capacity", 1)
    assert not core.needs_step
    core.leave_room(waiter)
    core.release(lease)
    assert isinstance(woken(core.take_effects(), patient), CoreRoom)
    core.leave_room(patient)
    whole(core)


def test_room_that_comes_with_the_deadline_is_granted() -> None:
    core = make(device=10)
    lease = holder(core, 10, "a")
    waiter = core.room(PAGE, 0.5)
    core.take_effects()
    core.apply(0, [], [])
    core.apply(500, [], [], [lambda core: core.release(lease)])
    assert isinstance(woken(core.take_effects(), waiter), CoreRoom)
    core.leave_room(waiter)
    whole(core)


def test_one_in_the_middle_may_be_late_without_those_around_it() -> None:
    core = make(device=10)
    lease = holder(core, 10, "a")
    first, second, third = core.room(10 * PAGE), core.room(PAGE, 0.1), core.room(PAGE)
    core.take_effects()
    core.apply(0, [], [])
    core.apply(100, [], [])
    assert [effect.waiter for effect in core.take_effects() if isinstance(effect, Wake)] == [second]
    core.leave_room(first)  # it has gone away
    core.release(lease)
    assert isinstance(woken(core.take_effects(), third), CoreRoom)
    core.leave_room(third)
    whole(core)


def test_a_reset_keeps_reservations_and_a_degraded_cache_refuses() -> None:
    core = make(device=10)
    cached(core, A)
    room = reserve(core, 3)
    core.reset()
    core.check()
    assert core.usage().device.free_pages == 7
    waiter = core.room(8 * PAGE)
    assert core.take_effects() == []
    core.apply(0, [], [], alive=False)
    core.check()
    assert woken(core.take_effects(), waiter) == Shortfall("degraded", 8)
    lease = core.lease(A, "r", room=room.waiter)
    assert core.allocate(lease, 3 * PAGE) is None
    assert room.pages == 0
    core.release(lease)
    core.leave_room(room.waiter)
    whole(core)


def test_a_stream_of_small_requests_does_not_starve_a_large_one() -> None:
    core = make(device=10)
    running = [holder(core, 1, f"r{at}") for at in range(10)]
    waiter = core.room(10 * PAGE)
    for at in range(10, 200):
        core.release(running.pop(0))
        effects = core.take_effects()
        if any(isinstance(effect, Wake) for effect in effects):
            assert woken(effects, waiter).pages == 10
            break
        lease = core.lease(Toks([]), f"r{at}")
        if core.allocate(lease, PAGE) is None:
            running.append(lease)
        else:
            core.release(lease)
    else:
        raise AssertionError("it starved")
    core.leave_room(waiter)
    for lease in running:
        core.release(lease)
    whole(core)
