"""Staging slots: where pages are objects, on their way to a store and from one, when the host's layout keeps no page in one run.

    read:   take slots -> the store fills them -> verify -> copy to the host's slots -> give them back
    write:  take slots -> copy from the host's slots -> seal -> the store reads them -> give them back

Slots belong to one call, from its turn until it has really ended: what a hung read may still write into is nobody else's.  Each
direction has slots of its own, so hung writes never keep reads from any.  Who can get none waits in its lane; who would need what
hung calls hold is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hicache_actors.core.pool import Pool
from hicache_actors.core.words import SLOT_BYTES, Slots
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.staging import StagingSize
from hicache_actors.tiers.storage.call import Call
from hicache_actors.tiers.storage.words import Direction, StagingSnapshot
from hicache_actors.transfer.plan import CopyPlan


class StagingPool:
    """The staging slots of one direction, whatever stores it has.  Loop thread only, but for `snapshot`."""

    def __init__(self, direction: Direction, memory: HostMemory) -> None:
        self.memory = memory
        self._pool = Pool(f"staging, {direction}", memory.slots)
        self._hung: set[Slots] = set()
        self._hung_pages = 0
        self._waiting: dict[Callable[[], None], None] = {}

    def take(self, pages: int, retry: Callable[[], None]) -> Slots | None:
        """Slots with cleared headers, or None: then ``retry`` is called once, when some have come back or hang."""
        if pages > self._pool.free:
            self._waiting[retry] = None
            return None
        slots = self._pool.take(pages)
        self.memory.clear_headers(slots)
        return slots

    def could_take(self, pages: int) -> bool:
        """Whether they are there once all calls have ended that do not hang."""
        return pages <= self._pool.total - self._hung_pages

    def hang(self, slots: Slots) -> None:
        """Nobody knows when their call will end."""
        if slots:
            self._hung.add(slots)
            self._hung_pages += len(slots) // SLOT_BYTES
            self._moved()

    def give(self, slots: Slots) -> None:
        """Their call has really ended."""
        if slots in self._hung:
            self._hung.remove(slots)
            self._hung_pages -= len(slots) // SLOT_BYTES
        self._pool.give(slots)
        self._moved()

    def snapshot(self) -> StagingSnapshot:
        """Any thread."""
        free, total = self._pool.free, self._pool.total
        return StagingSnapshot(total_pages=total, held_pages=total - free, hung_pages=self._hung_pages)

    def _moved(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for retry in waiting:
            retry()


class Staging:
    """Both directions.  Owned by the storage tier."""

    def __init__(self, layout: SlotLayout, size: StagingSize) -> None:
        self.pools: Mapping[Direction, StagingPool] = {
            "read": StagingPool("read", HostMemory(layout.object_layout, size.read_pages)),
            "write": StagingPool("write", HostMemory(layout.object_layout, size.write_pages)),
        }

    def snapshot(self) -> Mapping[Direction, StagingSnapshot]:
        """Any thread."""
        return {direction: pool.snapshot() for direction, pool in self.pools.items()}

    def close(self, *, keep_mapped: bool) -> None:
        """``keep_mapped``: calls hang that may still touch it."""
        for pool in self.pools.values():
            pool.memory.close(keep_mapped=keep_mapped)


class StagedPages:
    """The pages in ``host_slots``, and the objects that they are in the staging slots of ``call``, once it has its turn."""

    def __init__(self, call: Call[Any], pool: StagingPool, host: HostMemory, host_slots: Slots) -> None:
        self._call, self._memory, self._host, self._host_slots = call, pool.memory, host, host_slots

    def objects(self) -> Sequence[memoryview]:
        return self._memory.objects_of(self._call.staged)

    def gather(self) -> None:
        """Copy the pages to the objects' payloads.  In a worker thread."""
        CopyPlan(self._host, self._host_slots, self._memory, self._call.staged).work().run()

    def scatter(self, pages: int) -> None:
        """Copy the payloads of the first ``pages`` objects to their host slots.  In a worker thread."""
        end = pages * SLOT_BYTES
        CopyPlan(self._memory, self._call.staged[:end], self._host, self._host_slots[:end]).work().run()
