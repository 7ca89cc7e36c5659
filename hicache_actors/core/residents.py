"""What is where, what is dirty, and who goes next.

Pages are counted here as they come to a place (`put`) and leave it (`vacate`); nobody else writes a residency's presence.

A node is *dirty* while its pages are on the device alone and may still be saved.  Where dirty pages are protected (write_back) they
are no victims, and neither is anything above them, since the device holds whole prefixes: such nodes are *stuck*.  They are counted
as they become so, walking up to the first ancestor that is stuck already; so `evictable` is exact, and a refusal evicts nothing.

Four queues list nodes without children, in the order of the eviction policy: ``device`` and ``host`` the victims there, ``dirty``
what is to be saved next (listed by its host residency, which is absent), ``twins`` what the host could give up because the device
has it, that which is used last first.  The last two are kept only where dirty pages are protected.  ``front`` is the beginning of
``host`` as far as `ahead` has looked at it.
"""

from __future__ import annotations

from collections.abc import Iterable

from hicache_actors.core.changes import Changes
from hicache_actors.core.front import Front
from hicache_actors.core.node import NOWHERE, PLACES, Node, Residency
from hicache_actors.core.order import Policy, Queue
from hicache_actors.core.words import ABSENT, DEVICE, HOST, READY, SLOT_BYTES

_SLICE_NODES = 2048


class Residents:
    """Counters per place: ``unlocked`` (pages without a lock) and ``resident`` (pages that nodes hold).

    Of the device: ``dirty_pages``, and ``stuck_pages`` (unlocked and stuck).  ``gaps``: nodes on the host whose parent is not.
    """

    def __init__(self, policy: Policy, *, protect_dirty: bool) -> None:
        self.policy = policy
        self.protects_dirty = protect_dirty
        self.device, self.host, self.dirty = (Queue(policy.order()) for _ in range(3))
        self.twins = Queue(policy.order(backwards=True))
        self.front = Front(policy)
        self.changes: Changes | None = None  # while somebody listens
        self._clock = 0
        self._unmoved: list[Node] = []
        self._forget()

    def _forget(self) -> None:
        self.unlocked = [0] * len(PLACES)
        self.resident = [0] * len(PLACES)
        self.dirty_pages = self.stuck_pages = self.gaps = 0

    @property
    def queues(self) -> tuple[Queue, ...]:
        return self.device, self.host, self.dirty, self.twins

    def evictable(self, place: int) -> int:
        """Pages that can be evicted; exact on the device."""
        if place == DEVICE and self.protects_dirty:
            return self.unlocked[DEVICE] - self.stuck_pages
        return self.unlocked[place]

    # -- coming and going ---------------------------------------------------------------------------------------------------

    def put(self, node: Node, place: int, slots: bytes, state: int, filler: int = 0) -> None:
        """Make an absent residency present.  The caller pins it or uses the node, so it need not be listed here."""
        host = node.at[HOST]
        residency, above = node.at[place], node.parent.at[place]
        assert residency.state == ABSENT
        if place == HOST and node.dirty:
            self._clean(node)
        residency.slots, residency.state, residency.filler = slots, state, filler
        if not self.policy.by_use:
            residency.tick = self._now()
        above.kids += 1
        if above.state and above.lane is not None:
            above.lane.discard(above)
        pages = len(slots) // SLOT_BYTES
        self.unlocked[place] += pages
        self.resident[place] += pages
        if place == HOST:
            self.gaps += (not above.state) - host.kids
        elif not host.state:
            self._soil(node)
        elif host.lane is not None and self.protects_dirty:
            self.enlist(node, HOST)
        if self.changes is not None and state == READY:
            self.changes.came(node, place)

    def filled(self, node: Node, place: int) -> None:
        """Its fill is agreed: a filling residency is ready."""
        residency = node.at[place]
        residency.state, residency.filler = READY, 0
        if self.changes is not None:
            self.changes.came(node, place)

    def vacate(self, node: Node, place: int) -> None:
        """A present residency becomes absent, its locks are the caller's to clear; its parent may be next to go."""
        residency, above = node.at[place], node.parent.at[place]
        if place == DEVICE and node.dirty:
            self._clean(node)
        if residency.lane is not None:
            residency.lane.discard(residency)
        if self.changes is not None and residency.state == READY:
            self.changes.left(node, place)
        pages = len(residency.slots) // SLOT_BYTES
        if not residency.locks:
            self.unlocked[place] -= pages
        self.resident[place] -= pages
        residency.slots, residency.state, residency.filler = b"", ABSENT, 0
        above.kids -= 1
        if above.state and self.policy.by_use and residency.tick > above.tick:
            above.tick = residency.tick  # a parent has been used whenever its child was
        if place == HOST:
            self.gaps += residency.kids - (not above.state)
            if node.at[DEVICE].state:
                self._soil(node)
        elif node.at[HOST].lane is not None and self.protects_dirty:
            self.enlist(node, HOST)
        if not above.kids:
            self.offer(place, above)

    # -- use ----------------------------------------------------------------------------------------------------------------

    def use(self, nodes: Iterable[Node], hits: int = 0, priority: int = 0, *, used_pages: int = 0) -> None:
        """These nodes of a path have been used now, by ``hits`` new requests; whoever is used now is evicted last.

        ``used_pages``: that request has been counted on the first so many pages of the path, unless they have been made anew.
        """
        tick = self._now()
        by_use = self.policy.by_use
        for node in nodes:
            device, host = node.at
            if by_use:
                if device.lane is not None:
                    device.lane.discard(device)
                if host.lane is not None:
                    host.lane.discard(host)
                device.tick = host.tick = tick
            if node.end > used_pages or not node.hits:
                node.hits += hits
            if priority > node.priority:
                node.priority = priority
            if device.state:
                if not host.state and not node.dirty:
                    self._soil(node)  # its write-back had failed: it may be asked for again
                elif node.dirty and node.stuck == 1 and host.lane is None:
                    self._list_dirty(node)
                if not device.kids and device.lane is None:
                    self.enlist(node, DEVICE)
            if host.state and not host.kids and host.lane is None:
                self.enlist(node, HOST)

    def _now(self) -> int:
        self._clock += 1
        return self._clock

    # -- listing ------------------------------------------------------------------------------------------------------------

    def enlist(self, node: Node, place: int) -> None:
        """List a present residency, locked or not, where it belongs now, unless pages there keep it from going."""
        residency = node.at[place]
        if residency.lane is not None:
            residency.lane.discard(residency)
        if residency.kids:
            return
        if place == DEVICE:
            if not node.stuck or not self.protects_dirty:
                self.device.offer(residency)
        elif self.protects_dirty and node.at[DEVICE].state:
            self.twins.offer(residency)
        else:
            self.host.offer(residency)

    def offer(self, place: int, residency: Residency) -> None:
        """List the residency if it has become a candidate of eviction, and is not listed."""
        if (
            residency.lane is None
            and residency.state
            and not residency.locks
            and not residency.kids
            and residency.node.parent is not NOWHERE
        ):
            self.enlist(residency.node, place)

    def offer_dirty(self, node: Node) -> None:
        """List what was popped from ``dirty`` again, if it is still to be saved."""
        if node.dirty and node.stuck == 1 and node.at[HOST].lane is None:
            self._list_dirty(node)

    def _list_dirty(self, node: Node) -> None:
        if self.protects_dirty:
            self.dirty.offer(node.at[HOST])

    def pop_host(self) -> Residency | None:
        """Unlist and return what the host gives up next; None when nothing is listed."""
        ready = self.front.peek() if self.front.pages else None
        if ready is None:
            return self.host.pop()
        other = self.host.peek()
        if other is not None and not self.moving and self.policy.before(other, ready):
            return self.host.pop()
        assert ready.lane is not None
        ready.lane.discard(ready)
        return ready

    def recall(self) -> None:
        """List what is in ``front`` where it was before: it is to be looked at again."""
        for residency in reversed(self.front.listed()):
            assert residency.lane is not None
            residency.lane.discard(residency)
            self.host.offer(residency)

    # -- dirty --------------------------------------------------------------------------------------------------------------

    def give_up(self, node: Node) -> None:
        """Its write-back has failed: it may be evicted, until it is used again."""
        if node.dirty:
            self._clean(node)

    def _soil(self, node: Node) -> None:
        device, host = node.at
        node.dirty = True
        self.dirty_pages += len(device.slots) // SLOT_BYTES
        if host.tick < device.tick:
            host.tick = device.tick
        at = node
        while at.end:
            at.stuck += 1
            device, host = at.at
            if at.stuck > 1:
                if at.dirty and host.lane is not None:
                    host.lane.discard(host)  # what is behind it is saved with it
                break
            if not device.locks:
                self.stuck_pages += len(device.slots) // SLOT_BYTES
            if self.protects_dirty and device.lane is not None:
                device.lane.discard(device)
            at = at.parent
        if node.stuck == 1:
            self._list_dirty(node)

    def _clean(self, node: Node) -> None:
        """It has a host copy (to be), or is no longer worth one, or is about to go."""
        host = node.at[HOST]
        node.dirty = False
        self.dirty_pages -= len(node.at[DEVICE].slots) // SLOT_BYTES
        if host.lane is not None:
            host.lane.discard(host)
        while node.end:
            node.stuck -= 1
            device = node.at[DEVICE]
            if node.stuck:
                if node.stuck == 1 and node.dirty:
                    self._list_dirty(node)
                return
            if not device.locks:
                self.stuck_pages -= len(device.slots) // SLOT_BYTES
            if self.protects_dirty and device.lane is None:
                self.enlist(node, DEVICE)
            node = node.parent

    # -- another policy -----------------------------------------------------------------------------------------------------

    def change(self, nodes: Iterable[Node], policy: Policy, *, protect_dirty: bool) -> None:
        """Order by another policy from now on.  ``nodes`` (all of the tree) are moved over in slices, by `move`."""
        self.recall()
        self.policy, self.protects_dirty = policy, protect_dirty
        self.front.renew(policy)
        for queue in self.queues:
            queue.exchange(policy.order(backwards=queue is self.twins))
        self._unmoved = list(nodes)
        self.move()

    @property
    def moving(self) -> bool:
        return bool(self._unmoved)

    def move(self) -> None:
        """List at most a few thousand of those that `change` has left in the old orders: a bounded stretch."""
        unmoved = self._unmoved
        for _ in range(min(_SLICE_NODES, len(unmoved))):
            node = unmoved.pop()
            if not node.tag:
                continue
            for place, residency in enumerate(node.at):
                listed = residency.lane
                if listed is not None:
                    listed.discard(residency)
                if residency.state and (listed is not None or not residency.locks):
                    self.enlist(node, place)
            if node.dirty and node.stuck == 1:
                self._list_dirty(node)
        if not unmoved:
            for queue in self.queues:
                queue.moved()

    def clear(self) -> None:
        """The tree is empty; its nodes are garbage."""
        self._unmoved = []
        for queue in self.queues:
            queue.drop()
        self.front.renew(self.policy)
        self._forget()
