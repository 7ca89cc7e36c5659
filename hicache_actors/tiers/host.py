"""HostTier: the owner of host memory (L2).  Copies and storage calls work on its slots in place."""

from __future__ import annotations

import msgspec

from hicache_actors.core.words import Slots, unpack_slots
from hicache_actors.memory.host import HostMemory
from hicache_actors.runtime import Actor, Ask, handles


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

    def objects(self, slots: Slots) -> list[memoryview]:
        """Header and payload of each object of each slot, writable; the caller holds the slots."""
        return self.memory.objects_of(unpack_slots(slots))

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
