"""Figures of Core at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from hicache_actors.core.state import State
from hicache_actors.core.totals import FetchTotals
from hicache_actors.core.words import DEVICE, HOST, SLOT_BYTES, Account


class TierUsage(msgspec.Struct, frozen=True):
    """Pages of one tier: ``free + owned + limbo + closed = total``.

    ``owned``: by nodes, leases, reservations and running prefetches; ``limbo``: slots that a copy or read may still touch (jobs
    after their RESULT, strays); ``closed``: host memory that is still being made ready, or could not be.  ``evictable`` is a part
    of ``owned``, exact on the device.
    """

    total_pages: int
    free_pages: int
    owned_pages: int
    limbo_pages: int
    closed_pages: int
    evictable_pages: int


class Usage(msgspec.Struct, frozen=True):
    """``jobs`` counts open jobs by "kind.phase", such as "load.run"; ``nodes`` are those of the tree, roots not counted.

    ``waiting_rooms`` wait for device pages, ``reserved_pages`` have been granted and not been taken yet.  ``staged_pages`` are
    host pages in the hands of prefetches.  ``backlog_nodes``: since a store was attached, how many nodes are still to be looked at
    for pages to back up.  ``dirty_pages`` are on the device alone and may still be saved.  ``served`` is the sum of the accounts
    of all leases that have computed and ended (``served_leases``); ``returned_leases`` ended before they computed anything.
    """

    device: TierUsage
    host: TierUsage
    nodes: int
    tree_pages: int
    stored_pages: int
    dirty_pages: int
    leases: int
    jobs: Mapping[str, int]
    retries: int
    backlog_nodes: int
    pending_acquires: int
    waiting_rooms: int
    reserved_pages: int
    staged_pages: int
    served: Account
    served_leases: int
    returned_leases: int
    fetches: FetchTotals


def tier_usage(state: State, place: int) -> TierUsage:
    """O(open jobs + leases + pins), whatever the tree holds."""
    owned = state.residents.resident[place] + state.jobs.own_pages(place, limbo=False)
    if place == DEVICE:
        owned += sum(lease.private_pages for lease in state.leases.values()) + reserved_pages(state)
    strays = sum(len(stray.slots) for stray in state.pins.strays(place)) // SLOT_BYTES
    return TierUsage(
        total_pages=state.pools[place].total,
        free_pages=state.pools[place].free,
        owned_pages=owned,
        limbo_pages=state.jobs.own_pages(place, limbo=True) + strays,
        closed_pages=state.pools[place].closed,
        evictable_pages=state.residents.evictable(place),
    )


def reserved_pages(state: State) -> int:
    """Device pages of reservations that nobody has taken yet."""
    return sum(room.pages for room in state.reservations.values())


def usage(state: State, staged_pages: int, retries: int, pending_acquires: int, waiting_rooms: int) -> Usage:
    return Usage(
        device=tier_usage(state, DEVICE),
        host=tier_usage(state, HOST),
        nodes=len(state.tree.table),
        tree_pages=state.tree.pages,
        stored_pages=state.tree.stored_pages,
        dirty_pages=state.residents.dirty_pages,
        leases=len(state.leases),
        jobs=dict(Counter(f"{job.kind}.{job.phase.name.lower()}" for job in state.jobs.open.values())),
        retries=retries,
        backlog_nodes=len(state.backlog),
        pending_acquires=pending_acquires,
        waiting_rooms=waiting_rooms,
        reserved_pages=reserved_pages(state),
        staged_pages=staged_pages,
        served=state.totals.account(),
        served_leases=state.totals.served_leases,
        returned_leases=state.totals.returned_leases,
        fetches=state.totals.fetches(),
    )
