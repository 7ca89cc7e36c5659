"""Pins, and the one place where residency is lost.

A *pin* keeps pages [start, tail.end) of a path at one place.  It names its lowest node; splits keep a tail's identity, so a pin
survives them.  Pins on the device always reach to the root, which makes ``Residents.evictable`` exact there.

A *stray* is a run of slots whose node lost them under pins (failed load, reset, degrade): each of those pins holds it, the last
one to end frees it.  The pins themselves shrink to what is left above.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hicache_actors.core.node import NOWHERE, UNSTORED, WAITING, Node, Residency
from hicache_actors.core.pool import Pool
from hicache_actors.core.tree import Tree
from hicache_actors.core.words import DEVICE, FILLING, HOST, SLOT_BYTES, Slots


class Stray:
    """Slots that outlive their node; counted as limbo."""

    __slots__ = ("holders", "slots")

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.holders = 0


class Pin:
    """A receipt: give it back to `Pins.unpin`."""

    __slots__ = ("place", "start", "strays", "tail", "uid")

    def __init__(self, uid: int, place: int, tail: Node, start: int) -> None:
        self.uid, self.place, self.tail, self.start = uid, place, tail, start
        self.strays: list[Stray] = []


class Pins:
    """All pins of a tree.  `lose` is the only way by which a present residency becomes absent, besides eviction."""

    def __init__(self, tree: Tree, pools: Sequence[Pool]) -> None:
        self._tree = tree
        self._residents = tree.residents
        self._pools = pools
        self.all: dict[int, Pin] = {}
        self.dropped_pages = 0  # pages that left the tree because something above them did
        self._uids = 0

    # -- pinning ------------------------------------------------------------------------------------------------------------

    def pin(self, place: int, tail: Node, start: int = 0) -> Pin:
        """Pin pages [start, tail.end) of the path to ``tail``; all of them are present at ``place``."""
        self._uids += 1
        pin = self.all[self._uids] = Pin(self._uids, place, tail, start)
        self._lock(place, tail, start)
        return pin

    def extend(self, pin: Pin, tail: Node) -> None:
        """Let the pin reach down to ``tail``, which lies below its tail."""
        self._lock(pin.place, tail, pin.tail.end)
        pin.tail = tail

    def unpin(self, pins: Iterable[Pin]) -> None:
        """End pins that end together; then join the chains that they held apart."""
        tree = self._tree
        tails = []
        for pin in pins:
            del self.all[pin.uid]
            self._unlock(pin.place, pin.tail, pin.start)
            tails.append(pin.tail)
            for stray in pin.strays:
                stray.holders -= 1
                if not stray.holders:
                    self._pools[pin.place].give(stray.slots)
            pin.strays = []
        for tail in tails:
            tree.join(tail)

    def lock_path(self, nodes: Iterable[Node]) -> list[Residency]:
        """Keep what of ``nodes`` is on the host from eviction, for the length of one call -> for `unlock_path`."""
        held = [node.at[HOST] for node in nodes if node.at[HOST].state]
        for residency in held:
            if not residency.locks:
                self._residents.unlocked[HOST] -= len(residency.slots) // SLOT_BYTES
            residency.locks += 1
        return held

    def unlock_path(self, held: Iterable[Residency]) -> None:
        for residency in held:
            residency.locks -= 1
            if not residency.locks:
                self._residents.unlocked[HOST] += len(residency.slots) // SLOT_BYTES
                self._residents.offer(HOST, residency)

    def _lock(self, place: int, tail: Node, start: int) -> None:
        moved = stuck = 0
        while tail.end > start:
            residency = tail.at[place]
            if not residency.locks:
                moved += len(residency.slots)
                if tail.stuck:
                    stuck += len(residency.slots)
            residency.locks += 1
            tail = tail.parent
        self._residents.unlocked[place] -= moved // SLOT_BYTES
        if place == DEVICE:
            self._residents.stuck_pages -= stuck // SLOT_BYTES

    def _unlock(self, place: int, tail: Node, start: int) -> None:
        moved = stuck = 0
        while tail.end > start:
            residency = tail.at[place]
            locks = residency.locks = residency.locks - 1
            if not locks:
                moved += len(residency.slots)
                if tail.stuck:
                    stuck += len(residency.slots)
                if not residency.kids and residency.lane is None:
                    self._residents.offer(place, residency)
            tail = tail.parent
        self._residents.unlocked[place] += moved // SLOT_BYTES
        if place == DEVICE:
            self._residents.stuck_pages += stuck // SLOT_BYTES

    # -- losing -------------------------------------------------------------------------------------------------------------

    def lose(self, place: int, nodes: Iterable[Node]) -> list[tuple[Pin, int]]:
        """The residency of ``nodes`` at ``place`` goes at once -> pins that shrank, each with its new end in pages.

        ``nodes`` cut a suffix off every pin that covers some of them.  Free slots return to the pool, pinned ones become strays.
        A node that is then on no tier leaves the tree with everything below it.
        """
        gone: dict[int, Node] = {
            id(node): node for node in nodes if node.at[place].state and node.parent is not NOWHERE
        }
        shrunk = self._stray(place, gone) if any(node.at[place].locks for node in gone.values()) else []
        self._pools[place].give(b"".join([node.at[place].slots for node in gone.values() if not node.at[place].locks]))
        for node in reversed(gone.values()):  # children first: what is above them may be stuck on them
            self._residents.vacate(node, place)
            node.at[place].locks = 0
            if place == DEVICE:
                node.events = ()
            elif node.stored == WAITING:
                node.stored = UNSTORED
        for node in gone.values():
            if node.parent is not NOWHERE and not any(residency.state for residency in node.at):
                shrunk += self.drop(node)
        return shrunk

    def _stray(self, place: int, gone: dict[int, Node]) -> list[tuple[Pin, int]]:
        strays: dict[int, Stray] = {}
        shrunk = []
        for pin in self.all.values():
            if pin.place != place:
                continue
            at, top = pin.tail, None
            while at.end > pin.start and id(at) in gone:
                stray = strays.get(id(at))
                if stray is None:
                    stray = strays[id(at)] = Stray(at.at[place].slots)
                stray.holders += 1
                pin.strays.append(stray)
                top = at
                at = at.parent
            if top is not None:
                pin.tail = at
                shrunk.append((pin, at.end))
        return shrunk

    def drop(self, top: Node) -> list[tuple[Pin, int]]:
        """``top`` is on no tier: it leaves the tree with everything below it (counted) -> pins that shrank."""
        tree = self._tree
        below = tree.subtree(top)
        shrunk: list[tuple[Pin, int]] = []
        for node in below[1:]:
            self.dropped_pages += node.end - tree.start(node)
        for place in range(len(top.at)):
            # what `lose` removes on its way is not removed again: it checks for the parent
            present = [node for node in below if node.parent is not NOWHERE and node.at[place].state]
            if present:
                shrunk += self.lose(place, present)
        for node in reversed(below):
            if node.parent is not NOWHERE:
                tree.remove(node)
        return shrunk

    def keep_only(self, pins: Iterable[Pin]) -> None:
        """Forget pins that nobody holds any more; what they kept may go with `lose_everything`, which must follow."""
        held = {pin.uid: pin for pin in pins}
        for pin in self.all.values():
            if pin.uid not in held:
                for stray in pin.strays:
                    stray.holders -= 1
        self.all = held

    def lose_everything(self) -> None:
        """Reset: all pinned slots become strays, every pin ends at its root.  Clears the tree; the caller rebuilds the pools."""
        strays: dict[tuple[int, int], Stray] = {}
        for pin in self.all.values():
            at = pin.tail
            while at.end > pin.start:
                stray = strays.get((pin.place, id(at)))
                if stray is None:
                    stray = strays[pin.place, id(at)] = Stray(at.at[pin.place].slots)
                stray.holders += 1
                pin.strays.append(stray)
                at = at.parent
            while at.parent is not NOWHERE:
                at = at.parent
            pin.tail = at
        self._tree.clear()

    # -- figures ------------------------------------------------------------------------------------------------------------

    def strays(self, place: int) -> list[Stray]:
        """All strays of a place, each once."""
        return list(
            {id(stray): stray for pin in self.all.values() if pin.place == place for stray in pin.strays}.values()
        )

    def pages_held_only_by(self, pins: Iterable[Pin], place: int) -> int:
        """Pages at ``place`` that no other pin than these holds: they become free or evictable when these end."""
        tree = self._tree
        covers: dict[int, tuple[Node, int]] = {}
        holds: dict[int, tuple[Stray, int]] = {}
        for pin in pins:
            if pin.place != place:
                continue
            for node in tree.path(pin.tail, pin.start):
                covers[id(node)] = node, covers.get(id(node), (node, 0))[1] + 1
            for stray in pin.strays:
                holds[id(stray)] = stray, holds.get(id(stray), (stray, 0))[1] + 1
        pages = sum(node.end - tree.start(node) for node, count in covers.values() if node.at[place].locks == count)
        return pages + sum(len(stray.slots) // SLOT_BYTES for stray, count in holds.values() if stray.holders == count)

    def filling(self, nodes: Iterable[Node], place: int) -> list[int]:
        """Jobs that fill some of ``nodes`` at ``place``, each once, in order."""
        return list(dict.fromkeys(node.at[place].filler for node in nodes if node.at[place].state == FILLING))
