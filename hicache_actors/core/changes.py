"""What comes to a tier and leaves it, written down for those who keep an index of their own (`HiCache.events`).

Nothing is written down until somebody has asked (`Core.watch`), and nothing that is replicated depends on it: one rank may watch
alone.  A record names a node by its tag and says its tokens once, so it costs O(1), however deep the node lies; whoever reads the
records keeps the nodes by their tags (`hicache_actors.events.mirror`).

Pages count from the moment at which they can be used: what is filling is nowhere yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_actors.core.node import STORED, Node
from hicache_actors.core.records import (
    STORAGE,
    Added,
    Came,
    Cleared,
    Forgotten,
    Gone,
    Joined,
    Left,
    Record,
    Split,
    Told,
)
from hicache_actors.core.words import DEVICE, HOST, READY

if TYPE_CHECKING:
    from hicache_actors.core.tree import Tree


class Changes:
    """Writes down what happens to nodes that have been told of; a node whose parent has not been told of has not been either.

    What was in the tree before is told of piece by piece (`tell`), with what becomes of it until then.
    """

    def __init__(self, tree: Tree, number: int) -> None:
        self.records: list[Record] = [Cleared("begin")]
        self._tree, self._number = tree, number
        self._untold = list(tree.table.values())

    def tell(self, nodes: int) -> None:
        """Tell of at least ``nodes`` more nodes, or of all that are left."""
        untold = self._untold
        while untold and nodes > 0:
            node = untold.pop()
            if node.tag and node.told != self._number:
                nodes -= self._tell(node)
        self.records.append(Told(len(untold)))

    def take(self) -> list[Record]:
        records, self.records = self.records, []
        return records

    # -- hooks of the tree -------------------------------------------------------------------------------------------------

    def added(self, node: Node) -> None:
        self._tell(node)

    def split(self, tail: Node, head: Node, pages: int) -> None:
        if tail.told == self._number:
            head.told = self._number
            self.records.append(Split(tail.tag, head.tag, pages))
        else:
            self._untold.append(head)

    def joining(self, chain: list[Node]) -> None:
        """``chain``, top first, is about to become one node."""
        if chain[0].told == self._number:
            self._tell(chain[-1])
            self.records.append(Joined(tuple([node.tag for node in chain])))

    def removing(self, node: Node) -> None:
        if node.told == self._number:
            self.records.append(Gone(node.tag))

    def stored(self, node: Node) -> None:
        self._write(node, STORAGE)

    def cleared(self, why: Forgotten) -> None:
        if why != "storage":
            self._untold = []
        self.records.append(Cleared(why))

    # -- hooks of residencies ----------------------------------------------------------------------------------------------

    def came(self, node: Node, place: int) -> None:
        self._write(node, place)

    def left(self, node: Node, place: int) -> None:
        if node.told == self._number:
            self.records.append(Left(node.tag, place))

    # ----------------------------------------------------------------------------------------------------------------------

    def _write(self, node: Node, place: int) -> None:
        if node.told == self._number:
            self.records.append(Came(node.tag, place))

    def _tell(self, node: Node) -> int:
        """Tell of ``node`` and of what is above it and untold -> nodes told of."""
        path = []
        while node.end and node.told != self._number:
            path.append(node)
            node = node.parent
        for node in reversed(path):
            node.told = self._number
            above = node.parent
            scope = None if above.end else self._tree.scope_of(above)
            self.records.append(Added(node.tag, above.tag, scope, node.key, node.rest))
            for place in (DEVICE, HOST):
                if node.at[place].state == READY:
                    self.records.append(Came(node.tag, place))
            if node.stored == STORED:
                self.records.append(Came(node.tag, STORAGE))
        return len(path)
