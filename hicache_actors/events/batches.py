"""What subscribers of `HiCache.events` get.

Pages are named by their hashes (32 bytes, `hicache_actors.keys.hashes`), which say a page and everything before it.  The structs
are tagged, so msgspec encodes a batch as it is (`msgspec.msgpack.encode(batch)`).
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from hicache_actors.keys.scope import NO_SCOPE, Scope

TierName: TypeAlias = Literal["device", "host", "storage"]
TIERS: Final[tuple[TierName, ...]] = ("device", "host", "storage")

Cause: TypeAlias = Literal["snapshot", "lost", "reset", "degraded", "storage"]


class PagesStored(msgspec.Struct, frozen=True, tag="stored"):
    """Consecutive pages of one prefix can be had at ``tier`` from now on.

    ``hashes`` name them; ``parent`` is the hash of the page before them, None if they begin a prompt; ``tokens`` are theirs,
    little-endian int64, ``page_size`` in a page; ``scope`` keeps equal tokens apart.  A page may be told of more than once.
    """

    tier: TierName
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: bytes
    page_size: int
    scope: Scope = NO_SCOPE


class PagesRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """These pages have left ``tier``.  Never told of storage: a store evicts what it wants, when it wants."""

    tier: TierName
    hashes: tuple[bytes, ...]


class TiersCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Nothing that was told of ``tiers`` holds any more.

    "snapshot", "lost": the rest of the batch tells all that is there, because the subscription begins, or because the subscriber
    was too slow.  "reset", "degraded": what the cache has forgotten, and in the second case for good.  "storage": another store
    is used from here on, or none, or this one has been cleared.
    """

    tiers: tuple[TierName, ...]
    cause: Cause


ResidencyEvent: TypeAlias = PagesStored | PagesRemoved | TiersCleared


class EventBatch(msgspec.Struct, frozen=True):
    """All changes of one section of decisions, in order.

    ``id`` grows from batch to batch, and ``after`` is the one before: whoever has not seen that has missed something.  With ranks
    all of them tell the same batches, ids included.  ``epoch`` is one more after each reset and after degrading; ``at_ms`` is
    the agreed clock, from when the cache was opened.  ``lost`` batches were not delivered before this one, which is a snapshot
    then.
    """

    id: int
    after: int
    epoch: int
    at_ms: int
    events: tuple[ResidencyEvent, ...]
    lost: int = 0
