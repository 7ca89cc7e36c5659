"""A gloo operation is told of before it is over: what a waiter may conclude in between.  And how soundly gloo sleeps."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from hicache_actors.errors import PeerError
from hicache_actors.ranks.gloo import _GET_TIMERSLACK, _SLACK_NS, _Flight, _sound_sleep


class SlowlyEnding:
    """As gloo's thread does it: the future's callbacks first, the end of the work later."""

    def __init__(self, error: str | None = None) -> None:
        self._error = error
        self._callbacks: list[Callable[[object], None]] = []
        self._ended = threading.Event()

    def get_future(self) -> SlowlyEnding:
        return self

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self._callbacks.append(callback)

    def tell(self) -> None:
        for callback in self._callbacks:
            callback(self)

    def end(self) -> None:
        self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(self._error)
        return True


def flight_of(work: Any, deadline_s: float = 60.0) -> _Flight[str]:
    return _Flight(work, "read", deadline_s)


def test_what_has_been_told_of_is_not_late_however_long_its_last_moment_takes() -> None:
    work = SlowlyEnding()
    flight = flight_of(work)
    flight.when_done(threading.Timer(0.1, work.end).start)
    work.tell()
    assert flight.result(0.001) == "read"


def test_an_end_that_comes_as_the_wait_gives_up_counts() -> None:
    class EndsAsItGivesUp(SlowlyEnding):
        def wait(self, timeout: timedelta | None = None) -> bool:
            if timeout is None:
                return super().wait()
            self.end()
            raise RuntimeError("Operation timed out!")

    assert flight_of(EndsAsItGivesUp()).result(0.001) == "read"


def test_what_has_not_ended_is_late_and_may_be_asked_again() -> None:
    work = SlowlyEnding()
    flight = flight_of(work)
    with pytest.raises(TimeoutError):
        flight.result(0.001)
    work.end()
    assert flight.result(0.001) == "read"


def test_the_deadline_of_the_operation_counts_from_its_start() -> None:
    flight = flight_of(SlowlyEnding(), deadline_s=0.001)
    with pytest.raises(TimeoutError):
        flight.result(600.0)


def test_a_failure_is_a_peers() -> None:
    work = SlowlyEnding(error="Connection closed by peer\nmore")
    work.end()
    with pytest.raises(PeerError, match=r"^Connection closed by peer$"):
        flight_of(work).result(1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels have no timer slack")
def test_threads_of_gloo_may_oversleep_and_no_others() -> None:
    def slack_ns() -> int:
        found: int = ctypes.CDLL(None).prctl(_GET_TIMERSLACK, 0, 0, 0, 0)
        return found

    inherited: list[int] = []
    usual_ns = slack_ns()
    with _sound_sleep():
        thread = threading.Thread(target=lambda: inherited.append(slack_ns()))
        thread.start()
        thread.join()
    assert inherited == [_SLACK_NS]
    assert slack_ns() == usual_ns < _SLACK_NS
