"""Single flight of writes: a key that is being written is not written a second time beside it.

Two backups want the same key when its pages have been computed anew while the first write runs: after a reset, or because the
first job missed its deadline.  The second waits for what becomes of the first.

Reads are not shared here.  Core joins requests that miss the same page to one prefetch, and two prefetches that do overlap (the
second was asked for after the first had been stopped or had hung) read into slots of their own: a shared read would have to be
copied, and would hang them both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from hicache_actors.backends.backend import Stored


class Flight:
    """One batch on its way.  ``mine``: indices of the keys that it writes; ``theirs``: of the others, on which flight they are."""

    def __init__(self, flying: dict[str, Flight], keys: Sequence[str]) -> None:
        self.mine: list[int] = []
        self.theirs: dict[int, Flight] = {}
        self.landed: asyncio.Future[Mapping[str, Stored]] = asyncio.get_running_loop().create_future()
        self._flying = flying
        self._own: list[str] = []
        for at, key in enumerate(keys):
            other = flying.get(key)
            if other is None:
                flying[key] = self
                self._own.append(key)
                self.mine.append(at)
            else:
                self.theirs[at] = other

    def land(self, outcomes: Mapping[str, Stored]) -> None:
        """What has become of its keys (FAILED, if nothing is said).  Idempotent: who was given up on may land again."""
        if self.landed.done():
            return
        self.landed.set_result(outcomes)
        for key in self._own:
            del self._flying[key]


class Flights:
    """The keys that are being written now, at one store.  Loop thread."""

    def __init__(self) -> None:
        self._flying: dict[str, Flight] = {}

    def start(self, keys: Sequence[str]) -> Flight:
        return Flight(self._flying, keys)
