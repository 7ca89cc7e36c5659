"""Nodes of the prefix tree and their residencies.

A node is a span of whole pages.  Its first page lives in ``key`` (behind the parent's tag; that is also its key in the tree's
one child table), the others in ``rest``.  For each *place*, a (tier, component) pair, it has a `Residency`: the slots that hold
its pages there, and the locks on them.

Nodes are kept out of the garbage collector (``gc=False``; they hold bytes, ints and each other), so a collection does not walk
a million of them.  The price: whoever takes a node out of the tree must cut its links (`cut`), or it leaks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from hicache_actors.core.words import ABSENT

if TYPE_CHECKING:
    from hicache_actors.core.lane import Lane

TIERS: Final = 2
COMPONENTS: Final = 1  #: full KV; sliding windows, recurrent states and indexers will follow
PLACES: Final = tuple(range(TIERS * COMPONENTS))
"""Index of a (tier, component) pair in everything that is kept per place: tier + TIERS * component.

Full KV is component 0, so its places are the tiers themselves, DEVICE and HOST.
"""

TAG_BYTES: Final = 8

#: Where the storage stands with a node's pages.
UNSTORED: Final = 0
WAITING: Final = 1  #: a backup failed, a retry is due
SAVING: Final = 2  #: in an open backup
STORED: Final = 3  #: acknowledged


class Residency(msgspec.Struct, eq=False, gc=False):
    """A node's pages at one place.

    ``filler`` is the job that fills it while ``state`` is FILLING.  ``kids`` counts child nodes that are present here.  ``tick`` is
    the time of the last use, of the node or (handed over when they go) of a child; or of its arrival, where the eviction policy
    asks for that.  ``lane`` is where it is listed, None if it is not; ``older`` / ``newer`` / ``late`` are its place there.
    """

    node: Node
    slots: bytes = b""
    state: int = ABSENT
    filler: int = 0
    locks: int = 0
    kids: int = 0
    tick: int = 0
    lane: Lane | None = None
    older: Residency | None = None
    newer: Residency | None = None
    late: int = 0


class Node(msgspec.Struct, eq=False, gc=False):
    """A span of the tree.  ``end`` is its depth in pages, counted from token 0; splits and joins never change it.

    ``tag`` names the node in its children's keys and is empty once the node has left the tree.  ``hits`` counts the requests that
    have used it, ``priority`` is the highest of theirs.  ``dirty``: on the device alone, and its write-back has not failed since it
    was last used; ``stuck``: 1 if it is dirty, and 1 for each child that is stuck.  ``events`` are those of the forwards that
    compute its pages, kept until they have fired or its write-back is agreed.  ``told``: who knows of it (`changes`), local.
    """

    key: bytes
    rest: bytes
    tag: bytes
    parent: Node
    end: int
    at: tuple[Residency, ...] = ()
    kids: int = 0
    kid: Node | None = None  # first child; its siblings hang on ``next``
    next: Node | None = None
    prev: Node | None = None
    hits: int = 0
    priority: int = 0
    dirty: bool = False
    stuck: int = 0
    stored: int = UNSTORED
    events: tuple[object, ...] = ()
    told: int = 0

    @property
    def first(self) -> bytes:
        """Tokens of the first page, packed."""
        return self.key[TAG_BYTES:]


def _nowhere() -> Node:
    node = Node(b"", b"", b"", None, 0)  # type: ignore[arg-type]
    node.parent = node
    return node


NOWHERE: Final = _nowhere()
"""Parent of roots and of nodes that have left the tree."""


def cut(node: Node) -> None:
    """Drop all links of a node that has left the tree."""
    node.tag = b""
    node.parent = NOWHERE
    node.kid = node.next = node.prev = None
    node.events = ()
    for residency in node.at:
        residency.node = NOWHERE
        residency.lane = residency.older = residency.newer = None
    node.at = ()
