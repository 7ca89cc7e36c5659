"""Leases: what a request pins, allocates and publishes, from `lease` to `release`.

pages     0 ............ usable ............ done ............ len(pages)
          found (or loading) | published, or a private twin | private: allocated, not committed
"""

from __future__ import annotations

from collections.abc import Iterable

from hicache_actors.core.fetch import Fetches
from hicache_actors.core.jobs import Job
from hicache_actors.core.lease import CoreLease
from hicache_actors.core.loads import Loads
from hicache_actors.core.node import Node
from hicache_actors.core.pins import Pin
from hicache_actors.core.state import Note, State
from hicache_actors.core.words import (
    ABSENT,
    DEVICE,
    FILLING,
    HOST,
    READY,
    Committed,
    Failure,
    Phase,
    Shortfall,
    StartDrain,
    Tokens,
)
from hicache_actors.errors import UsageError


class DrainJob(Job):
    """Takes over the pins and private slots of released leases until their events have fired.  Only RELEASED."""

    kind = "drain"

    def __init__(self, state: State) -> None:
        super().__init__(Phase.LIMBO, state.epoch)
        self.state = state
        self.events: dict[int, object] = {}
        self.holds: tuple[object, ...] = ()
        self.unsure: list[tuple[Pin, int]] = []  # pages of a pin from this one on may never be computed

    def take(self, pins: Iterable[Pin], events: Iterable[object]) -> None:
        self.pins += pins
        self.events.update((id(event), event) for event in events)

    def take_lease(self, lease: CoreLease, events: Iterable[object]) -> None:
        self.take([lease.pin], events)
        self.slots += lease.private_slots()
        self.holds += tuple(lease.holds)
        if lease.unsure_page is not None:
            self.unsure.append((lease.pin, lease.unsure_page))

    def effect(self) -> StartDrain:
        return StartDrain(self.id, tuple(self.events.values()), self.holds)

    def on_spoilt(self) -> None:
        """What the failed pass should have computed leaves the device.

        Which pass it was, and which pages it should have computed, only one rank knows: all that its leases have published with
        an event goes.
        """
        for pin, page in self.unsure:
            _, nodes = self.state.tree.cut_at(pin.tail, page, page)
            if nodes:
                self.state.saving.not_computed(nodes)

    def on_released(self) -> None:
        """They have fired everywhere: who saves these pages later need not keep them, nor wait for them."""
        for pin in self.pins:
            for node in self.state.tree.path(pin.tail, pin.start):
                if node.events:
                    node.events = tuple(event for event in node.events if id(event) not in self.events)


class Leases:
    """The engine's verbs on owned slots."""

    def __init__(self, state: State, loads: Loads, fetches: Fetches) -> None:
        self.state, self.loads, self.fetches = state, loads, fetches
        self._drain: DrainJob | None = None  # of the open section
        self._opened = 0

    # -- lease and load -----------------------------------------------------------------------------------------------------

    def lease(self, tokens: Tokens, rid: str, priority: int, *, blank: bool = False, used_tokens: int = 0) -> CoreLease:
        """Pin what the device holds (or is being given) of the prompt; its tail is now the most recently used.

        ``blank``: take nothing, as if nothing were cached.  ``used_tokens``: see `Core.lease`.
        """
        state, tree = self.state, self.state.tree
        self.fetches.on_lease(rid)
        root = tree.root(tokens.scope)
        lease = CoreLease(rid, tokens, priority, state.pins.pin(DEVICE, root), state.page, self.fetches.take(rid))
        lease.number = self._opened
        self._opened += 1
        lease.order = state.next_order()
        lease.used_pages = used_tokens // state.page
        if state.degraded:
            lease.fail("degraded", 0)
        asked = state.pages_asked(tokens)
        if blank:
            lease.left_on_host(asked, "shadow")
        else:
            self._descend(lease, asked)
            lease.left_on_host(self._host_end(lease, asked) - len(lease.pages), None)
        state.leases[rid] = lease
        state.note(Note.LEASE, len(lease.pages), state.text(rid))
        return lease

    def _descend(self, lease: CoreLease, stop: int) -> None:
        """Extend the lease over what is present on the device, up to page ``stop``."""
        tree, pin = self.state.tree, lease.pin
        key, node = lease.tokens.packed, pin.tail
        begin = page = node.end
        passed: list[Node] = []
        fills: list[int] = []
        while page < stop:
            child = tree.child(node, key, page)
            if child is None or not child.at[DEVICE].state:
                break
            depth = tree.shared(child, key, page, stop)
            if depth < child.end:
                child = tree.split(child, depth)
            residency = child.at[DEVICE]
            passed.append(child)
            if residency.state == FILLING:
                fills.append(residency.filler)
                lease.credit(page, depth, "host")
            else:
                lease.credit(page, depth, "device")
                if not fills and not lease.loads:
                    lease.ready_tokens = depth * self.state.page
            node, page = child, depth
        if page > begin:
            self._reach(lease, passed)
            for job_id in dict.fromkeys(fills):
                self._wait_for(lease, job_id)
            self.state.saving.passed(node, lease.tokens)

    def _reach(self, lease: CoreLease, nodes: list[Node]) -> None:
        """The lease takes ``nodes``, which follow its pages: one use of each, unless this request has had it before."""
        tail = nodes[-1]
        lease.pages.frombytes(b"".join([node.at[DEVICE].slots for node in nodes]))
        self.state.pins.extend(lease.pin, tail)
        self.state.residents.use(nodes, 1, lease.priority, used_pages=lease.used_pages)
        lease.done_pages = tail.end
        lease.usable_tokens = lease.capacity_tokens = tail.end * self.state.page

    def _wait_for(self, lease: CoreLease, job_id: int) -> None:
        if job_id not in lease.loads:
            lease.loads.append(job_id)
            self.loads.hold(job_id, lease.number)

    def _host_end(self, lease: CoreLease, stop: int) -> int:
        """Page where the run that could be loaded now ends."""
        tree, node, key = self.state.tree, lease.pin.tail, lease.tokens.packed
        page = node.end
        while page < stop:
            child = tree.child(node, key, page)
            if child is None or child.at[HOST].state != READY:
                break
            page = tree.shared(child, key, page, stop)
            if page < child.end:
                break
            node = child
        return page

    def load(self, lease: CoreLease, max_tokens: int | None, limit: str = "load_limit") -> tuple[int, ...] | Shortfall:
        """Load what the host holds beyond the lease's pages, at most ``max_tokens`` of it, all of that or nothing.

        ``limit`` is the reason for the account when ``max_tokens`` leaves pages on the host.
        """
        state, tree = self.state, self.state.tree
        self._check_open(lease)
        if lease.failed is not None:
            failed = lease.failed
            return Shortfall("load_failed" if failed == "twin_failed" else failed)
        if state.degraded:
            return Shortfall("degraded")
        asked = state.pages_asked(lease.tokens)
        stop = asked if max_tokens is None else min(asked, len(lease.pages) + max_tokens // state.page)
        if lease.allocated:
            return Shortfall("after_allocate", max(0, self._host_end(lease, asked) - lease.done_pages))
        self._descend(lease, stop)  # what others have loaded or published meanwhile
        key, node = lease.tokens.packed, lease.pin.tail
        start = page = node.end
        nodes = []
        while page < stop:
            child = tree.child(node, key, page)
            if child is None or child.at[HOST].state != READY:
                break
            depth = tree.shared(child, key, page, stop)
            if depth < child.end:
                child = tree.split(child, depth)
            nodes.append(child)
            node, page = child, depth
        if nodes:
            job_id = self.loads.open(lease, nodes, start)
            if isinstance(job_id, Shortfall):
                lease.left_on_host(self._host_end(lease, asked) - start, job_id.reason)
                return job_id
            self._wait_for(lease, job_id)
            lease.credit(start, page, "host")
            self._reach(lease, nodes)
        lease.left_on_host(self._host_end(lease, asked) - lease.done_pages, None if max_tokens is None else limit)
        return tuple(lease.loads)

    # -- allocate and commit ------------------------------------------------------------------------------------------------

    def allocate(self, lease: CoreLease, n_tokens: int) -> Shortfall | None:
        """Private pages for ``n_tokens`` more tokens; evicts, never waits."""
        state = self.state
        self._check_open(lease)
        if n_tokens < 0:
            raise UsageError(f"allocate({n_tokens}): a count of tokens is not negative")
        total = lease.capacity_tokens + n_tokens
        need = -(-total // state.page) - len(lease.pages)
        if need > 0:
            slots = self.loads.rooms.take(lease, need)
            if slots is None:
                return state.evictor.shortfall(need, self.loads.rooms.within_reach(lease))
            lease.pages.frombytes(slots)
            lease.allocated = True
        lease.capacity_tokens = total
        state.note(Note.ALLOCATE, need, total, state.text(lease.rid))
        return None

    def commit(self, lease: CoreLease, n_tokens: int, after: object | None) -> Committed:
        """Tokens [0, n_tokens) are computed at ``after``: publish the whole pages of them."""
        state, tree = self.state, self.state.tree
        self._check_open(lease)
        if not 0 <= n_tokens <= min(lease.capacity_tokens, len(lease.tokens)):
            raise UsageError(
                f"commit({n_tokens}): the lease has room for {lease.capacity_tokens} tokens, "
                f"the prompt holds {len(lease.tokens)} (append what was generated first)"
            )
        if after is not None:
            lease.events.append(after)
        if lease.failed is not None:
            return Committed(0, lease.private_pages, lease.failed)
        if not state.config.enabled:
            return Committed(0, lease.private_pages)
        stop = n_tokens // state.page
        node, published = lease.pin.tail, 0
        page = node.end
        if page < stop:
            key, pages = lease.tokens.packed, lease.pages
            passed: list[Node] = []
            events = () if after is None else (after,)
            while page < stop:
                child = tree.child(node, key, page)
                if child is None:
                    child, depth = tree.add(node, key, page, stop), stop
                else:
                    depth = tree.shared(child, key, page, stop)
                    if depth < child.end:
                        child = tree.split(child, depth)
                device = child.at[DEVICE]
                if device.state == ABSENT:
                    state.residents.put(child, DEVICE, pages[page:depth].tobytes(), READY)
                    published += depth - page
                    if events and lease.unsure_page is None:
                        lease.unsure_page = page
                    child.events = events  # even if the host has them: it may lose them before the pass has ended
                else:
                    lease.twins.append((page, depth))
                passed.append(child)
                node, page = child, depth
            state.pins.extend(lease.pin, node)
            state.residents.use(passed, 1, lease.priority, used_pages=lease.used_pages)
            lease.done_pages = stop
            state.note(Note.COMMIT, stop, published, state.text(lease.rid))
            state.changed = True
            state.saving.passed(node, lease.tokens)
        return Committed(published, lease.private_pages)

    # -- hold and release ---------------------------------------------------------------------------------------------------

    def hold(self, lease: CoreLease, event: object) -> None:
        """Keep the lease's slots, after its release, until ``event`` has fired."""
        self._check_open(lease)
        lease.holds.append(event)

    def release(self, lease: CoreLease, after: object | None) -> None:
        """End the lease: at once, or through a drain job if it was ever given an event or a hold."""
        state = self.state
        if lease.closed:
            return
        lease.closed = True
        del state.leases[lease.rid]
        if lease.allocated:
            state.totals.served(lease.account)
        else:
            state.totals.returned()
            if lease.fetched is not None:
                self.fetches.give_back(lease.rid, lease.fetched)
        events = lease.events if after is None else [*lease.events, after]
        if lease.holds:
            job = self._new_drain()
            job.take_lease(lease, events)
            state.effects.append(job.effect())
        elif events:  # their presence counts, not whether they have fired: that is local
            self._drain_here().take_lease(lease, events)
        else:
            state.pins.unpin([lease.pin])
            state.pools[DEVICE].give(lease.private_slots())
        state.note(Note.RELEASE, len(lease.pages), state.text(lease.rid))

    def drain(self, pins: Iterable[Pin], events: Iterable[object]) -> None:
        """This section's drain job keeps ``pins`` until all ``events`` have fired."""
        self._drain_here().take(pins, events)

    def _drain_here(self) -> DrainJob:
        if self._drain is None:
            self._drain = self._new_drain()
        return self._drain

    def _new_drain(self) -> DrainJob:
        job = DrainJob(self.state)
        self.state.jobs.add(job)
        self.state.note(Note.DRAIN, job.id)
        return job

    def end_section(self) -> None:
        if self._drain is not None:
            self.state.effects.append(self._drain.effect())
            self._drain = None

    def fail_all(self, failure: Failure) -> None:
        """Reset or degrade: no lease publishes any more; those with an open load must not use what it was to bring."""
        for lease in self.state.leases.values():
            if failure == "degraded" and not all(map(self.loads.settled, lease.loads)):
                lease.fail("load_failed", lease.ready_tokens // self.state.page)
            lease.fail(failure, lease.done_pages)

    def _check_open(self, lease: CoreLease) -> None:
        if lease.closed:
            raise UsageError(f"the lease of request {lease.rid!r} has been released")
