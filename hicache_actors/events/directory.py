"""The other end of the events: who holds which page.  What a router keeps for each of its instances."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_actors.events.batches import TIERS, EventBatch, PagesRemoved, PagesStored, TierName, TiersCleared


class Directory:
    """Page hashes by tier, as told by the batches of one cache, applied in order.  No thread safety, no torch, no event loop."""

    def __init__(self) -> None:
        self.pages: dict[TierName, set[bytes]] = {tier: set() for tier in TIERS}
        self.seen: int | None = None  #: id of the last batch: `HiCache.events(after=seen)` goes on from there

    def apply(self, batch: EventBatch) -> None:
        """Take in the next batch.

        :raises ValueError: batches are missing between the last one and this: start again from a snapshot.
        """
        first = batch.events[0]
        begins = isinstance(first, TiersCleared) and first.cause in ("snapshot", "lost")
        if not begins and batch.after != self.seen:
            raise ValueError(f"batch {batch.id} follows {batch.after}, and {self.seen} was the last one here")
        for event in batch.events:
            match event:
                case PagesStored():
                    self.pages[event.tier].update(event.hashes)
                case PagesRemoved():
                    self.pages[event.tier].difference_update(event.hashes)
                case TiersCleared():
                    for tier in event.tiers:
                        self.pages[tier].clear()
        self.seen = batch.id

    def leading(self, hashes: Sequence[bytes], *tiers: TierName) -> int:
        """How many of ``hashes``, from the first on, are on one of ``tiers`` (default: on any)."""
        held = [self.pages[tier] for tier in tiers or TIERS]
        for count, page in enumerate(hashes):
            if not any(page in pages for pages in held):
                return count
        return len(hashes)
