"""The threads that a store's backend works in: a pool for each direction, so that hung writes never block reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from typing import TypeVar, TypeVarTuple

from hicache_actors.runtime import Workers, WorkersSnapshot
from hicache_actors.tiers.storage.words import Direction

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

direction_of_call: ContextVar[Direction] = ContextVar("direction_of_call", default="query")
"""Set by the tier in the task of each call.  So a backend knows nothing of pools: it asks the `Workers` that it was given."""


class StoreThreads(Workers):
    """The pool of lookups and of all that belongs to no call (open, close); calls that read and calls that write have their own."""

    def __init__(self, sizes: Mapping[Direction, int]) -> None:
        super().__init__("storage-query", sizes["query"])
        self._others: dict[Direction, Workers] = {
            direction: Workers(f"storage-{direction}", size)
            for direction, size in sizes.items()
            if direction != "query"
        }

    def submit(self, fn: Callable[[*Ts], T], *args: *Ts) -> Future[T]:
        other = self._others.get(direction_of_call.get())
        return super().submit(fn, *args) if other is None else other.submit(fn, *args)

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts, on_end: Callable[[], object] | None = None) -> T:
        other = self._others.get(direction_of_call.get())
        running = super().run(fn, *args, on_end=on_end) if other is None else other.run(fn, *args, on_end=on_end)
        return await running

    def snapshots(self) -> tuple[WorkersSnapshot, ...]:
        return (self.snapshot(), *(other.snapshot() for other in self._others.values()))

    def close(self, timeout_s: float = 0.0) -> tuple[str, ...]:
        left = super().close(timeout_s)
        return left + tuple(name for other in self._others.values() for name in other.close(timeout_s))

    async def aclose(self, timeout_s: float) -> tuple[str, ...]:
        pools = (super().aclose(timeout_s), *(other.aclose(timeout_s) for other in self._others.values()))
        return tuple(name for left in await asyncio.gather(*pools) for name in left)
