"""The auto driver with a Core that records and a loop of a few lines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from hicache_actors.core.words import Effect, Forget, Phase, StartLoad, encode_result
from hicache_actors.errors import TransferError, UsageError
from hicache_actors.ranks import AutoDriver, Board

from .fakes import FakeCore, FakeWire

START = StartLoad(1, "r", b"", b"")


class Rig:
    def __init__(self) -> None:
        self.core, self.board = FakeCore(), Board()
        self.now_ms = 0
        self.ready: list[Callable[[], None]] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.executed: list[list[Effect]] = []
        self.failures: list[BaseException] = []
        self.driver = AutoDriver(
            self.core,
            self.board,
            lambda: self.now_ms,
            self.executed.append,
            self.ready.append,
            self.later,
            on_failure=self.failures.append,
        )

    def later(self, delay_s: float, fn: Callable[[], None]) -> Callable[[], None]:
        timer = (delay_s, fn)
        self.timers.append(timer)
        return lambda: self.timers.remove(timer)

    def call(self, *effects: Effect) -> None:
        with self.driver.section():
            self.core.effects += effects

    def turn(self) -> int:
        """One turn of the loop; -> how many callbacks ran."""
        ready, self.ready[:] = list(self.ready), []
        for fn in ready:
            fn()
        return len(ready)

    def fire_timer(self) -> None:
        delay_s, fn = self.timers.pop(0)
        self.now_ms += int(delay_s * 1000)
        fn()


def open_load(rig: Rig) -> None:
    rig.core.map = FakeWire(slots=((1, Phase.RUN),))
    rig.call(START)


def test_each_call_is_a_section_whose_effects_start_at_once() -> None:
    rig = Rig()
    open_load(rig)
    assert rig.executed == [[START]]
    assert rig.driver.applies == 0
    assert rig.turn() == 0, "an open job alone does not wake the loop"
    rig.call()
    assert rig.executed == [[START]]


def test_calls_together_are_one_section() -> None:
    rig = Rig()
    with rig.driver.together():
        rig.call(START)
        rig.call(Forget(1))
        rig.driver.defer(lambda core: core.calls.append("release"))
        rig.driver.catch_up()
        assert rig.executed == []
        assert rig.core.calls == ["release"]
        with pytest.raises(UsageError, match="already open"), rig.driver.together():
            raise AssertionError("not reached")
    assert rig.executed == [[START, Forget(1)]]
    rig.call(START)
    assert rig.executed == [[START, Forget(1)], [START]]


def test_an_error_among_calls_together_breaks_core_only_if_it_is_of_core() -> None:
    rig = Rig()
    with pytest.raises(KeyError), rig.driver.together():
        raise KeyError("of the engine")
    assert not rig.core.degraded
    with pytest.raises(KeyError), rig.driver.together(), rig.driver.section():
        raise KeyError("of Core")
    assert rig.core.degraded


def test_many_answers_are_applied_in_one_turn() -> None:
    rig = Rig()
    open_load(rig)
    rig.core.map = FakeWire(slots=((1, Phase.RUN), (2, Phase.RUN)))
    rig.board.open(2)
    rig.board.done(1, Phase.RUN, encode_result(3))
    rig.board.done(2, Phase.RUN, encode_result(4))
    rig.driver.post(lambda core: core.calls.append("intent"))
    assert rig.turn() == 1
    assert rig.core.calls == ["intent"]
    assert rig.core.applied[0].values == [(1, Phase.RUN, encode_result(3)), (2, Phase.RUN, encode_result(4))]


class LimboCore(FakeCore):
    """A job whose RESULT is applied is in limbo from then on, in the same apply."""

    def apply(self, now_ms: int, values: Any, released: Any, *rest: Any) -> None:
        if values:
            self.map = FakeWire(rows=tuple(job for job, _, _ in values))
        super().apply(now_ms, values, released, *rest)


def test_a_result_and_the_release_behind_it_are_one_apply() -> None:
    rig = Rig()
    rig.core = rig.driver.core = LimboCore()
    open_load(rig)
    rig.board.done(1, Phase.RUN, encode_result(3))
    rig.board.released(1)
    assert rig.turn() == 1
    assert rig.core.applied == [(0, [(1, Phase.RUN, encode_result(3))], [1], True)]


def test_what_found_no_place_waits_for_the_next_turn() -> None:
    rig = Rig()
    open_load(rig)
    rig.board.done(1, Phase.RUN, encode_result(3))
    rig.board.released(1)
    assert rig.turn() == 1
    assert rig.core.applied[0].released == []
    rig.core.map = FakeWire(rows=(1,))  # what the apply would have done
    assert rig.turn() == 1
    assert rig.core.applied[1].released == [1]
    rig.core.map = FakeWire()
    rig.call(Forget(1))
    rig.turn()
    assert rig.turn() == 0


def test_a_due_time_wakes_by_one_timer() -> None:
    rig = Rig()
    rig.core.next_due_ms = 500
    rig.call()
    rig.call()
    assert [delay_s for delay_s, _ in rig.timers] == [0.5]
    rig.core.next_due_ms = 200
    rig.call()
    assert [delay_s for delay_s, _ in rig.timers] == [0.2]
    rig.fire_timer()
    rig.core.next_due_ms = 200
    assert rig.turn() == 1
    assert rig.core.applied[-1].now_ms == 200
    rig.core.next_due_ms = None
    rig.call()
    assert rig.timers == []


def test_a_timer_that_fires_early_is_armed_again() -> None:
    rig = Rig()
    rig.core.next_due_ms = 500
    rig.call()
    rig.timers.pop(0)[1]()
    rig.now_ms = 499
    rig.turn()
    assert rig.driver.applies == 0
    assert [delay_s for delay_s, _ in rig.timers] == [pytest.approx(0.001)]


def test_answers_and_intents_of_other_threads_wake_the_loop_once() -> None:
    rig = Rig()
    open_load(rig)

    def foreign() -> None:
        rig.board.done(1, Phase.RUN, encode_result(2))
        rig.driver.post(lambda core: core.calls.append("posted"))
        with pytest.raises(UsageError), rig.driver.section():
            rig.core.calls.append("never")

    thread = threading.Thread(target=foreign)
    thread.start()
    thread.join()
    assert rig.turn() == 1
    assert rig.core.calls == ["posted"]
    assert rig.driver.applies == 1


def test_releases_run_at_once() -> None:
    rig = Rig()
    rig.driver.defer(lambda core: core.calls.append("outside"))
    with rig.driver.section():
        rig.driver.defer(lambda core: core.calls.append("inside"))
        with pytest.raises(UsageError, match="already open"), rig.driver.section():
            rig.core.calls.append("never")
    assert rig.core.calls == ["outside", "inside"]


def test_dead_movers_degrade_in_the_next_turn() -> None:
    rig = Rig()
    rig.driver.fail(TransferError("gone"))
    assert not rig.core.degraded
    rig.turn()
    assert rig.core.degraded
    assert rig.turn() == 0
    assert len(rig.failures) == 1


def test_an_exception_inside_core_degrades_at_once_and_passes() -> None:
    rig = Rig()
    with pytest.raises(KeyError), rig.driver.section():
        raise KeyError("bug")
    assert rig.core.degraded
    rig.core.error = ValueError("bug in apply")
    rig.driver.post(lambda core: None)
    rig.turn()
    assert [type(exc) for exc in rig.failures] == [KeyError]


def test_after_close_nothing_is_applied() -> None:
    rig = Rig()
    rig.core.next_due_ms = 100
    open_load(rig)
    rig.board.done(1, Phase.RUN, 1)
    rig.driver.close()
    rig.turn()
    rig.driver.post(lambda core: None)
    assert (rig.driver.applies, rig.timers, rig.turn()) == (0, [], 0)
