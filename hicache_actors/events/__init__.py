"""Which pages came to which tier, and left it: for routers and everybody else who keeps an index of their own."""

from hicache_actors.events.batches import (
    EventBatch,
    PagesRemoved,
    PagesStored,
    ResidencyEvent,
    TierName,
    TiersCleared,
)
from hicache_actors.events.directory import Directory
from hicache_actors.events.mirror import Mirror
from hicache_actors.events.stream import EventsSnapshot, EventStream, Subscription

__all__ = [
    "Directory",
    "EventBatch",
    "EventStream",
    "EventsSnapshot",
    "Mirror",
    "PagesRemoved",
    "PagesStored",
    "ResidencyEvent",
    "Subscription",
    "TierName",
    "TiersCleared",
]
