"""Settings of the policies: when pages are saved, and who leaves a full pool."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

import msgspec

from hicache_actors.checks import count, share

WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]
Eviction: TypeAlias = Literal["lru", "slru", "lfu", "fifo", "mru", "filo", "priority"]

WRITE_POLICIES: Final[tuple[WritePolicy, ...]] = get_args(WritePolicy)
EVICTIONS: Final[tuple[Eviction, ...]] = get_args(Eviction)


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that a write policy or an eviction order goes by.  Those of others are kept for a change at run time."""

    selective_threshold: int = 2
    """write_through_selective: a page is saved once so many requests have used it.  Default: 2 requests."""

    write_back_water_mark: float = 0.75
    """write_back: when more than this share of the device pool is neither free nor evictable at once, pages are saved
    ahead of demand.  Default: 0.75."""

    write_back_dirty_cap: float = 0.25
    """write_back: no larger share of the device pool is left on the device alone.  Default: 0.25."""

    slru_protected_hits: int = 2
    """slru: pages that so many requests have used go after all others.  Default: 2 requests."""

    def __post_init__(self) -> None:
        count("policy.selective_threshold", self.selective_threshold, "requests")
        count("policy.slru_protected_hits", self.slru_protected_hits, "requests")
        for name in ("write_back_water_mark", "write_back_dirty_cap"):
            share(f"policy.{name}", getattr(self, name), "the device pool")
