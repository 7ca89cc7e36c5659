"""How many staging slots a host layout needs.  No torch needed.

A page that is no run of bytes (layer_first) becomes an object in a staging slot, on its way to a store, and on its way from one.
Reads and writes have slots apart, so that neither waits behind the other's calls that hang: enough for the batches that may be
under way at once, and never more than the host pool has pages.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from hicache_actors.memory.budget import take_host_memory
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.shapes import batch_pages, format_bytes
from hicache_actors.storage_config import StorageConfig


class StagingSize(msgspec.Struct, frozen=True):
    """Staging slots of one rank, beside its host pool."""

    read_pages: int
    write_pages: int
    slot_bytes: int
    """Header, KV and padding."""

    @property
    def pages(self) -> int:
        return self.read_pages + self.write_pages

    @property
    def bytes(self) -> int:
        return self.pages * self.slot_bytes

    def describe(self) -> str:
        return (
            f"{self.read_pages:,} slots to read through and {self.write_pages:,} to write through, "
            f"{format_bytes(self.bytes)} beside the host pool"
        )

    def to_dict(self) -> dict[Literal["read_pages", "write_pages", "slot_bytes", "bytes"], int]:
        return {
            "read_pages": self.read_pages,
            "write_pages": self.write_pages,
            "slot_bytes": self.slot_bytes,
            "bytes": self.bytes,
        }


def staging_size(layout: SlotLayout, host_pages: int, storage: StorageConfig) -> StagingSize | None:
    """None if pages are objects in their slots.  It does not ask whether there is a store: one may be attached at any time."""
    if layout.in_place:
        return None
    batch = batch_pages(layout.payload_bytes)
    return StagingSize(
        read_pages=min(storage.read_concurrency * batch, host_pages),
        write_pages=min(storage.write_concurrency * batch, host_pages),
        slot_bytes=layout.object_layout.slot_bytes,
    )


def take_staging(
    layout: SlotLayout, host_pages: int, storage: StorageConfig, *, reserve_gb: float | None = None
) -> StagingSize | None:
    """`staging_size`, booked with the enclosing `host_memory_scope`.  Raises `ConfigError` if it does not fit."""
    size = staging_size(layout, host_pages, storage)
    if size is not None:
        take_host_memory("staging", size.bytes, field="host.layout", value=layout.order, reserve_gb=reserve_gb)
    return size
