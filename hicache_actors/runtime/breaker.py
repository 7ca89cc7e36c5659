"""A circuit breaker: who has failed several times in a row is not asked for a while, then tried with one call.

closed --n failures in a row--> open --after the delay, by the next call--> half open --that call ends well--> closed
                                 ^-----------------that call fails: the delay doubles---------|
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

BreakerState: TypeAlias = Literal["closed", "open", "half_open"]


class BreakerSnapshot(msgspec.Struct, frozen=True):
    """``state_s``: for so long.  ``failures``: in a row.  ``opened``: how often it has.  ``retry_in_s``: until a call may try."""

    state: BreakerState
    state_s: float
    failures: int
    opened: int
    retry_in_s: float | None
    last_error: str | None


class Breaker:
    """Pure: the caller says what time it is (seconds, any steady clock) and what has become of its calls.

    ``changed(old state, new state)`` is called once for each transition.
    """

    def __init__(
        self,
        *,
        failures: int,
        delay_s: float,
        max_delay_s: float,
        now_s: float,
        changed: Callable[[BreakerState, BreakerState], object],
    ) -> None:
        self.state: BreakerState = "closed"
        self.last_error: str | None = None
        self._limit, self._first_delay_s, self._max_delay_s = failures, delay_s, max_delay_s
        self._changed = changed
        self._since_s = now_s
        self._delay_s = delay_s
        self._failures = self._opened = 0
        self._probing = False

    def refuses(self, now_s: float) -> bool:
        """Whether a call made now would be refused."""
        if self.state == "open":
            return now_s < self._since_s + self._delay_s
        return self.state == "half_open" and self._probing

    def begin(self, now_s: float) -> bool:
        """A call that is not refused begins -> whether it is the probe; its end is reported by one of the methods below."""
        if self.state == "closed":
            return False
        if self.state == "open":
            self._to("half_open", now_s)
        self._probing = True
        return True

    def succeeded(self, now_s: float, *, probe: bool) -> None:
        """Late news of a call that began before the breaker opened changes nothing."""
        if probe:
            self._probing = False
            self._delay_s = self._first_delay_s
            self._to("closed", now_s)
        if self.state == "closed":
            self._failures = 0

    def failed(self, now_s: float, error: str, *, probe: bool) -> None:
        self.last_error = error
        if probe:
            self._probing = False
            self._failures += 1
            self._delay_s = min(2 * self._delay_s, self._max_delay_s)
            self._to("open", now_s)
        elif self.state == "closed":
            self._failures += 1
            if self._failures >= self._limit:
                self._to("open", now_s)

    def dropped(self, *, probe: bool) -> None:
        """The call has said nothing about the store."""
        if probe:
            self._probing = False

    def snapshot(self, now_s: float) -> BreakerSnapshot:
        retry_in_s = max(0.0, self._since_s + self._delay_s - now_s) if self.state == "open" else None
        return BreakerSnapshot(
            self.state, now_s - self._since_s, self._failures, self._opened, retry_in_s, self.last_error
        )

    def _to(self, state: BreakerState, now_s: float) -> None:
        old, self.state, self._since_s = self.state, state, now_s
        self._opened += state == "open"
        self._changed(old, state)
