"""What a wait for room is given."""

from __future__ import annotations

from hicache_actors.core.words import SLOT_BYTES, Slots


class CoreRoom:
    """A reservation of device pages.  ``waiter`` is the id that the wait had, and names it in `Core.acquire`."""

    __slots__ = ("slots", "waiter")

    def __init__(self, waiter: int, slots: Slots) -> None:
        self.waiter, self.slots = waiter, slots

    @property
    def pages(self) -> int:
        """What is left of it."""
        return len(self.slots) // SLOT_BYTES

    def draw(self, pages: int) -> Slots:
        drawn, self.slots = self.slots[: pages * SLOT_BYTES], self.slots[pages * SLOT_BYTES :]
        return drawn
