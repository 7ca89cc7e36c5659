"""What has moved in each direction: pages, bytes and time, once per job."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from hicache_actors.pipelines.observer import BatchKind
from hicache_actors.runtime import Histogram, HistogramSnapshot

DIRECTIONS: Final[tuple[BatchKind, ...]] = ("load", "write_back", "backup", "prefetch")
BOUNDS_S: Final = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class FlowSnapshot(msgspec.Struct, frozen=True):
    """``bytes`` of KV, without headers.  ``seconds`` per job, from the first moment that it could move bytes to its RESULT."""

    pages: int
    bytes: int
    seconds: HistogramSnapshot


class Flow:
    def __init__(self) -> None:
        self._pages = self._bytes = 0
        self._seconds = Histogram(BOUNDS_S)

    def ended(self, pages: int, nbytes: int, since_s: float) -> None:
        """A job has moved ``pages`` (maybe 0: it failed); ``since_s`` is when it began, on the loop's clock."""
        self._pages += pages
        self._bytes += nbytes
        self._seconds.add(asyncio.get_running_loop().time() - since_s)

    def snapshot(self) -> FlowSnapshot:
        return FlowSnapshot(self._pages, self._bytes, self._seconds.snapshot())


class Flows:
    def __init__(self) -> None:
        self._flows = {direction: Flow() for direction in DIRECTIONS}

    def __getitem__(self, direction: BatchKind) -> Flow:
        return self._flows[direction]

    def snapshot(self) -> Mapping[BatchKind, FlowSnapshot]:
        return {direction: flow.snapshot() for direction, flow in self._flows.items()}
