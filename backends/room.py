"""Room for what is to be written: eviction in bounded pieces, off the loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio

from hicache_actors.backends.evictor import Evictor
from hicache_actors.backends.folder import Folder
from hicache_actors.backends.ledger import N_ROWS

_SCANS_PER_HOP: Final = 16
_ELECTION_S: Final = 2.0
_ELECTION_POLL_S: Final = 0.01
_SLACK_PART: Final = 64  # of the cap is freed at once, and
_SLACK_BYTES: Final = 2**30  # at most so much


class Room:
    """On the loop.  ``run(fn, *args)`` awaits a blocking call; ``counts`` is told what has gone."""

    def __init__(self, folder: Folder, run: Callable[..., Awaitable[Any]], counts: Counter[str]) -> None:
        self._folder = folder
        self._run = run
        self._counts = counts
        self._evictor = Evictor(folder)
        self._lock = anyio.Lock()

    async def make(self, wanted_bytes: int) -> bool:
        """Evict until there is room, as the one evictor of the folder, or wait for the work of who is.

        -> False if there is nothing left to evict, or the evictor hangs.  After True others may still have been faster.
        """
        until_s = anyio.current_time() + _ELECTION_S
        async with self._lock:
            while await self._run(self._folder.ledger.excess, wanted_bytes):
                if await self._run(self._evictor.elect):
                    try:
                        return await self._evict(wanted_bytes)
                    finally:
                        self._evictor.resign()
                if anyio.current_time() > until_s:
                    return False
                await anyio.sleep(_ELECTION_POLL_S)
            return True

    async def _evict(self, wanted_bytes: int) -> bool:
        """A bounded piece of work per hop.  Goes on beyond what is wanted, so that the next batches find room."""
        slack_bytes = min((self._folder.ledger.limits.max_bytes or 0) // _SLACK_PART, _SLACK_BYTES)
        fruitless = 0
        while fruitless * _SCANS_PER_HOP < 2 * N_ROWS:
            step = await self._run(self._evictor.free, max(wanted_bytes, slack_bytes), _SCANS_PER_HOP)
            self._counts["evicted"] += step.objects
            self._counts["evicted_bytes"] += step.bytes
            if not step.excess_bytes:
                return True
            if step.exhausted:
                break
            fruitless = 0 if step.objects else fruitless + 1
        return not await self._run(self._folder.ledger.excess, wanted_bytes)
