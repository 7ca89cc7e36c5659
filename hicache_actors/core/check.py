"""Core's invariants, recomputed, and a digest of the whole state.  For tests: both cost O(state).

Checked: links, table and sibling order; spans are whole pages; counts of slots equal spans; device residency closed under prefixes;
no node on neither tier; locks equal the pins that cover a node (so they fall towards the leaves on the device); counters of pages
(resident, evictable, dirty, stuck, stored) and of children equal their recomputation; every candidate of eviction is listed;
filling is pinned, by the job that fills; each open slot has one owner, and free + owned + limbo + closed = total; staging is what
prefetches hold.

Not kept by design, so not checked: host residency closed under prefixes (a failed or refused write-back leaves a gap above pages
that were written); sets of leaves per tier (an order may list more than the candidates); host pins up to the root.
"""

from __future__ import annotations

import zlib
from collections import Counter

from hicache_actors.core.blocks import Blocks
from hicache_actors.core.fetch import Fetches, PrefetchJob
from hicache_actors.core.node import NOWHERE, PLACES, SAVING, STORED, UNSTORED, WAITING, Node
from hicache_actors.core.pins import Pin
from hicache_actors.core.room import Rooms
from hicache_actors.core.saving import Saving
from hicache_actors.core.state import State
from hicache_actors.core.usage import tier_usage
from hicache_actors.core.waiting import Waiting
from hicache_actors.core.words import ABSENT, DEVICE, FILLING, HOST, READY, SLOT_BYTES, Phase, unpack_slots


def nodes_of(state: State) -> list[Node]:
    """All nodes below the roots, parents before children."""
    out: list[Node] = []
    for root in state.tree.roots.values():
        out += state.tree.subtree(root)[1:]
    return out


def check(state: State, saving: Saving, fetches: Fetches) -> None:
    nodes = nodes_of(state)
    _check_shape(state, nodes)
    _check_locks(state, nodes)
    for place in PLACES:
        _check_order(state, nodes, place)
        _check_slots(state, nodes, place)
    _check_dirty(state, nodes)
    staged = sum(len(job.slots) for job in state.jobs.open.values() if isinstance(job, PrefetchJob))
    assert fetches.staged_pages == staged // SLOT_BYTES, "staging is what prefetches hold"
    assert fetches.staged_pages <= max(0, state.pools[HOST].opened // 2), "staging beyond its budget"
    _check_jobs(state, nodes, saving)


def _check_shape(state: State, nodes: list[Node]) -> None:
    tree = state.tree
    assert len(tree.table) == len(nodes), "the table and the tree differ"
    assert tree.pages == sum(node.end - tree.start(node) for node in nodes), "pages"
    assert tree.stored_pages == sum(node.end - tree.start(node) for node in nodes if node.stored == STORED), (
        "stored_pages"
    )
    for node in [*tree.roots.values(), *nodes]:
        kids = list(tree.children(node))
        assert node.kids == len(kids), "children count"
        for place in PLACES:
            assert node.at[place].kids == sum(kid.at[place].state != ABSENT for kid in kids), (
                "children present at a place"
            )
            assert node.at[place].node is node
        before = None
        for kid in kids:
            assert kid.parent is node, "parent link"
            assert kid.prev is before, "sibling link"
            before = kid
            assert kid.key.startswith(node.tag), "key of another parent"
            assert len(kid.first) == tree.page_bytes, "first page"
            assert len(kid.rest) % tree.page_bytes == 0, "a span of whole pages"
            assert tree.table[kid.key] is kid, "table entry"
            assert tree.start(kid) == node.end, "depth"
            assert any(residency.state for residency in kid.at), "a node on no tier"
            assert kid.at[DEVICE].state == ABSENT or node.at[DEVICE].state, "device residency is closed under prefixes"
            for residency in kid.at:
                pages = kid.end - tree.start(kid) if residency.state else 0
                assert len(residency.slots) == pages * SLOT_BYTES, "slots equal span"
                assert (residency.state == FILLING) == bool(residency.filler), "filler"


def _check_locks(state: State, nodes: list[Node]) -> None:
    locks: Counter[tuple[int, int]] = Counter()
    for pin in state.pins.all.values():
        at = pin.tail
        while at.end > pin.start:
            assert at.parent is not NOWHERE, "a pin on a node that has left the tree"
            assert at.at[pin.place].state, "a pin on an absent residency"
            locks[id(at), pin.place] += 1
            at = at.parent
    for node in nodes:
        for place in PLACES:
            assert node.at[place].locks == locks[id(node), place], "locks equal pins"
    holders: Counter[int] = Counter(id(stray) for pin in state.pins.all.values() for stray in pin.strays)
    for place in PLACES:
        for stray in state.pins.strays(place):
            assert stray.holders == holders[id(stray)], "holders of a stray"


def _check_order(state: State, nodes: list[Node], place: int) -> None:
    residents = state.residents
    protected = residents.protects_dirty
    queues = {DEVICE: (residents.device,), HOST: (residents.host, residents.twins, residents.front)}[place]
    listed = [residency for queue in queues for residency in queue.listed()]
    ids = {id(residency) for residency in listed}
    assert len(ids) == len(listed), "listed twice"
    present = {id(node.at[place]) for node in nodes if node.at[place].state}
    assert ids <= present, "a listed residency that is absent"
    assert all(residency.lane is not None and not residency.kids for residency in listed), "listed above others"
    free = [node.at[place] for node in nodes if node.at[place].state and not node.at[place].locks]
    for residency in free:
        assert residency.state == READY, "filling without a lock"
        stuck = place == DEVICE and protected and residency.node.stuck
        assert residency.kids or stuck or id(residency) in ids, "a candidate that is not listed"
    unlocked = sum(len(residency.slots) for residency in free) // SLOT_BYTES
    assert residents.unlocked[place] == unlocked, "evictable"
    resident = sum(len(node.at[place].slots) for node in nodes) // SLOT_BYTES
    assert residents.resident[place] == resident, "resident"
    front = residents.front
    assert front.pages == sum(len(residency.slots) for residency in front.listed()) // SLOT_BYTES, "front"


def _check_dirty(state: State, nodes: list[Node]) -> None:
    residents = state.residents
    dirty = stuck = 0
    for node in nodes:
        device, host = node.at
        pages = len(device.slots) // SLOT_BYTES
        assert not node.dirty or (device.state and not host.state), "dirty, and not on the device alone"
        kids = sum(kid.stuck > 0 for kid in state.tree.children(node))
        assert node.stuck == kids + node.dirty, "stuck"
        dirty += pages * node.dirty
        stuck += pages * (node.stuck > 0 and not device.locks)
    assert residents.dirty_pages == dirty, "dirty_pages"
    assert residents.stuck_pages == stuck, "stuck_pages"
    assert residents.gaps == sum(bool(n.at[HOST].state and not n.parent.at[HOST].state) for n in nodes), "gaps"
    listed = {id(residency.node) for residency in residents.dirty.listed()}
    leaves = {id(node) for node in nodes if node.dirty and node.stuck == 1}
    assert listed <= leaves, "to be saved, and not dirty, or above others"
    if residents.protects_dirty and not residents.moving:
        assert listed == leaves, "dirty, and never to be saved"


def _check_slots(state: State, nodes: list[Node], place: int) -> None:
    pool = state.pools[place]
    held = pool.free_slots()
    for node in nodes:
        held += unpack_slots(node.at[place].slots)
    for stray in state.pins.strays(place):
        held += unpack_slots(stray.slots)
    for job in state.jobs.open.values():
        if job.place == place:
            held += unpack_slots(job.slots)
    if place == DEVICE:
        for lease in state.leases.values():
            held += unpack_slots(lease.private_slots())
        for room in state.reservations.values():
            held += unpack_slots(room.slots)
    assert sorted(held) == list(range(pool.opened)), "each slot has one owner"
    figures = tier_usage(state, place)
    in_use = figures.free_pages + figures.owned_pages + figures.limbo_pages
    assert in_use + figures.closed_pages == figures.total_pages, "conservation"


def _check_jobs(state: State, nodes: list[Node], saving: Saving) -> None:
    waiting = {(retry.scope, bytes(retry.key[: retry.stop * state.tree.page_bytes])) for retry in saving.retries}
    for node in nodes:
        for residency in node.at:
            if residency.state == FILLING:
                job = state.jobs.open[residency.filler]
                assert job.phase is Phase.RUN, "filled by a job that has ended"
        if node.stored == SAVING:
            assert node.at[HOST].locks, "saved without a pin"
        assert state.storage or node.stored == UNSTORED, "stored nowhere"
        if node.stored == WAITING:
            assert node.at[HOST].state == READY, "waits for a retry, but is not on the host"
            scope, key = state.tree.scope_of(node), state.tree.path_tokens(node)
            assert any(scope == where and path.startswith(key) for where, path in waiting), "waits for no retry"


# -- digest -----------------------------------------------------------------------------------------------------------------


def state_digest(state: State, saving: Saving, fetches: Fetches, waiting: Waiting, blocks: Blocks, rooms: Rooms) -> int:
    """32 bits over everything that may influence a later decision."""

    def pin_facts(pin: Pin) -> tuple[object, ...]:
        return pin.uid, pin.place, pin.tail.tag, pin.start, [(stray.slots, stray.holders) for stray in pin.strays]

    nodes = [
        (
            node.tag,
            node.key,
            node.rest,
            node.end,
            node.hits,
            node.priority,
            (node.dirty, node.stuck),
            node.stored,
            [(r.slots, r.state, r.filler, r.locks, r.kids, r.tick) for r in node.at],
        )
        for node in nodes_of(state)
    ]
    facts = (
        nodes,
        [[residency.node.tag for residency in queue.listed()] for queue in state.residents.queues],
        [residency.node.tag for residency in state.residents.front.listed()],
        (state.policies.write, state.policies.eviction.name, state.policies.store_on, state.residents.moving),
        [(pool.opened, pool.free_slots()) for pool in state.pools],
        [pin_facts(pin) for pin in state.pins.all.values()],
        [(job.id, job.kind, job.phase, job.slots, [pin.uid for pin in job.pins]) for job in state.jobs.open.values()],
        [
            (lease.rid, lease.pages.tobytes(), lease.twins, lease.done_pages, lease.failed, lease.loads)
            for lease in state.leases.values()
        ],
        [(retry.due_ms, retry.start, retry.stop, retry.tries) for retry in saving.retries],
        list(state.tree.hints.items()),
        (state.storage, state.storage_epoch, [node.tag for node in state.backlog]),
        [(waiter, acquire.rid, acquire.job) for waiter, acquire in waiting.acquires.items()],
        [(waiter, entry.asked_pages) for waiter, entry in waiting.stores.items()],
        (list(waiting.drains), saving.backup_pages, saving.gathers_until_ms, saving.ahead.facts()),
        [
            (rid, look.found_pages, look.fetch_job, look.may_fetch, [pin.uid for pin in look.pins])
            for rid, look in blocks.looks.items()
        ],
        rooms.facts(),
        (state.news.loads, state.news.saves, state.news.ended),
        fetches.staged_pages,
        state.now_ms,
        state.epoch,
        state.degraded,
        state.log_digest,
    )
    return zlib.crc32(repr(facts).encode())
