"""How long reads take of late: the sign of a store under pressure."""

from __future__ import annotations

from typing import Final

_WEIGHT: Final = 0.25  #: of the newest reading
_STALE_S: Final = 10.0  #: after so long without a reading nobody knows


class Latency:
    """An exponential moving average, in seconds.  ``now_s`` is of any steady clock."""

    def __init__(self) -> None:
        self._average_s: float | None = None
        self._last_s = 0.0

    def add(self, seconds: float, now_s: float) -> None:
        before_s = self.average_s(now_s)
        self._average_s = seconds if before_s is None else before_s + _WEIGHT * (seconds - before_s)
        self._last_s = now_s

    def average_s(self, now_s: float) -> float | None:
        """None: no reading, or none of late; so a store that nobody reads is not held to be slow for ever."""
        return self._average_s if now_s - self._last_s < _STALE_S else None
