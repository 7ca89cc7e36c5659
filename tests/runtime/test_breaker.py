"""The circuit breaker, by the clock of the test."""

from __future__ import annotations

from hicache_actors.runtime.breaker import Breaker, BreakerState


class Clocked:
    """A breaker that opens after 2 failures, for 1 s, then 2, 4, at most 5."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.transitions: list[tuple[BreakerState, BreakerState]] = []
        self.breaker = Breaker(
            failures=2,
            delay_s=1.0,
            max_delay_s=5.0,
            now_s=self.now_s,
            changed=lambda *pair: self.transitions.append(pair),
        )

    def call(self, error: str | None) -> bool:
        """-> whether it was made."""
        if self.breaker.refuses(self.now_s):
            return False
        probe = self.breaker.begin(self.now_s)
        if error is None:
            self.breaker.succeeded(self.now_s, probe=probe)
        else:
            self.breaker.failed(self.now_s, error, probe=probe)
        return True


def test_it_opens_after_failures_in_a_row_only() -> None:
    at = Clocked()
    for error in ("a", None, "b", None, "c"):
        assert at.call(error)
    assert at.breaker.state == "closed"
    assert at.call("d")
    assert at.transitions == [("closed", "open")]
    assert not at.call(None)
    assert at.breaker.last_error == "d"


def test_after_the_delay_one_call_tries_and_closes_it() -> None:
    at = Clocked()
    at.call("a"), at.call("b")
    at.now_s += 0.999
    assert not at.call(None)
    at.now_s += 0.001
    assert not at.breaker.refuses(at.now_s)
    assert at.breaker.begin(at.now_s)
    assert at.breaker.refuses(at.now_s)  # one tries, the others do not wait for it
    at.breaker.succeeded(at.now_s, probe=True)
    assert at.transitions == [("closed", "open"), ("open", "half_open"), ("half_open", "closed")]
    assert at.call("c")
    assert at.breaker.state == "closed"  # it counts anew


def test_each_failed_try_doubles_the_delay_up_to_the_maximum() -> None:
    at = Clocked()
    at.call("a"), at.call("b")
    for delay_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        snapshot = at.breaker.snapshot(at.now_s)
        assert (snapshot.state, snapshot.retry_in_s) == ("open", delay_s)
        at.now_s += delay_s - 0.01
        assert not at.call("too early")
        at.now_s += 0.01
        assert at.call("still down")
    at.now_s += 5.0
    assert at.call(None)
    at.call("c"), at.call("d")
    assert at.breaker.snapshot(at.now_s).retry_in_s == 1.0  # once closed, it begins anew


def test_late_news_of_calls_that_began_before_changes_nothing() -> None:
    at = Clocked()
    at.call("a"), at.call("b")
    at.breaker.succeeded(at.now_s, probe=False)
    assert at.breaker.snapshot(at.now_s).state == "open"
    at.breaker.failed(at.now_s, "late", probe=False)
    assert at.breaker.snapshot(at.now_s).opened == 1
    at.now_s += 1.0
    assert at.breaker.begin(at.now_s)
    at.breaker.succeeded(at.now_s, probe=False)
    assert at.breaker.state == "half_open"
    at.breaker.failed(at.now_s, "late", probe=False)
    assert at.breaker.state == "half_open"


def test_a_try_that_says_nothing_lets_the_next_one_try() -> None:
    at = Clocked()
    at.call("a"), at.call("b")
    at.now_s += 1.0
    assert at.breaker.begin(at.now_s)
    at.breaker.dropped(probe=True)
    assert not at.breaker.refuses(at.now_s)
    assert at.call(None)
    assert at.breaker.state == "closed"


def test_the_snapshot_says_since_when_and_why() -> None:
    at = Clocked()
    at.now_s += 7.0
    assert at.breaker.snapshot(at.now_s).state_s == 7.0
    at.call("a"), at.call("b")
    at.now_s += 0.25
    snapshot = at.breaker.snapshot(at.now_s)
    assert (snapshot.state, snapshot.state_s, snapshot.retry_in_s) == ("open", 0.25, 0.75)
    assert (snapshot.failures, snapshot.opened, snapshot.last_error) == (2, 1, "b")
