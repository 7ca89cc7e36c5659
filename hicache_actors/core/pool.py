"""Page slots of one place: a free list that costs O(slots moved) and knows a double free when it sees one."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from hicache_actors.core.words import SLOT_BYTES, Slots
from hicache_actors.errors import HiCacheError

FEW: Final = 64
"""So many slots are looked at one by one.  Numpy is quicker above twice that; but after a forward pass its code has left the caches
of the processor, and a call takes 25 to 40 us, whatever the number of slots, where this takes 6."""


class SlotError(HiCacheError):
    """A slot was handed out twice or given back twice: a bug in Core.  The message names the slots."""


class Pool:
    """Slots [0, total), of which [opened, total) are closed: nobody gets them yet.  `take` and `give` speak packed slots (native
    uint32 bytes)."""

    def __init__(self, name: str, total: int, opened: int | None = None) -> None:
        """``opened``: default, all."""
        self.name = name
        self.total = total
        self.opened = total if opened is None else opened
        self.on_free: Callable[[Slots], None] | None = None  #: told of slots that have just become free; for debugging
        self._stack = array("I", range(self.opened - 1, -1, -1))
        self._used = bytearray(total)
        self._used_view = np.frombuffer(self._used, np.bool_)
        self._mark = np.zeros(total, np.int64)  # scratch: finds a slot that occurs twice in one `give`

    @property
    def free(self) -> int:
        return len(self._stack)

    @property
    def closed(self) -> int:
        return self.total - self.opened

    def open_more(self, pages: int) -> None:
        """The next ``pages`` closed slots are free, and come after those that are."""
        self._stack = array("I", range(self.opened + pages - 1, self.opened - 1, -1)) + self._stack
        self.opened += pages

    def take(self, pages: int) -> Slots:
        """Hand out ``pages`` slots.  The caller has made room: more than `free` is an error."""
        if pages <= 0:
            return b""
        if pages > len(self._stack):
            raise SlotError(f"{self.name}: {pages} slots asked, {len(self._stack)} free")
        slots = self._stack[: -pages - 1 : -1]
        del self._stack[-pages:]
        if pages <= FEW:
            used = self._used
            taken = [slot for slot in slots if used[slot]]
            for slot in slots:
                used[slot] = True
        else:
            index = np.frombuffer(slots, np.uint32)
            taken = index[self._used_view[index]].tolist()
            self._used_view[index] = True
        if taken:
            raise SlotError(f"{self.name}: double allocation of slots {taken}")
        return slots.tobytes()

    def give(self, slots: Slots) -> None:
        """Take slots back.  One that is free already, or occurs twice, raises `SlotError` and nothing changes."""
        pages = len(slots) // SLOT_BYTES
        if not pages:
            return
        if pages <= FEW:
            back = array("I", slots)
            used = self._used
            free = [slot for slot in back if not used[slot]]
            if free or len(set(back)) < pages:
                raise SlotError(f"{self.name}: double free of slots {free or sorted(back)}")
            for slot in back:
                used[slot] = False
            back.reverse()  # so that a run comes out again as it went in, ascending
            self._stack.extend(back)
        else:
            self._give_many(slots)
        if self.on_free is not None:
            self.on_free(slots)

    def _give_many(self, slots: Slots) -> None:
        index = np.frombuffer(slots, np.uint32)
        used = self._used_view[index]
        if not used.all():
            raise SlotError(f"{self.name}: double free of slots {index[~used].tolist()}")
        order = np.arange(len(index))
        self._mark[index] = order
        twice = self._mark[index] != order
        if twice.any():
            raise SlotError(f"{self.name}: double free of slots {index[twice].tolist()}")
        self._used_view[index] = False
        self._stack.frombytes(index[::-1].tobytes())

    def keep_only(self, held: Iterable[Slots]) -> None:
        """Everything is free again, but ``held``: a reset, at O(total) whatever the tree held."""
        before = self._used_view.copy() if self.on_free is not None else None
        self._used_view[:] = False
        self._used_view[np.frombuffer(b"".join(held), np.uint32)] = True
        self._stack = array("I", np.flatnonzero(~self._used_view[: self.opened])[::-1].astype(np.uint32).tobytes())
        if self.on_free is not None and before is not None:
            self.on_free(np.flatnonzero(before & ~self._used_view).astype(np.uint32).tobytes())

    def free_slots(self) -> list[int]:
        """The free list, next to be handed out last (for digests and checks)."""
        return self._stack.tolist()
