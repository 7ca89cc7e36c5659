"""The settings that Core decides by.  They must be equal on all ranks."""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from hicache_actors.core.order import EVICTIONS, Eviction
from hicache_actors.errors import ConfigError

WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back", "none"]
SlotOwner: TypeAlias = Literal["owned", "engine"]
StoreOn: TypeAlias = Literal["publish", "host_evict"]
PrefetchPolicy: TypeAlias = Literal["best_effort", "wait_complete", "timeout"]

WRITE_POLICIES: Final[tuple[WritePolicy, ...]] = get_args(WritePolicy)


class CoreConfig(msgspec.Struct, frozen=True):
    """Validated at construction: a value that cannot be honoured raises `ConfigError`.

    ``host_chunk_pages``: so many host pages are there at the start, and so many more each time that all ranks have made them ready;
    0: all at the start.  ``write_policy="none"`` keeps the device pages where they are: for measurements and tests.
    ``selective_threshold``: under write_through_selective, how many requests must have used a page before it is saved.  Under
    write_back no more than the share ``write_back_dirty_cap`` of the device pool is left on the device alone, and if more than the
    share ``write_back_water_mark`` is neither free nor evictable, saving runs ahead of demand.  ``slru_protected_hits``: uses that
    protect a page under slru.

    ``storage=False``: no prefetch, no backup.  ``store_on``: pages are stored when they have come to the host, or before they leave
    it: what of the host pool is above the share ``store_water_mark`` is kept free, or stored and next to go.  ``gather_s``: so
    long do pages that have come to the host wait for others that are stored with them, while nobody waits for them.
    ``enabled=False``: nothing is ever published, so nothing is found.  ``table_slots`` and ``table_rows`` are the places of jobs on
    the wire (HIT or RESULT values, RELEASED elements).  ``retry_delays_s`` are those of failed backups, on the agreed clock; their
    number is that of the retries.
    """

    page_size: int
    device_pages: int
    host_pages: int
    host_chunk_pages: int = 0
    write_policy: WritePolicy = "write_through"
    selective_threshold: int = 2
    write_back_water_mark: float = 0.75
    write_back_dirty_cap: float = 0.25
    eviction: Eviction = "lru"
    slru_protected_hits: int = 2
    storage: bool = True
    store_on: StoreOn = "publish"
    store_water_mark: float = 0.75
    gather_s: float = 0.0
    prefetch_threshold_tokens: int = 256
    prefetch_policy: PrefetchPolicy = "timeout"
    retry_delays_s: tuple[float, ...] = (1, 4, 16)
    table_slots: int = 64
    table_rows: int = 64
    enabled: bool = True
    slots: SlotOwner = "owned"

    def __post_init__(self) -> None:
        for field, least in (
            ("page_size", 1),
            ("device_pages", 1),
            ("host_pages", 0),
            ("host_chunk_pages", 0),
            ("selective_threshold", 1),
            ("slru_protected_hits", 1),
            ("prefetch_threshold_tokens", 0),
            ("table_slots", 2),
            ("table_rows", 2),
        ):
            value = getattr(self, field)
            if type(value) is not int or value < least:
                raise ConfigError(field, value, f"must be an integer >= {least}")
        for field, allowed in (
            ("write_policy", WRITE_POLICIES),
            ("eviction", EVICTIONS),
            ("slots", get_args(SlotOwner)),
            ("prefetch_policy", get_args(PrefetchPolicy)),
            ("store_on", get_args(StoreOn)),
        ):
            check_name(field, getattr(self, field), allowed)
        for field in ("write_back_water_mark", "write_back_dirty_cap", "store_water_mark"):
            share = getattr(self, field)
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ConfigError(field, share, "must be a share, from 0 to 1")
        if self.slots == "engine" and self.write_policy != "write_through":
            raise ConfigError(
                "write_policy",
                self.write_policy,
                "an engine that owns its blocks decides what is saved",
                allowed=("write_through",),
            )
        if not 0 <= self.gather_s < math.inf:
            raise ConfigError("gather_s", self.gather_s, "seconds are not negative")
        if any(delay <= 0 for delay in self.retry_delays_s):
            raise ConfigError("retry_delays_s", self.retry_delays_s, "a delay must be positive")

    @property
    def first_host_pages(self) -> int:
        """Host pages that are there at the start."""
        return min(self.host_pages, self.host_chunk_pages) if self.host_chunk_pages else self.host_pages

    @property
    def no_storage_reason(self) -> str:
        """Why nothing is fetched, in the account of a request."""
        return "no_storage" if self.enabled else "disabled"

    @property
    def threshold_pages(self) -> int:
        """The shortest run worth a prefetch."""
        return max(1, -(-self.prefetch_threshold_tokens // self.page_size))


def check_name(field: str, value: object, allowed: tuple[str, ...]) -> None:
    """:raises ConfigError: unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(field, value, "unknown", allowed=allowed)
