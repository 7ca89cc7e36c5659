"""Eviction order: which residency goes next.

An order lists residencies of one place.  Listed are all candidates (unlocked, no children here), and also some that are none at
the moment: locks and children do not unlist a node, `pop` hands it out and the evictor puts it aside; it is offered again when
its last lock or child goes.  So pinning costs nothing, and a node keeps its place while jobs pin it.
"""

from __future__ import annotations

from typing import Protocol

from hicache_actors.core.node import NOWHERE, Residency


class Order(Protocol):
    """What an eviction policy implements.  ``residency.tick`` says when it was last touched."""

    def touch(self, residency: Residency) -> None:
        """It has just been used (its tick is the newest); list it, or move it."""

    def offer(self, residency: Residency) -> None:
        """List it at the place that its tick gives it; it is not listed now."""

    def discard(self, residency: Residency) -> None:
        """Unlist it, if it is listed."""

    def pop(self) -> Residency | None:
        """Unlist and return the one that should go next; None when the list is empty."""

    def listed(self) -> list[Residency]:
        """All that are listed, next to go first (for checks)."""

    def drop(self) -> None:
        """Forget everything, without touching the residencies: they are garbage."""


class LruOrder:
    """Least recently touched first: a doubly linked list through the residencies, every operation O(1) but `offer`.

    `offer` looks for its place from both ends at once.  Its customers come from the old end (set aside earlier) or belong near
    the new one, so the walk is short.
    """

    def __init__(self) -> None:
        self._head = Residency(NOWHERE)
        self.drop()

    def drop(self) -> None:
        self._head.older = self._head.newer = None  # the old neighbours are cut by their owner
        self._head = head = Residency(NOWHERE)
        head.older = head.newer = head

    def touch(self, residency: Residency) -> None:
        head, older, newer = self._head, residency.older, residency.newer
        if older is not None and newer is not None:
            older.newer = newer
            newer.older = older
        last = residency.older = head.older
        residency.newer = head
        last.newer = head.older = residency  # type: ignore[union-attr]

    def discard(self, residency: Residency) -> None:
        older, newer = residency.older, residency.newer
        if older is not None and newer is not None:
            older.newer = newer
            newer.older = older
            residency.older = residency.newer = None

    def pop(self) -> Residency | None:
        residency = self._head.newer
        if residency is self._head or residency is None:
            return None
        self.discard(residency)
        return residency

    def offer(self, residency: Residency) -> None:
        head, tick = self._head, residency.tick
        old, new = head.newer, head.older
        while True:
            assert old is not None
            assert new is not None
            if old is head or tick <= old.tick:
                newer = old
                break
            if tick >= new.tick:
                assert new.newer is not None
                newer = new.newer
                break
            old, new = old.newer, new.older
        older = newer.older
        assert older is not None
        residency.older, residency.newer = older, newer
        older.newer = newer.older = residency

    def listed(self) -> list[Residency]:
        out = []
        at = self._head.newer
        while at is not None and at is not self._head:
            out.append(at)
            at = at.newer
        return out


ORDERS: dict[str, type[LruOrder]] = {"lru": LruOrder}
"""Policies by name; `CoreConfig.eviction` takes one of these."""
