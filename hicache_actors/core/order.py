"""Eviction orders: which residency goes next.

Listed are residencies of one place without children there: all candidates, and those that a lock keeps from being one.  A lock
does not unlist a node: `pop` hands it out, the evictor puts it aside, and it is offered again when its last lock goes.  So pinning
costs nothing, and a node keeps its place while jobs pin it.  A parent is listed when its last child has gone, which is why no page
is ever evicted before the pages behind it.

| name | goes first |
|---|---|
| lru | what was used longest ago |
| mru | what was used last |
| fifo | what came to this place first (pages of a node that has been joined: with its last one) |
| filo | what came to this place last |
| slru | what fewer than ``protected_hits`` requests have used, then the rest; each by last use |
| lfu | what the fewest requests have used, of these what was used longest ago |
| priority | the lowest priority of the requests that have used it, of these what was used longest ago |
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final, Literal, Protocol, TypeAlias, get_args

from hicache_actors.core.lane import Lane
from hicache_actors.core.node import Node, Residency

Eviction: TypeAlias = Literal["lru", "slru", "lfu", "fifo", "mru", "filo", "priority"]
EVICTIONS: Final[tuple[Eviction, ...]] = get_args(Eviction)
Left: TypeAlias = Callable[[Lane, Residency], None]


class Order(Protocol):
    """What an eviction order implements.  Tick, hits and priority of what is listed do not change: unlist it first."""

    def offer(self, residency: Residency) -> None:
        """List it at its place; it is not listed now."""

    def peek(self) -> Residency | None:
        """The one that should go next; None when nothing is listed."""

    def pop(self) -> Residency | None:
        """Unlist and return that one."""

    def listed(self) -> list[Residency]:
        """All that are listed, next to go first (for checks)."""

    def drop(self) -> None:
        """Forget everything, without touching the residencies: they are garbage."""


class RankedOrder:
    """Lowest rank first (``backwards``: highest), inside a rank by last use.  One lane a rank, only while somebody is in it."""

    def __init__(self, rank: Callable[[Node], int], *, backwards: bool = False, left: Left | None = None) -> None:
        self._rank, self._backwards, self._left = rank, backwards, left
        self.drop()

    def drop(self) -> None:
        self._lanes: dict[int, Lane] = {}
        self._ranks: list[int] = []  # of the lanes, ascending in the order in which they are popped

    def offer(self, residency: Residency) -> None:
        rank = self._rank(residency.node)
        if self._backwards:
            rank = -rank
        lane = self._lanes.get(rank)
        if lane is None:
            lane = self._lanes[rank] = Lane(newest_first=self._backwards, rank=rank, left=self._unlisted)
            insort(self._ranks, rank)
        lane.offer(residency)

    def _unlisted(self, lane: Lane, residency: Residency) -> None:
        if lane.empty and self._lanes.get(lane.rank) is lane:
            del self._lanes[lane.rank]
            del self._ranks[bisect_left(self._ranks, lane.rank)]
        if self._left is not None:
            self._left(lane, residency)

    def peek(self) -> Residency | None:
        return self._lanes[self._ranks[0]].peek() if self._ranks else None

    def pop(self) -> Residency | None:
        return self._lanes[self._ranks[0]].pop() if self._ranks else None

    def listed(self) -> list[Residency]:
        return [residency for rank in self._ranks for residency in self._lanes[rank].listed()]


class Policy:
    """An eviction policy: makes its orders, and says what they look at.

    ``by_use``: ticks are times of last use, not of arrival.  Nodes of unequal `rank` are never joined.
    """

    def __init__(self, name: Eviction, protected_hits: int) -> None:
        self.name = name
        self.by_use = name not in ("fifo", "filo")
        self._newest_first = name in ("mru", "filo")
        ranks: dict[str, Callable[[Node], int]] = {
            "slru": lambda node: int(node.hits >= protected_hits),
            "lfu": lambda node: node.hits,
            "priority": lambda node: node.priority,
        }
        self._rank = ranks.get(name)

    def order(self, *, backwards: bool = False, left: Left | None = None) -> Order:
        """A new order; ``backwards``: what this policy keeps longest goes first.  ``left`` hears of all that is unlisted."""
        if self._rank is not None:
            return RankedOrder(self._rank, backwards=backwards, left=left)
        return Lane(newest_first=self._newest_first != backwards, left=left)

    def rank(self, node: Node) -> int:
        return 0 if self._rank is None else self._rank(node)

    def before(self, one: Residency, other: Residency) -> bool:
        """``one`` goes before ``other``, both at the same place."""
        return self.key(one) < self.key(other)

    def key(self, residency: Residency) -> tuple[int, int]:
        """Of two at the same place, that with the smaller key goes first."""
        return self.rank(residency.node), -residency.tick if self._newest_first else residency.tick


class Queue:
    """An order that can be exchanged while it is in use: what the old one still lists goes first, in the old order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._old: Order | None = None
        self.offer = order.offer

    def exchange(self, order: Order) -> None:
        """List new offers in ``order``.  The owner moves what is listed now (unlists and offers it), and says `moved`."""
        self._old, self._order = self._order, order
        self.offer = order.offer

    def moved(self) -> None:
        self._old = None

    def peek(self) -> Residency | None:
        if self._old is not None and (residency := self._old.peek()) is not None:
            return residency
        return self._order.peek()

    def pop(self) -> Residency | None:
        if self._old is not None and (residency := self._old.pop()) is not None:
            return residency
        return self._order.pop()

    def listed(self) -> list[Residency]:
        return [*(self._old.listed() if self._old is not None else ()), *self._order.listed()]

    def drop(self) -> None:
        if self._old is not None:
            self._old.drop()
            self._old = None
        self._order.drop()
