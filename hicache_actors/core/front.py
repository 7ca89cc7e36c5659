"""The front of an order: what goes next, taken out of it, and how many pages that is.

Whoever looks ahead of eviction looks at each residency once: it takes from the order what comes next and lists it here.  Both are
ordered by the same policy and the smaller of their heads goes, so the order of eviction does not show it.
"""

from __future__ import annotations

from hicache_actors.core.lane import Lane
from hicache_actors.core.node import Residency
from hicache_actors.core.order import Policy
from hicache_actors.core.words import SLOT_BYTES


class Front:
    """``pages``: those of the residencies that are listed here.  ``edge``: the key of what goes last of all that have been listed
    since nothing was.
    """

    def __init__(self, policy: Policy) -> None:
        self.renew(policy)

    def renew(self, policy: Policy) -> None:
        """Order by ``policy`` from here on; nothing is listed, or what is listed is garbage."""
        self._policy = policy
        self._order = policy.order(left=self._left)
        self._pages: dict[int, int] = {}  # by id of the residency
        self.edge: tuple[int, int] | None = None
        self.pages = 0

    def offer(self, residency: Residency) -> None:
        """List it; it is listed nowhere now."""
        key, pages = self._policy.key(residency), len(residency.slots) // SLOT_BYTES
        self.edge = key if self.edge is None else max(self.edge, key)
        self._pages[id(residency)] = pages
        self.pages += pages
        self._order.offer(residency)

    def reaches(self, residency: Residency) -> bool:
        """``residency`` goes before the edge."""
        return self.edge is not None and self._policy.key(residency) < self.edge

    def peek(self) -> Residency | None:
        return self._order.peek()

    def listed(self) -> list[Residency]:
        return self._order.listed()

    def resized(self, residency: Residency) -> None:
        """A split or a join of its node has changed its pages."""
        before = self._pages.get(id(residency))
        if before is not None:
            pages = self._pages[id(residency)] = len(residency.slots) // SLOT_BYTES
            self.pages += pages - before

    def _left(self, _: Lane, residency: Residency) -> None:
        self.pages -= self._pages.pop(id(residency))
        if not self._pages:
            self.edge = None
