"""Page slots of one place: a free list that costs O(slots moved) and knows a double free when it sees one."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np

from hicache_actors.core.words import SLOT_BYTES, Slots
from hicache_actors.errors import HiCacheError


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
        self._used = np.zeros(total, np.bool_)
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
        slots = self._stack[: -pages - 1 : -1].tobytes()
        del self._stack[-pages:]
        index = np.frombuffer(slots, np.uint32)
        if self._used[index].any():
            raise SlotError(f"{self.name}: double allocation of slots {index[self._used[index]].tolist()}")
        self._used[index] = True
        return slots

    def give(self, slots: Slots) -> None:
        """Take slots back.  One that is free already, or occurs twice, raises `SlotError` and nothing changes."""
        pages = len(slots) // SLOT_BYTES
        if not pages:
            return
        index = np.frombuffer(slots, np.uint32)
        used = self._used[index]
        if not used.all():
            raise SlotError(f"{self.name}: double free of slots {index[~used].tolist()}")
        if pages > 1:
            order = np.arange(pages)
            self._mark[index] = order
            twice = self._mark[index] != order
            if twice.any():
                raise SlotError(f"{self.name}: double free of slots {index[twice].tolist()}")
        self._used[index] = False
        self._stack.frombytes(index[::-1].tobytes())  # so that a run comes out again as it went in, ascending
        if self.on_free is not None:
            self.on_free(slots)

    def keep_only(self, held: Iterable[Slots]) -> None:
        """Everything is free again, but ``held``: a reset, at O(total) whatever the tree held."""
        before = self._used.copy() if self.on_free is not None else None
        self._used[:] = False
        self._used[np.frombuffer(b"".join(held), np.uint32)] = True
        self._stack = array("I", np.flatnonzero(~self._used[: self.opened])[::-1].astype(np.uint32).tobytes())
        if self.on_free is not None and before is not None:
            self.on_free(np.flatnonzero(before & ~self._used).astype(np.uint32).tobytes())

    def free_slots(self) -> list[int]:
        """The free list, next to be handed out last (for digests and checks)."""
        return self._stack.tolist()
