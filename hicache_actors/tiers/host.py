"""HostTier: the owner of host memory (L2), which it makes known to the device.

Copies and storage calls work on its slots in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from hicache_actors.core.words import Slots
from hicache_actors.cuda_ext.device import Device
from hicache_actors.errors import ConfigError, StoppedError, TransferError
from hicache_actors.memory.host import HostMemory
from hicache_actors.runtime import Actor, Ask, handles

CHUNK_BYTES: Final = 8 << 30
"""A cache over a GPU opens with so much host memory, and the rest follows in chunks of it: about a second each."""


def chunk_pages(memory: HostMemory, device: Device) -> int:
    """Slots that are made ready together: all, where nothing is to be done for it, or where each page lies all over the memory."""
    if device.kind != "cuda" or not memory.layout.in_place or memory.nbytes <= CHUNK_BYTES:
        return memory.slots
    return max(1, CHUNK_BYTES // memory.layout.slot_bytes)


class Reserved(Ask[None], frozen=True):
    """Core has given these slots to a job: what stood in them must not pass for an object any more."""

    slots: Slots


class HostSnapshot(msgspec.Struct, frozen=True):
    slots: int
    slot_bytes: int
    nbytes: int
    layout: str
    reserved_slots: int  #: how often a slot was given to a job, ever
    touched_bytes: int | None  #: how far the touch ahead is; None: each page is touched when it is needed


class HostTier(Actor):
    def __init__(self, memory: HostMemory) -> None:
        super().__init__("host")
        self.memory = memory
        self._reserved = 0
        self._stopping = False

    def objects(self, slots: Slots) -> Sequence[memoryview]:
        """Header and payload of each object of each slot, writable; the caller holds the slots."""
        return self.memory.objects_of(slots)

    def make_ready(self, device: Device, pages: range) -> None:
        """Any thread that may block, for seconds: wait until these slots have been touched, and tell the device of them.

        Raises `ConfigError` if that cannot be done, `StoppedError` if the cache is closing.
        """
        memory = self.memory
        whole = pages == range(memory.slots)
        try:
            memory.wait_touched(pages)
            if self._stopping:
                raise StoppedError("the cache is closing")
            device.register(*memory.extent(None if whole else pages), step_bytes=memory.layout.slot_bytes)
        except (OSError, TransferError) as error:
            raise ConfigError(
                "host.pages",
                memory.slots,
                f"{memory.describe()}: slots {pages.start:,} to {pages.stop - 1:,} could not be registered with {device.name}: "
                f"{error}",
                fix="lower host.pages or host.size_gb, or raise the limit on locked memory (ulimit -l)",
            ) from error

    def stop_opening(self) -> None:
        """The cache is closing: what has not been made ready stays as it is."""
        self._stopping = True
        self.memory.stop_touching()

    def usage(self) -> HostSnapshot:
        layout = self.memory.layout
        return HostSnapshot(
            self.memory.slots,
            layout.slot_bytes,
            self.memory.nbytes,
            layout.order,
            self._reserved,
            self.memory.touched_bytes,
        )

    @handles(Reserved)
    def _clear_magic(self, message: Reserved) -> None:
        self._reserved += len(message.slots) // 4
        self.memory.clear_headers(message.slots)
