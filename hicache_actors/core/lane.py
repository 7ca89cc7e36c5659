"""Residencies in the order of their ticks: what every eviction order is made of.

A doubly linked list through the residencies takes what belongs at one of its ends, O(1): whatever has just been used or has just
come, and parents that are as old as the child that has gone.  What belongs in between (a node whose pin ends late, a parent that
was used long after its child) waits beside the list in a heap that knows where each of its entries is.  So an entry leaves as soon
as it is unlisted, nothing is left to clean up later, and every operation costs O(log of those that wait) at most.
"""

from __future__ import annotations

from collections.abc import Callable

from hicache_actors.core.node import NOWHERE, Residency


class Lane:
    """Lists residencies by tick; `pop` hands out the oldest, or with ``newest_first`` the newest.

    A residency's tick must not change while it is listed.  ``left`` is called with each one that is not listed any more.
    """

    __slots__ = ("_head", "_late", "_left", "_newest_first", "_sign", "rank")

    def __init__(
        self, *, newest_first: bool = False, rank: int = 0, left: Callable[[Lane, Residency], None] | None = None
    ) -> None:
        self.rank = rank
        self._newest_first, self._left = newest_first, left
        self._sign = -1 if newest_first else 1
        self._head = Residency(NOWHERE)
        self.drop()

    def drop(self) -> None:
        """Forget everything, without touching the residencies: they are garbage."""
        self._head.older = self._head.newer = None  # the old neighbours are cut by their owner
        self._head = head = Residency(NOWHERE)
        head.older = head.newer = head
        self._late: list[Residency] = []

    @property
    def empty(self) -> bool:
        return self._head.newer is self._head and not self._late

    def offer(self, residency: Residency) -> None:
        """List it where its tick belongs; it is listed nowhere now."""
        head, tick = self._head, residency.tick
        first, last = head.newer, head.older
        assert first is not None
        assert last is not None
        residency.lane = self
        if last is head or tick >= last.tick:
            residency.older, residency.newer = last, head
            last.newer = head.older = residency
        elif tick <= first.tick:
            residency.older, residency.newer = head, first
            first.older = head.newer = residency
        else:
            self._late.append(residency)
            self._rise(len(self._late) - 1, residency)

    def discard(self, residency: Residency) -> None:
        """Unlist it; it is listed here."""
        older, newer = residency.older, residency.newer
        if older is not None and newer is not None:
            older.newer = newer
            newer.older = older
            residency.older = residency.newer = None
        else:
            self._leave(residency)
        residency.lane = None
        if self._left is not None:
            self._left(self, residency)

    def peek(self) -> Residency | None:
        """The one that `pop` would return."""
        head = self._head
        residency = head.older if self._newest_first else head.newer
        assert residency is not None
        late = self._late
        if late and (residency is head or self._sign * late[0].tick < self._sign * residency.tick):
            return late[0]
        return None if residency is head else residency

    def pop(self) -> Residency | None:
        """Unlist and return the next one; None when nothing is listed."""
        residency = self.peek()
        if residency is not None:
            self.discard(residency)
        return residency

    def listed(self) -> list[Residency]:
        """All that are listed, in the order in which `pop` would return them (for checks)."""
        out = []
        at = self._head.newer
        while at is not None and at is not self._head:
            out.append(at)
            at = at.newer
        if self._newest_first:
            out.reverse()
        return sorted([*out, *self._late], key=lambda residency: self._sign * residency.tick)

    # -- the heap: entry i is not younger than its children 2 i + 1 and 2 i + 2; ``late`` of a residency is its place + 1 -------

    def _rise(self, at: int, residency: Residency) -> None:
        late, sign = self._late, self._sign
        key = sign * residency.tick
        while at:
            parent = late[(at - 1) >> 1]
            if sign * parent.tick <= key:
                break
            late[at] = parent
            parent.late = at + 1
            at = (at - 1) >> 1
        late[at] = residency
        residency.late = at + 1

    def _sink(self, at: int, residency: Residency) -> None:
        late, sign = self._late, self._sign
        key, size = sign * residency.tick, len(late)
        while (below := 2 * at + 1) < size:
            child = late[below]
            if below + 1 < size and sign * late[below + 1].tick < sign * child.tick:
                below += 1
                child = late[below]
            if key <= sign * child.tick:
                break
            late[at] = child
            child.late = at + 1
            at = below
        late[at] = residency
        residency.late = at + 1

    def _leave(self, residency: Residency) -> None:
        late, at = self._late, residency.late - 1
        residency.late = 0
        last = late.pop()
        if last is residency:
            return
        if at and self._sign * last.tick < self._sign * late[(at - 1) >> 1].tick:
            self._rise(at, last)
        else:
            self._sink(at, last)
