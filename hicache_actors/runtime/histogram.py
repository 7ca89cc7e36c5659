"""A histogram of seconds: a few additions per value, no samples kept."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec


class HistogramSnapshot(msgspec.Struct, frozen=True):
    """``counts[i]``: values <= ``bounds_s[i]`` and above the bound before; one more count for what exceeds the last bound."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float
    max_s: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile_s(self, q: float) -> float:
        """The bound below which a share ``q`` of the values lies (the maximum for the last bucket); 0 without values."""
        wanted, seen = q * self.count, 0
        for bound, count in zip(self.bounds_s, self.counts, strict=False):
            seen += count
            if seen and seen >= wanted:
                return min(bound, self.max_s)
        return self.max_s


class Histogram:
    """One writer; `snapshot` may be taken on any thread."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds = tuple(bounds_s)
        if list(self._bounds) != sorted(set(self._bounds)):
            raise ValueError(f"bounds_s = {bounds_s!r}: must rise")
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = self._max = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds
        self._max = max(self._max, seconds)

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._sum, self._max)
