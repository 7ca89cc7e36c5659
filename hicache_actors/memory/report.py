"""What a configuration amounts to, in words and numbers: tokens and bytes per tier, break-even, traps.  No torch needed.

Everything is one rank's, unless it says otherwise.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hicache_actors.config import Config
from hicache_actors.errors import BackendError
from hicache_actors.masking import masked
from hicache_actors.memory.budget import HostBudget
from hicache_actors.memory.disks import disk_of
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.places import place_of
from hicache_actors.memory.shapes import KVShape, format_bytes
from hicache_actors.memory.staging import StagingSize
from hicache_actors.memory.traps import Sizes, StorageFacts, Trap, find_traps


class TierSize(msgspec.Struct, frozen=True):
    """``bytes`` = KV + headers + padding."""

    tier: str
    pages: int
    tokens: int
    bytes: int
    header_bytes: int
    padding_bytes: int

    def describe(self) -> str:
        words = f"{self.tier:8} {self.pages:>12,} pages = {self.tokens:>14,} tokens, {format_bytes(self.bytes):>10}"
        extra = []
        if self.header_bytes:
            extra.append(f"{format_bytes(self.header_bytes)} headers")
        if self.padding_bytes:
            extra.append(f"{format_bytes(self.padding_bytes)} padding")
        return words + (f", of which {' and '.join(extra)}" if extra else "")


class BreakEven(msgspec.Struct, frozen=True):
    """The bandwidth at which moving a page costs as much time as computing its tokens again.  A slower tier costs time."""

    load_token_bytes: float
    """What host to device moves for a token."""

    fetch_token_bytes: float
    """What storage to host moves for a token: with its share of the header."""

    prefill_tokens_per_s: float | None
    """As measured or declared."""

    def load_bytes_s(self, prefill_tokens_per_s: float) -> float:
        return self.load_token_bytes * prefill_tokens_per_s

    def fetch_bytes_s(self, prefill_tokens_per_s: float) -> float:
        return self.fetch_token_bytes * prefill_tokens_per_s

    def describe(self) -> str:
        speed = self.prefill_tokens_per_s or 1000.0
        words = (
            f"a load pays above {format_bytes(round(self.load_bytes_s(speed)))}/s and a fetch from storage above "
            f"{format_bytes(round(self.fetch_bytes_s(speed)))}/s "
        )
        if self.prefill_tokens_per_s is None:
            return words + "for each 1,000 tokens/s that this rank's engine computes in prefill"
        return words + f"at {speed:,.0f} tokens/s of prefill; below, computing is quicker"


class SizingReport(msgspec.Struct, frozen=True, kw_only=True):
    layout: SlotLayout
    tiers: tuple[TierSize, ...]
    ranks: int
    host: HostBudget | None
    """None where no machine has been asked."""

    staging: StagingSize | None
    """None where pages are objects in their slots."""

    storage: StorageFacts | None
    break_even: BreakEven
    traps: tuple[Trap, ...]

    @property
    def problems(self) -> tuple[Trap, ...]:
        return tuple(trap for trap in self.traps if trap.severity == "problem")

    def lines(self) -> list[str]:
        """For people, one fact a line."""
        shape = self.layout.shape
        words = [f"KV        {shape.describe()}", f"slot      {_describe_slot(self.layout)}"]
        words += [tier.describe() for tier in self.tiers]
        if self.staging is not None:
            words.append(f"staging   {self.staging.describe()}")
        if self.storage is not None and not any(tier.tier == "storage" for tier in self.tiers):
            words.append(f"storage   {self.storage.where}, size unknown")
        if self.host is not None:
            share = f"memory    {format_bytes(self.host.share_bytes)} for this rank's pools"
            share += f" ({self.host.ranks} ranks on this host)" if self.host.ranks > 1 else ""
            words.append(f"{share}; {format_bytes(self.host.reserve_bytes)} of the host stay reserved")
        words.append(f"pays off  {self.break_even.describe()}")
        words += [f"{trap.severity:9} {trap}" for trap in self.traps]
        return words

    @property
    def text(self) -> str:
        return "\n".join(self.lines())

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and texts, for scripts; names end in their unit."""
        layout, shape, speed = self.layout, self.layout.shape, self.break_even.prefill_tokens_per_s
        tiers = {tier.tier: {k: v for k, v in msgspec.to_builtins(tier).items() if k != "tier"} for tier in self.tiers}
        return {
            "token_bytes": shape.token_bytes,
            "page_tokens": shape.page_size,
            "page_bytes": layout.payload_bytes,
            "header_bytes": layout.slot_header_bytes,
            "padding_bytes": layout.padding_bytes,
            "slot_bytes": layout.slot_bytes,
            "ranks": self.ranks,
            "tiers": tiers,
            "staging": None if self.staging is None else self.staging.to_dict(),
            "memory": None if self.host is None else msgspec.to_builtins(self.host),
            "storage": None if self.storage is None else msgspec.to_builtins(self.storage),
            "break_even": {
                "load_token_bytes": self.break_even.load_token_bytes,
                "fetch_token_bytes": self.break_even.fetch_token_bytes,
                "prefill_tokens_per_s": speed,
                "load_bytes_s": None if speed is None else self.break_even.load_bytes_s(speed),
                "fetch_bytes_s": None if speed is None else self.break_even.fetch_bytes_s(speed),
            },
            "traps": [msgspec.to_builtins(trap) for trap in self.traps],
        }


def sizing_report(
    config: Config,
    shape: KVShape,
    *,
    layout: SlotLayout | None = None,
    device_pages: int | None = None,
    host: HostBudget | int | None = None,
    staging: StagingSize | None = None,
    storage: StorageFacts | None = None,
    ranks: int | None = None,
    prefill_tokens_per_s: float | None = None,
) -> SizingReport:
    """``host``: the budget of a pool, or only its pages; None where it is not decided, as for ``device_pages``.

    ``layout``: of the host slots, where more is known of it than the configuration says.  ``staging``: what `take_staging` has
    booked beside them.  ``storage``: None means none; see `storage_facts`.  ``ranks``: of this host, by default the budget's.
    """
    layout = layout or SlotLayout(shape, config.host.layout, config.host.header_bytes)
    budget = host if isinstance(host, HostBudget) else None
    host_pages = host.pages if isinstance(host, HostBudget) else host
    if ranks is None:
        ranks = 1 if budget is None else budget.ranks
    tiers = []
    if device_pages is not None:
        n_bytes = device_pages * shape.page_bytes
        tiers.append(TierSize("device", device_pages, device_pages * shape.page_size, n_bytes, 0, 0))
    if host_pages is not None:
        tiers.append(_slots("host", layout, host_pages))
    if storage is not None and storage.room_bytes is not None:
        # Files take whole blocks, so an object takes as much as a slot.
        objects = layout.object_layout
        tiers.append(_slots("storage", objects, storage.room_bytes // storage.ranks // objects.slot_bytes))
    sizes = Sizes(
        layout=layout,
        device_pages=device_pages,
        host_pages=host_pages,
        storage=storage,
        ranks=ranks,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    return SizingReport(
        layout=layout,
        tiers=tuple(tiers),
        ranks=ranks,
        host=budget,
        staging=staging,
        storage=storage,
        break_even=BreakEven(float(shape.token_bytes), layout.object_bytes / shape.page_size, prefill_tokens_per_s),
        traps=find_traps(config, sizes),
    )


def storage_facts(
    url: str | None, *, ranks: int = 1, replicated: bool = False, read_bytes_s: float | None = None
) -> StorageFacts | None:
    """What can be said about a storage URL without opening it.  ``replicated``: ranks share one copy, as for MLA."""
    if url is None:
        return None
    owners = 1 if replicated else ranks
    if url.startswith("memory:"):
        return StorageFacts(masked(url), filesystem="memory", ranks=owners)
    place = place_of(url) if len(url.split()) == 1 else None  # how much layers hold together depends on what goes where
    if place is None:
        return StorageFacts(masked(url), read_bytes_s=read_bytes_s, ranks=owners)
    try:
        disk = disk_of(place.folder)
    except BackendError:
        return StorageFacts(masked(url), ranks=owners)  # opening it will say what is wrong
    disk_bytes = disk.free_bytes
    if place.held_bytes is not None:
        disk_bytes += place.held_bytes
    elif disk.exists and place.cap_bytes is not None:
        disk_bytes = disk.total_bytes  # it may hold something already: that is not counted here
    return StorageFacts(masked(url), disk_bytes, disk.filesystem, read_bytes_s, owners, place.cap_bytes)


def _slots(tier: str, layout: SlotLayout, pages: int) -> TierSize:
    return TierSize(
        tier,
        pages,
        pages * layout.shape.page_size,
        pages * layout.slot_bytes,
        pages * layout.slot_header_bytes,
        pages * layout.padding_bytes,
    )


def _describe_slot(layout: SlotLayout) -> str:
    objects = layout.object_layout
    host, storage = ("", "host and storage") if layout.in_place else (_describe_row(layout), "storage")
    return (
        f"{host}{objects.slot_bytes:,} bytes on {storage}: {objects.slot_header_bytes:,} header, {objects.payload_bytes:,} KV, "
        f"{objects.padding_bytes:,} padding ({objects.order})"
    )


def _describe_row(layout: SlotLayout) -> str:
    return f"{layout.slot_bytes:,} bytes on host, not in one run ({layout.order}); "
