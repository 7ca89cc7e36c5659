"""store_on = "host_evict": pages are stored because they would leave the host next, ahead of the moment at which they do.

Host eviction never waits, so what it takes next must be stored before.  Once more of the host is in use than the water mark says,
the pages that would go next, as many as are to be free or ready to go, are looked at in the order of eviction (`front`), and each
that is not stored is backed up with what is above it, so that no hole is left.  That happens in each apply, before anybody asks
for room, and again at the end of each section.  What is used again leaves the front, and is not written until its turn comes.

The pages of open backups are bounded, as a store that is slower than the demand must not pin the whole host: then pages go unsaved,
and are counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_actors.core.node import UNSTORED, Node
from hicache_actors.core.words import HOST, READY

if TYPE_CHECKING:
    from hicache_actors.core.saving import Saving

_SECTION_PAGES: Final = 256  # a batch, or several of long pages


class Ahead:
    """``draining``: somebody waits until everything is stored, so what comes to the host is stored as it comes."""

    def __init__(self, saving: Saving) -> None:
        self.state, self.saving = saving.state, saving
        self.draining = False
        self._gave_up = self._below_gap = False  # what is at the front may hold pages that are not stored, and why

    @property
    def stores_at_once(self) -> bool:
        """What has come to the host is stored now."""
        return self.state.policies.stores_on_publish or self.draining

    def advance(self) -> None:
        """Back up what is to be stored before eviction comes to it."""
        state, saving = self.state, self.saving
        residents, goal = state.residents, state.policies.ready_goal_pages
        missing = goal - state.pools[HOST].free
        if not state.storage or state.degraded or missing <= 0:
            return
        front, order = residents.front, residents.host
        if front.pages > 2 * goal:  # what came last goes before the others: they are not next any more
            residents.recall()
        may_save = min(_SECTION_PAGES - saving.section_backup_pages, goal - saving.backup_pages)
        while (residency := order.peek()) is not None:
            node, lane = residency.node, residency.lane
            assert lane is not None
            if front.pages >= missing and not front.reaches(residency):
                break
            if residency.state != READY:
                lane.discard(residency)  # offered again when its pin ends
                continue
            if node.stored == UNSTORED:
                if may_save <= 0:
                    break
                before = saving.backup_pages
                saving.want_stored(node, None)
                saved = saving.backup_pages - before
                state.count("stored_ahead_pages", saved)
                may_save -= saved
                self._below_gap = self._below_gap or node.stored == UNSTORED
            lane.discard(residency)
            front.offer(residency)

    def facts(self) -> tuple[object, ...]:
        """What decisions may depend on, for digests."""
        return self.draining, self._gave_up, self._below_gap, self.state.residents.front.edge

    # -- what could not be stored when it was looked at -----------------------------------------------------------------------

    def written(self, good: list[Node]) -> None:
        """These have come to the host: what is below them can be stored now."""
        if self._below_gap and any(node.at[HOST].kids > (node is not good[-1]) for node in good):
            self.look_again()

    def gave_up(self) -> None:
        self._gave_up = True

    def stored(self) -> None:
        """The store takes pages: it may also take those that were given up."""
        if self._gave_up:
            self.look_again()

    def look_again(self) -> None:
        self._gave_up = self._below_gap = False
        self.state.residents.recall()
