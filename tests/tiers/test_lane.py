"""One direction: whose turn it is, what may be under way, what hangs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hicache_actors.runtime.breaker import Breaker
from hicache_actors.testing.loop import run_virtual
from hicache_actors.tiers.storage.call import Call
from hicache_actors.tiers.storage.lane import Lane
from hicache_actors.tiers.storage.words import Refusal


class Watched:
    """A lane, and what it has refused."""

    def __init__(self, concurrency: int = 2, limit_bytes: int | None = 100, max_hung: int = 2, **hooks: Any) -> None:
        self.refused: list[Refusal] = []
        breaker = Breaker(failures=99, delay_s=1, max_delay_s=1, now_s=0, changed=lambda *_: None)
        self.lane = Lane(
            concurrency=concurrency,
            limit_bytes=limit_bytes,
            max_hung=max_hung,
            breaker=breaker,
            refused=self.refused.append,
            **hooks,
        )

    def enter(self, nbytes: int = 10, priority: int = 0) -> Call[int]:
        call = Call("read", 0, nbytes=nbytes, priority=priority)
        self.lane.enter(call)
        return call


def begun(*calls: Call[int]) -> list[bool]:
    return [call.turn.done() and call.turn.result() for call in calls]


def in_loop(test: Any) -> Any:
    """Futures belong to a loop."""

    def run() -> None:
        async def main() -> None:
            test()

        run_virtual(main)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_loop
def test_as_many_at_once_as_may_be_then_by_age() -> None:
    at = Watched(concurrency=2)
    calls = [at.enter() for _ in range(4)]
    assert begun(*calls) == [True, True, False, False]
    at.lane.leave(calls[1])
    assert begun(*calls) == [True, True, True, False]


@in_loop
def test_a_higher_priority_goes_first_and_age_decides_among_equals() -> None:
    at = Watched(concurrency=1)
    first = at.enter()
    low, high, higher, high_too = at.enter(priority=0), at.enter(priority=5), at.enter(priority=9), at.enter(priority=5)
    order = []
    current = first
    waiting = {"low": low, "high": high, "higher": higher, "high_too": high_too}
    while waiting:
        at.lane.leave(current)
        (name,) = [name for name, call in waiting.items() if call.turn.done()]
        current = waiting.pop(name)
        order.append(name)
    assert order == ["higher", "high", "high_too", "low"]


@in_loop
def test_bytes_under_way_are_bounded_and_a_large_call_runs_alone() -> None:
    at = Watched(concurrency=9, limit_bytes=100)
    first, second, third = at.enter(60), at.enter(50), at.enter(10)
    assert begun(first, second, third) == [True, False, False]  # nobody overtakes within a priority
    at.lane.leave(first)
    assert begun(second, third) == [True, True]
    large = at.enter(1000)
    at.lane.leave(second)
    assert begun(large) == [False]
    at.lane.leave(third)
    assert begun(large) == [True]
    assert begun(at.enter(1)) == [False]


@in_loop
def test_a_hung_call_gives_its_place_and_credits_back() -> None:
    at = Watched(concurrency=1, limit_bytes=100)
    first, second = at.enter(100), at.enter(100)
    at.lane.overdue(first)
    assert begun(second) == [True]
    shown = at.lane.snapshot(0)
    assert (shown.running_calls, shown.in_flight_bytes, shown.hung_calls, shown.hung_bytes) == (1, 100, 1, 100)
    at.lane.leave(first)
    assert at.lane.snapshot(0).hung_calls == 0


@in_loop
def test_too_many_hung_calls_shut_the_lane_until_one_returns() -> None:
    at = Watched(concurrency=2, max_hung=2)
    calls = [at.enter() for _ in range(5)]
    at.lane.overdue(calls[0])
    assert begun(*calls) == [True, True, True, False, False]
    at.lane.overdue(calls[1])
    assert at.lane.shut
    assert at.refused == ["hung", "hung"]
    assert [call.turn.result() for call in calls[3:]] == [False, False]
    at.lane.leave(calls[0])
    assert not at.lane.shut
    assert begun(at.enter()) == [True]


@in_loop
def test_a_call_that_waits_can_be_withdrawn_and_one_that_runs_cannot() -> None:
    at = Watched(concurrency=1)
    first, second, third = at.enter(), at.enter(), at.enter()
    at.lane.withdraw(second)
    assert not second.turn.result()
    at.lane.withdraw(first)
    assert begun(third) == [False]
    at.lane.leave(first)
    assert begun(third) == [True]
    assert at.lane.snapshot(0).waiting_bytes == 0


@in_loop
def test_a_lane_that_yields_runs_one_call_at_a_time() -> None:
    busy = True
    at = Watched(concurrency=3, yields=lambda: busy)
    calls = [at.enter() for _ in range(3)]
    assert begun(*calls) == [True, False, False]
    busy = False
    at.lane.pump()
    assert begun(*calls) == [True, True, True]


@in_loop
def test_what_may_wait_is_bounded_by_bytes() -> None:
    at = Watched(concurrency=1, limit_bytes=100)
    at.enter(100)
    assert not at.lane.overflows(500)  # somebody may always wait
    at.enter(60)
    assert not at.lane.overflows(40)
    assert at.lane.overflows(41)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_counted_twice_or_beyond_its_limit(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        at = Watched(concurrency=3, limit_bytes=100, max_hung=3)
        calls: list[Call[int]] = []
        for _ in range(400):
            running = [call for call in calls if call.state == "running"]
            hung = [call for call in calls if call.state == "hung"]
            waiting = [call for call in calls if call.state == "waiting"]
            match rng.randrange(5):
                case 0 | 1 if not at.lane.shut:
                    calls.append(at.enter(rng.randrange(1, 130), rng.randrange(3)))
                case 2 if running:
                    at.lane.leave(rng.choice(running))
                case 3 if hung or running:
                    call = rng.choice([*hung, *running])
                    at.lane.overdue(call) if call.state == "running" else at.lane.leave(call)
                case 4 if waiting:
                    at.lane.withdraw(rng.choice(waiting))
            shown = at.lane.snapshot(0)
            states = [call.state for call in calls]
            assert shown.running_calls == states.count("running") <= 3
            assert shown.hung_calls == states.count("hung") <= 3 + 2
            assert shown.waiting_calls == states.count("waiting")
            assert shown.hung_bytes == sum(call.nbytes for call in calls if call.state == "hung")
            assert shown.waiting_bytes == sum(call.nbytes for call in calls if call.state == "waiting")
            assert shown.in_flight_bytes == sum(call.nbytes for call in calls if call.state == "running")
            assert shown.running_calls <= 1 or shown.in_flight_bytes <= 100
            assert shown.waiting_calls == 0 or shown.running_calls > 0, "work waits for nothing"
        for call in calls:
            at.lane.leave(call)
        shown = at.lane.snapshot(0)
        assert (shown.in_flight_bytes, shown.waiting_bytes, shown.hung_bytes) == (0, 0, 0)

    run_virtual(main)
