"""Figures under the names that SGLang's hierarchical cache gives them, for dashboards that exist.

Only figures that mean the same are given; a token that the storage has promised is counted once: prefetched, or unfulfilled for
one reason.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from hicache_actors.metrics.table import Metric, Sample, by, counter, gauge, histogram, one, tokens_by

if TYPE_CHECKING:
    from hicache_actors.cache.snapshots import Snapshot

_REASONS: Final = {
    "fetch_incomplete": "storage_transfer",
    "stopped": "dropped",
    "reset": "dropped",
    "degraded": "dropped",
}
"""Our reason -> theirs, where the word differs."""


def _unfulfilled(at: Snapshot) -> list[Sample]:
    pages: Counter[str] = Counter()
    for reason, count in at.core.fetches.unfulfilled_pages.items():
        pages[_REASONS.get(reason, reason)] += count
    return tokens_by(pages, at.page_size)


def _cached(at: Snapshot) -> list[Sample]:
    served = at.core.served
    return by({"device": served.device, "host": served.host, "storage": served.storage})


def _dropped(at: Snapshot) -> list[Sample]:
    return tokens_by(
        {
            "evicted": at.counts.get("dropped_pages", 0) + at.counts.get("dropped_subtree_pages", 0),
            "host_capacity": at.counts.get("write_back_refused_pages", 0),
        },
        at.page_size,
    )


def _backuped(at: Snapshot) -> tuple[Sample, ...]:
    return one(at.flows["backup"].pages * at.page_size)


SGLANG_METRICS: Final[tuple[Metric, ...]] = (
    counter("sglang:cached_tokens_total", "Prompt tokens that were reused.", _cached, "cache_source"),
    counter(
        "sglang:evicted_tokens_total",
        "Tokens that were evicted from the device.",
        lambda at: one(at.counts.get("evicted_device_pages", 0) * at.page_size),
    ),
    counter(
        "sglang:load_back_tokens_total",
        "Tokens that were loaded from host to device.",
        lambda at: one(at.flows["load"].pages * at.page_size),
    ),
    counter(
        "sglang:load_back_bytes_total",
        "Their bytes.",
        lambda at: one(at.flows["load"].bytes),
    ),
    histogram("sglang:load_back_duration_seconds", "Time of a load.", lambda at: [((), at.flows["load"].seconds)]),
    counter(
        "sglang:hicache_backup_tokens_total",
        "Tokens that were copied from device to host.",
        lambda at: one(at.flows["write_back"].pages * at.page_size),
    ),
    counter(
        "sglang:hicache_backup_bytes_total",
        "Their bytes.",
        lambda at: one(at.flows["write_back"].bytes),
    ),
    histogram(
        "sglang:hicache_backup_duration_seconds",
        "Time of a copy from device to host.",
        lambda at: [((), at.flows["write_back"].seconds)],
    ),
    counter("sglang:hicache_dropped_tokens_total", "Tokens without a copy on the host.", _dropped, "reason"),
    gauge(
        "sglang:hicache_host_used_tokens",
        "Tokens of the host pool that are not free.",
        lambda at: one((at.core.host.total_pages - at.core.host.free_pages) * at.page_size),
    ),
    gauge(
        "sglang:hicache_host_total_tokens",
        "Tokens that the host pool can hold.",
        lambda at: one(at.core.host.total_pages * at.page_size),
    ),
    counter(
        "sglang:prefetched_tokens_total",
        "Tokens that were fetched from storage to host.",
        lambda at: one(at.core.fetches.fulfilled_pages * at.page_size),
    ),
    counter("sglang:backuped_tokens_total", "Tokens that the storage has acknowledged.", _backuped),
    counter(
        "sglang:storage_prefetch_hit_tokens_total",
        "Tokens that the storage has promised.",
        lambda at: one(at.core.fetches.hit_pages * at.page_size),
    ),
    counter(
        "sglang:storage_prefetch_unfulfilled_tokens_total",
        "Those that did not come, by the reason.",
        _unfulfilled,
        "reason",
    ),
    counter(
        "sglang:hicache_backup_dropped_tokens_total",
        "Tokens whose backup was given up.",
        lambda at: one(at.counts.get("backup_given_up_pages", 0) * at.page_size),
    ),
)
