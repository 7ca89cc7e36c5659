"""Sizes and settings that are legal and still hurt, each with its reason and its fix.  No torch needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from hicache_actors.config import Config
from hicache_actors.memory.disks import MEMORY_FILESYSTEMS, NETWORK_FILESYSTEMS
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.shapes import format_bytes

TINY_PAGE_TOKENS: Final = 16
LARGE_PAGE_TOKENS: Final = 256
OVERHEAD_SHARE: Final = 0.1
LONG_PROMPT_TOKENS: Final = 32768
SMALL_CHUNK_BYTES: Final = 64 * 1024


class Trap(msgspec.Struct, frozen=True):
    code: str
    """Short and stable, for scripts."""

    severity: Literal["problem", "note"]
    """"problem": the cache will do much less than it could.  "note": may be what was wanted."""

    field: str
    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}; fix: {self.fix}"


class StorageFacts(msgspec.Struct, frozen=True):
    """What is known about the storage tier; None and "" where it is not."""

    where: str
    disk_bytes: int | None = None
    """What its disk has for it."""

    filesystem: str = ""
    read_bytes_s: float | None = None
    ranks: int = 1
    """How many ranks keep bytes of their own in it."""

    cap_bytes: int | None = None
    """The most that it may hold, over all ranks; None if only the disk bounds it."""

    @property
    def room_bytes(self) -> int | None:
        """What it can hold at most."""
        return min((n for n in (self.disk_bytes, self.cap_bytes) if n is not None), default=None)


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's tiers, as far as they are decided."""

    layout: SlotLayout
    device_pages: int | None
    host_pages: int | None
    storage: StorageFacts | None
    ranks: int
    prefill_tokens_per_s: float | None


def find_traps(config: Config, sizes: Sizes) -> tuple[Trap, ...]:
    found = [*_page_traps(config, sizes), *_pool_traps(config, sizes)]
    if sizes.storage is not None:
        found += [*_fetch_traps(config, sizes), *_store_traps(config, sizes, sizes.storage)]
    return tuple(sorted(found, key=lambda trap: trap.severity == "note"))


def _page_traps(config: Config, sizes: Sizes) -> Iterator[Trap]:
    layout, page_size = sizes.layout, sizes.layout.shape.page_size
    if page_size < TINY_PAGE_TOKENS:
        yield Trap(
            "page_tiny",
            "problem",
            "page_size",
            f"a page holds {page_size} tokens: each page costs a key, a checksum and a storage call, however small it is",
            f"set page_size to {TINY_PAGE_TOKENS} or more (64 is the default)",
        )
    if page_size > LARGE_PAGE_TOKENS:
        yield Trap(
            "page_large",
            "note",
            "page_size",
            f"a page holds {page_size} tokens: only whole pages are reused, so up to {page_size - 1} tokens of each prompt "
            "are computed again",
            f"set page_size to {LARGE_PAGE_TOKENS} or less",
        )
    objects = layout.object_layout
    extra_bytes = objects.slot_bytes - objects.payload_bytes
    if extra_bytes > OVERHEAD_SHARE * objects.slot_bytes and (layout.in_place or sizes.storage is not None):
        where = "each host slot and stored object" if layout.in_place else "each stored object"
        yield Trap(
            "slot_overhead",
            "problem",
            "page_size",
            f"header and padding take {extra_bytes / objects.slot_bytes:.0%} of {where}",
            "raise page_size",
        )
    if layout.header_bytes == 0:
        yield Trap(
            "no_header",
            "note",
            "host.header_bytes",
            "raw slots have no header, so nothing can tell a right page from a wrong or damaged one, and only raw objects "
            "can be stored",
            "set host.header_bytes to 4096, unless pages are shared with SGLang's file store",
        )


def _pool_traps(config: Config, sizes: Sizes) -> Iterator[Trap]:
    device, host = sizes.device_pages, sizes.host_pages
    if device is None or host is None or host > device or not config.write_policy.startswith("write_through"):
        return
    text = f"the host pool ({host:,} pages) is not larger than the device pool ({device:,} pages): under {config.write_policy} "
    text += "it holds little but copies of what the device holds"
    if sizes.storage is not None:
        text += ", and storage hits have nowhere to land but in their place"
    yield Trap("host_not_larger", "problem", "host.ratio", text, f"give the host more than {device:,} pages (ratio 2)")


def _fetch_traps(config: Config, sizes: Sizes) -> Iterator[Trap]:
    page_size, threshold = sizes.layout.shape.page_size, config.storage.prefetch_threshold_tokens
    cap_tokens = None if sizes.host_pages is None else sizes.host_pages // 2 * page_size
    if cap_tokens is not None and threshold > cap_tokens:
        yield Trap(
            "threshold_over_cap",
            "problem",
            "storage.prefetch_threshold_tokens",
            f"only spans of {threshold:,} tokens and more are fetched, but fetches may hold at most half of the host pool, "
            f"{cap_tokens:,} tokens: none comes whole",
            f"lower the threshold to {cap_tokens:,} or less, or enlarge the host pool",
        )
    if config.storage.prefetch_policy == "best_effort":
        yield Trap(
            "best_effort",
            "note",
            "storage.prefetch_policy",
            "best_effort ends a fetch as soon as the request could run, so an idle engine hardly ever gets anything from "
            "storage",
            "use 'timeout', which waits for a bounded time",
        )
    read_bytes_s = None if sizes.storage is None else sizes.storage.read_bytes_s
    limit_s = config.storage.prefetch_timeout_s(LONG_PROMPT_TOKENS)
    if read_bytes_s and limit_s is not None:
        needs_s = LONG_PROMPT_TOKENS / page_size * sizes.layout.object_bytes / read_bytes_s
        if needs_s > limit_s:
            yield Trap(
                "timeout_short",
                "note",
                "storage.prefetch_timeout_per_ki_token_s",
                f"{LONG_PROMPT_TOKENS:,} tokens take {needs_s:.1f} s to read at {read_bytes_s / 1e9:.2f} GB/s, but a fetch of "
                f"them ends after {limit_s:.1f} s: what has not arrived is computed",
                "raise the timeout, or use faster storage",
            )


def _store_traps(config: Config, sizes: Sizes, storage: StorageFacts) -> Iterator[Trap]:
    if not sizes.layout.in_place:
        yield Trap(
            "storage_staged",
            "note",
            "host.layout",
            f"{sizes.layout.order} keeps no page in one run, so each page that is read from storage or written to it is copied "
            "once more, through staging slots",
            "use page_first_direct, unless the engine's copies need runs over many pages of a layer",
        )
    if storage.where.startswith("shm:"):
        yield Trap(
            "storage_in_memory",
            "note",
            "storage.url",
            f"{storage.where} keeps pages in the memory of this host: beside the host pool's budget, and gone when it restarts",
            "leave its gb free when you size the host pools, or use slab:///folder to keep them",
        )
    elif storage.filesystem in MEMORY_FILESYSTEMS:
        yield Trap(
            "storage_on_tmpfs",
            "problem",
            "storage.url",
            f"{storage.where} lies on {storage.filesystem}, that is, in memory: it takes from the same memory as the host "
            "pool, is not part of its budget, and is gone after a reboot",
            "put the folder on a disk",
        )
    elif storage.filesystem == "memory":
        yield Trap(
            "storage_in_memory",
            "note",
            "storage.url",
            f"{storage.where} keeps pages in this process: beside the host pool's budget, and gone when it ends",
            "use file:///folder to keep them",
        )
    elif storage.filesystem in NETWORK_FILESYSTEMS:
        yield Trap(
            "storage_on_network",
            "note",
            "storage.url",
            f"{storage.where} lies on {storage.filesystem}, a network file system: calls may hang with the network, and "
            "locks may not hold between hosts",
            "use a local disk, or a backend made for sharing",
        )
    elif storage.filesystem == "overlay":
        yield Trap(
            "storage_on_overlay",
            "note",
            "storage.url",
            f"{storage.where} lies in the container's own layer: slow, and gone with the container",
            "mount a volume there",
        )
    if config.storage.verify != "always" and sizes.layout.header_bytes:
        yield Trap(
            "not_verified",
            "note",
            "storage.verify",
            "not each page that is read is compared with its checksum: what a store or its medium has damaged may be served",
            "set storage.verify to 'always', and storage.scrub_mb_s to find bad objects early",
        )
    chunk_bytes = sizes.layout.longest_object_bytes - sizes.layout.header_bytes
    if sizes.layout.order == "page_unified" and chunk_bytes < SMALL_CHUNK_BYTES:
        yield Trap(
            "chunks_small",
            "note",
            "storage.layer_partition",
            f"an object holds {format_bytes(chunk_bytes)}: each page costs {len(sizes.layout.chunk_spans)} keys and objects",
            "raise storage.layer_partition, or lower storage.tp_lcm_size, as far as those who share allow",
        )
    if storage.cap_bytes is not None and storage.disk_bytes is not None and storage.cap_bytes > storage.disk_bytes:
        yield Trap(
            "storage_over_disk",
            "problem",
            "storage.url",
            f"{storage.where} may hold {format_bytes(storage.cap_bytes)}, but its disk has {format_bytes(storage.disk_bytes)} for "
            "it: it is full before anything is evicted, and writes fail",
            "set a smaller size, or use a larger disk",
        )
    room_bytes = storage.room_bytes
    if room_bytes is not None and sizes.host_pages is not None:
        host_bytes = sizes.host_pages * sizes.layout.slot_bytes * storage.ranks
        if room_bytes < host_bytes:
            yield Trap(
                "storage_small",
                "note",
                "storage.url",
                f"{storage.where} has room for {format_bytes(room_bytes)}, less than the {format_bytes(host_bytes)} of host pool "
                "before it: unless it is filled with pages already, it will be full before it helps",
                "give it more room, or use a larger disk",
            )
    if sizes.ranks > 1 and sizes.layout.shape.kv == 2 and config.model.total_kv_heads is None:
        yield Trap(
            "kv_heads_unknown",
            "note",
            "model.total_kv_heads",
            f"{sizes.ranks} ranks run on this host; if they split the KV heads of one model, its total must be given, or parts "
            "of different splits look alike in storage",
            "set model.total_kv_heads (num_key_value_heads in the model's config.json)",
        )
    prefill_tokens_per_s = sizes.prefill_tokens_per_s
    if storage.read_bytes_s and prefill_tokens_per_s:
        needs_bytes_s = sizes.layout.object_bytes / sizes.layout.shape.page_size * prefill_tokens_per_s
        if storage.read_bytes_s < needs_bytes_s:
            yield Trap(
                "storage_slower_than_recompute",
                "problem",
                "storage.url",
                f"{storage.where} reads {storage.read_bytes_s / 1e9:.3f} GB/s, but at {prefill_tokens_per_s:,.0f} tokens/s of "
                f"prefill only storage above {needs_bytes_s / 1e9:.3f} GB/s saves time",
                "use faster storage, or none",
            )
