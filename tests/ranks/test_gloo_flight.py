"""A gloo operation is told of before it is over: what a waiter may conclude in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from hicache_actors.errors import PeerError
from hicache_actors.ranks.gloo import _Flight


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


def flight_of(work: Any) -> _Flight[str]:
    return _Flight(work, lambda: "read")


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


def test_a_failure_is_a_peers() -> None:
    work = SlowlyEnding(error="Connection closed by peer\nmore")
    work.end()
    with pytest.raises(PeerError, match=r"^Connection closed by peer$"):
        flight_of(work).result(1.0)
