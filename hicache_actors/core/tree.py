"""The prefix tree: compressed, page-aligned, one root per scope.

Spans are packed int64 tokens.  A prompt's buffer is compared in place: ``bytes.startswith(view)`` is memcmp without a copy
(``memoryview ==`` compares item by item, never use it).  Depths and counts are in pages; ``key`` is always the whole prompt's view.

Closed under prefixes: a node present on the device has all its ancestors there, and a node that is on neither tier leaves the tree
with everything below it (`pins.Pins.lose` sees to both).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from hicache_actors.core.node import NOWHERE, PLACES, STORED, TAG_BYTES, UNSTORED, Node, Residency, cut
from hicache_actors.core.residents import Residents
from hicache_actors.core.words import DEVICE, FILLING, HOST, READY, SLOT_BYTES, TOKEN_BYTES
from hicache_actors.keys.scope import Scope

_MAX_HINTS = 1024
_SLICE_NODES = 2048
_MIN_ROOTS = 1024


class Tree:
    """Nodes and their links; it moves no slots and knows neither pins nor jobs.

    ``pages`` are those in the tree, ``stored_pages`` those of them that the storage has acknowledged; ``residents`` knows where
    they are.  Nodes of unequal ``traits`` are never joined.
    """

    def __init__(self, page_size: int, residents: Residents, traits: Callable[[Node], object] = lambda _: None) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self.residents = residents
        self._traits = traits
        self.table: dict[bytes, Node] = {}
        self.roots: dict[Scope, Node] = {}
        self._scopes: dict[bytes, Scope] = {}
        self._garbage: list[dict[bytes, Node]] = []
        self.hints: dict[bytes, int] = {}  # child key -> depth in pages that the storage was last seen to reach
        self.pages = self.stored_pages = 0
        self._tags = 0
        self._most_roots = 2 * _MIN_ROOTS

    # -- walking: changes nothing -------------------------------------------------------------------------------------------

    def root(self, scope: Scope) -> Node:
        """The root of a scope, made on first use.  It holds no pages and is present everywhere."""
        root = self.roots.get(scope)
        if root is None:
            root = Node(b"", b"", self._new_tag(), NOWHERE, 0)
            root.at = tuple(Residency(root, state=READY) for _ in PLACES)
            self.roots[scope] = root
            self._scopes[root.tag] = scope
        return root

    def scope_of(self, node: Node) -> Scope:
        while node.parent is not NOWHERE:
            node = node.parent
        return self._scopes[node.tag]

    def match(self, key: memoryview, scope: Scope, stop: int) -> tuple[int, int, int, int]:
        """-> pages of ``key[:stop]`` that are (ready on the device, present there, present on any tier, hinted at by storage).

        Each count is the depth of one of the ends of the walk: the last node that may run now, the last on the device, the last
        that can be had at all.
        """
        node = self.roots.get(scope)
        if node is None:
            return 0, 0, 0, 0
        page_bytes, table = self.page_bytes, self.table
        at, end = 0, stop * page_bytes
        ready = present = depth = 0
        on_device = all_ready = True
        while at < end:
            after = at + page_bytes
            child_key = node.tag + key[at:after]
            child = table.get(child_key)
            if child is None:
                return ready, present, depth, min(stop, max(depth, self.hints.get(child_key, 0)))
            depth = child.end
            at = depth * page_bytes
            whole = at <= end and child.rest.startswith(key[after:at])
            if not whole:
                depth = self.shared(child, key, after // page_bytes - 1, stop)
            device, host = child.at[DEVICE].state, child.at[HOST].state
            if on_device and device:
                present = depth
                if all_ready and device == READY:
                    ready = depth
                else:
                    all_ready = False
            elif host == READY:
                on_device = False
            else:
                return ready, present, node.end, node.end
            if not whole:
                break
            node = child
        return ready, present, depth, depth

    def child(self, node: Node, key: memoryview, page: int) -> Node | None:
        """The child of ``node`` that starts with page ``page`` of ``key``."""
        begin = page * self.page_bytes
        return self.table.get(node.tag + key[begin : begin + self.page_bytes])

    def shared(self, child: Node, key: memoryview, page: int, stop: int) -> int:
        """How deep ``key[:stop]`` follows ``child``, whose first page is page ``page`` of it: > page, <= child.end."""
        page_bytes, rest = self.page_bytes, child.rest
        low = page + 1  # equal up to here
        high = min(child.end, stop)
        base = low * page_bytes
        if rest.startswith(key[base : high * page_bytes]):
            return high
        while high - low > 1:  # and different before there
            middle = (low + high) >> 1
            if rest.startswith(key[low * page_bytes : middle * page_bytes], low * page_bytes - base):
                low = middle
            else:
                high = middle
        return low

    def start(self, node: Node) -> int:
        """Depth in pages where the node's span begins."""
        return node.end - 1 - len(node.rest) // self.page_bytes

    def path(self, tail: Node, start: int) -> list[Node]:
        """Nodes that cover pages [start, tail.end), top first."""
        out = []
        while tail.end > start:
            out.append(tail)
            tail = tail.parent
        out.reverse()
        return out

    def path_tokens(self, tail: Node) -> bytes:
        """Packed tokens from the root to the end of ``tail``."""
        parts: list[bytes] = []
        for node in self.path(tail, 0):
            parts += (node.first, node.rest)
        return b"".join(parts)

    def children(self, node: Node) -> Iterator[Node]:
        kid = node.kid
        while kid is not None:
            yield kid
            kid = kid.next

    def subtree(self, top: Node) -> list[Node]:
        """``top`` and everything below it, parents before children."""
        out = [top]
        for node in out:
            out.extend(self.children(node))
        return out

    # -- growing and cutting ------------------------------------------------------------------------------------------------

    def add(self, parent: Node, key: memoryview, page: int, stop: int) -> Node:
        """A new child for pages [page, stop) of ``key``; the caller `put`s it somewhere at once."""
        page_bytes = self.page_bytes
        after = (page + 1) * page_bytes
        node = Node(
            parent.tag + key[after - page_bytes : after],
            bytes(key[after : stop * page_bytes]),
            self._new_tag(),
            parent,
            stop,
        )
        node.at = tuple(Residency(node) for _ in PLACES)
        self._link(parent, node)
        self.pages += stop - page
        if self.residents.changes is not None:
            self.residents.changes.added(node)
        return node

    def split(self, node: Node, depth: int) -> Node:
        """Cut the node at ``depth`` (pages, inside its span) -> the new head.  The tail keeps its identity, so pins hold."""
        page_bytes = self.page_bytes
        pages = depth - self.start(node)
        rest = node.rest
        cut_at = (pages - 1) * page_bytes
        head = Node(
            node.key,
            rest[:cut_at],
            self._new_tag(),
            node.parent,
            depth,
            hits=node.hits,
            priority=node.priority,
            dirty=node.dirty,
            stuck=node.dirty + (node.stuck > 0),
            stored=node.stored,
            events=node.events,
        )
        head.at = tuple(Residency(head) for _ in PLACES)
        for upper, lower in zip(head.at, node.at, strict=True):
            upper.tick = lower.tick  # of absent ones too: it is what they come with, or are saved by
            if lower.state:
                cut_slots = pages * SLOT_BYTES
                upper.slots, lower.slots = lower.slots[:cut_slots], lower.slots[cut_slots:]
                upper.state, upper.filler, upper.locks, upper.kids = lower.state, lower.filler, lower.locks, 1
        self.residents.front.resized(node.at[HOST])
        self._replace(node, head)
        node.key = head.tag + rest[cut_at : cut_at + page_bytes]
        node.rest = rest[cut_at + page_bytes :]
        self._link(head, node)
        node.parent = head
        if self.residents.changes is not None:
            self.residents.changes.split(node, head, pages)
        return head

    def cut_at(self, tail: Node, start: int, depth: int) -> tuple[list[Node], list[Node]]:
        """Nodes of pages [start, tail.end) above and below ``depth``, which becomes a boundary between nodes."""
        above: list[Node] = []
        below: list[Node] = []
        for node in self.path(tail, start):
            if node.end <= depth:
                above.append(node)
            elif self.start(node) < depth:
                above.append(self.split(node, depth))
                below.append(node)
            else:
                below.append(node)
        return above, below

    def remove(self, node: Node) -> None:
        """Take a childless node that is present nowhere out of the tree."""
        assert not node.kids
        if self.residents.changes is not None:
            self.residents.changes.removing(node)
        self._unlink(node)
        pages = node.end - self.start(node)
        self.pages -= pages
        if node.stored == STORED:
            self.stored_pages -= pages
        cut(node)

    def set_stored(self, node: Node, stored: int) -> None:
        self.stored_pages += ((stored == STORED) - (node.stored == STORED)) * (node.end - self.start(node))
        node.stored = stored
        if stored == STORED and self.residents.changes is not None:
            self.residents.changes.stored(node)

    # -- joining ------------------------------------------------------------------------------------------------------------

    def join(self, tail: Node) -> int:
        """Join the single-child chains through ``tail`` -> nodes that went.

        Only equals are joined: same residencies, none filling, unlocked, same standing with the storage, equal in what the policies
        look at, and the upper not used later than the lower (so eviction stays exact).  Decode commits page by page; this makes two
        nodes of 384.
        """
        if tail.tag == b"" or tail.parent is NOWHERE:
            return 0
        while tail.kids == 1 and (kid := tail.kid) is not None and self._joinable(tail, kid):
            tail = kid
        gone = 0
        # pins on the device reach to the root: above a locked node everything is locked
        while tail.parent is not NOWHERE and not tail.at[DEVICE].locks:
            chain = [tail]
            up = tail.parent
            while up.kids == 1 and self._joinable(up, chain[-1]):
                chain.append(up)
                up = up.parent
            if len(chain) > 1:
                chain.reverse()
                self._join_chain(chain)
                gone += len(chain) - 1
            tail = up
        return gone

    def _joinable(self, upper: Node, lower: Node) -> bool:
        if upper.parent is NOWHERE or upper.stored != lower.stored or upper.stored not in (UNSTORED, STORED):
            return False
        if upper.dirty != lower.dirty or self._traits(upper) != self._traits(lower):
            return False
        for above, below in zip(upper.at, lower.at, strict=True):
            if above.state != below.state or above.state == FILLING or above.locks or below.locks:
                return False
            if above.state and above.tick > below.tick:
                return False
        return True

    def _join_chain(self, chain: list[Node]) -> None:
        if self.residents.changes is not None:
            self.residents.changes.joining(chain)
        top, tail = chain[0], chain[-1]
        parts = [top.rest]
        for node in chain[1:]:
            parts += (node.first, node.rest)
            del self.table[node.key]
        self._replace(top, tail)
        tail.key, tail.rest = top.key, b"".join(parts)
        tail.parent = top.parent
        tail.events = tuple({id(event): event for node in chain for event in node.events}.values())
        for place, residency in enumerate(tail.at):
            residency.slots = b"".join([node.at[place].slots for node in chain])
        self.residents.front.resized(tail.at[HOST])
        for node in chain[:-1]:
            cut(node)

    # -- scopes -------------------------------------------------------------------------------------------------------------

    @property
    def has_idle_roots(self) -> bool:
        """There are so many roots that it is worth a look at them."""
        return len(self.roots) > self._most_roots

    def drop_roots(self, held: Iterable[Node]) -> None:
        """Forget scopes of which no page is here; ``held``: nodes that somebody may go on from.  O(roots), each time when they have
        doubled: a salt may be that of a session, and there is no end to them.
        """
        kept = {id(node) for node in held}
        for scope, root in [*self.roots.items()]:
            if not root.kids and id(root) not in kept:
                del self.roots[scope], self._scopes[root.tag]
        self._most_roots = 2 * max(_MIN_ROOTS, len(self.roots))

    # -- forgetting everything ----------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Empty the tree at once; the old nodes' links are cut later, in slices (`cut_garbage`).  Roots stay."""
        if self.table:
            self._garbage.append(self.table)
        self.table = {}
        self.hints.clear()
        for root in self.roots.values():
            root.kid, root.kids = None, 0
            for residency in root.at:
                residency.kids = residency.locks = 0
        self.residents.clear()
        self.pages = self.stored_pages = 0

    @property
    def has_garbage(self) -> bool:
        return bool(self._garbage)

    def cut_garbage(self) -> None:
        """Cut at most a few thousand nodes of those that `clear` left: a bounded stretch, call it until `has_garbage` ends."""
        for _ in range(_SLICE_NODES):
            if not self._garbage:
                return
            table = self._garbage[-1]
            if not table:
                self._garbage.pop()
                continue
            cut(table.popitem()[1])

    # -- hints --------------------------------------------------------------------------------------------------------------

    def hint(self, node: Node, key: memoryview, page: int, depth: int) -> None:
        """The storage was seen to hold ``key`` down to ``depth``; the tree holds it down to page ``page``, the end of ``node``."""
        begin = page * self.page_bytes
        child_key = node.tag + key[begin : begin + self.page_bytes]
        self.hints.pop(child_key, None)
        self.hints[child_key] = depth
        if len(self.hints) > _MAX_HINTS:
            del self.hints[next(iter(self.hints))]

    # -- links --------------------------------------------------------------------------------------------------------------

    def _new_tag(self) -> bytes:
        self._tags += 1
        return self._tags.to_bytes(TAG_BYTES, "little")

    def _link(self, parent: Node, node: Node) -> None:
        self.table[node.key] = node
        first = node.next = parent.kid
        node.prev = None
        if first is not None:
            first.prev = node
        parent.kid = node
        parent.kids += 1

    def _unlink(self, node: Node) -> None:
        del self.table[node.key]
        before, after, parent = node.prev, node.next, node.parent
        if before is None:
            parent.kid = after
        else:
            before.next = after
        if after is not None:
            after.prev = before
        parent.kids -= 1

    def _replace(self, old: Node, new: Node) -> None:
        """``new`` takes the place of ``old`` among its siblings and in the table (under the old key)."""
        self.table[old.key] = new
        before, after = new.prev, new.next = old.prev, old.next
        if before is None:
            old.parent.kid = new
        else:
            before.next = new
        if after is not None:
            after.prev = new
