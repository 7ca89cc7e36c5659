"""`HiCache.events`: which pages come to which tier, and leave it."""

from __future__ import annotations

from typing import Protocol

from hicache_actors.cache.assembly import Parts
from hicache_actors.errors import UsageError
from hicache_actors.events import Subscription
from hicache_actors.events.stream import QUEUE_BATCHES


class OpenCache(Protocol):
    """What this verb needs of the cache."""

    _parts: Parts

    def _check_open(self) -> None: ...


class EventVerbs:
    """Loop thread only."""

    def events(self: OpenCache, *, after: int | None = None, queue_batches: int = QUEUE_BATCHES) -> Subscription:
        """Which pages come to which tier, and leave it: an async iterator of `EventBatch`, for whoever keeps an index of its own.

        It begins with a snapshot of all that is there; with ``after``, the id of a batch, it goes on behind that one if what
        followed is still kept (the last 1,024 batches).  A subscriber for which more than ``queue_batches`` wait loses them, and
        gets a snapshot that says how many.  It ends when the cache closes.  The loop; with driver="step" it begins in the
        next step, and with ranks any rank may be asked.

        Raises `UsageError` for a queue without room.
        """
        self._check_open()
        if queue_batches < 1:
            raise UsageError(f"queue_batches = {queue_batches}: at least 1")
        return self._parts.events.subscribe(after, queue_batches)
