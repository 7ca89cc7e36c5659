"""write_back: which dirty pages are saved, and when.

Nothing is saved because it has been computed.  Dirty pages are saved in the order in which they would be evicted, each with what is
dirty above it: at the end of a section in which there are more of them than their cap, or too little of the device is free or
evictable; when a request finds no room but theirs; and all of them when somebody waits until the cache has drained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_actors.core.node import STORED, Node
from hicache_actors.core.words import DEVICE

if TYPE_CHECKING:
    from hicache_actors.core.saving import Saving

_DRAINED_PAGES = 4096  # in one section


class Cleaner:
    """``draining``: what the storage has is as good as saved, so the host may give it up for what is not."""

    def __init__(self, saving: Saving) -> None:
        self.state, self.saving = saving.state, saving
        self.draining = False

    def clean(self, pages: int) -> None:
        """Save ``pages`` that nobody leases: somebody waits for room."""
        self._save(pages, leased=False)

    def ahead(self) -> None:
        """Save what exceeds the cap, or what it takes to have enough that can be evicted at once."""
        state = self.state
        policies, residents = state.policies, state.residents
        over = residents.dirty_pages - policies.dirty_cap_pages
        low = policies.clean_goal_pages - state.evictor.available(DEVICE) - self.saving.in_flight_pages
        self._save(max(over, low), leased=True)

    def drain(self) -> None:
        """Save everything, a part in each section."""
        self.draining = True
        self._save(_DRAINED_PAGES, leased=True)
        self.draining = False

    def _save(self, pages: int, *, leased: bool) -> None:
        residents, saving = self.state.residents, self.saving
        popped: list[Node] = []
        while pages > 0 and (residency := residents.dirty.pop()) is not None:
            node = residency.node
            popped.append(node)
            if (node.at[DEVICE].locks and not leased) or (node.stored == STORED and self.draining):
                continue
            before = saving.in_flight_pages
            whole = saving.want_host(node, None)
            pages -= saving.in_flight_pages - before
            if not whole:
                break
        for node in popped:
            residents.offer_dirty(node)
