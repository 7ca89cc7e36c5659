"""Counting and eviction, shard by shard: the oldest objects of a whole folder go first, whoever wrote them.

The ledger knows a lower bound of the oldest mtime of each shard, so the evictor scans the shard with the lowest, removes what
is older than the next shard's bound, and goes on: the exact order of use without an index.  Where shards are large it takes
from each its share of what must go at once, since keys spread evenly.

One process at a time evicts: the one that holds the lock of ``<root>/evictor``.  It keeps nothing in memory that a successor
would need; when it dies, the next one that needs room takes over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from hicache_actors.backends.folder import Folder
from hicache_actors.backends.ledger import NEW, NOTHING, QUARANTINE, STALE, disk_bytes
from hicache_actors.backends.posix import try_lock
from hicache_actors.backends.shards import Item, Scan


class Checked(NamedTuple):
    """Outcome of `check`.  ``exact``: the ledger's row is now what the disk holds."""

    scan: Scan
    exact: bool
    torn: int
    orphans: int


class Step(NamedTuple):
    """One bounded piece of eviction: ``excess_bytes`` must still go; ``exhausted``: not even all that is left would do."""

    excess_bytes: int
    exhausted: bool
    objects: int
    bytes: int


def check(folder: Folder, row: int) -> Checked:
    """Scan one row, remove what dead writers left, set empty objects aside, and correct the ledger.  Worker thread."""
    now_ns = time.time_ns()
    watched = folder.ledger.watch(row)
    scan = folder.look(row)
    orphans = folder.remove_orphans(row, scan.orphans)
    exact = folder.ledger.reconcile(row, watched, scan.counted(), now_ns)
    torn = sum(folder.quarantine(key, identity) for key, identity in scan.torn.items())
    return Checked(scan, exact, torn, orphans)


def unchecked(folder: Folder) -> list[int]:
    """Rows that must be scanned: never counted, or left by a dead writer."""
    return [row for row, oldest_ns in enumerate(folder.ledger.oldest()) if oldest_ns in (NEW, STALE)]


class Evictor:
    """Worker threads; one at a time."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._path = os.path.join(folder.root, "evictor")
        self._lock_fd = -1
        self._barren: set[int] = set()  # scanned since the election: nothing of ours there

    def elect(self) -> bool:
        """Become the one evictor of the folder, unless somebody else is."""
        if self._lock_fd >= 0:
            return True
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            elected = try_lock(fd)
        except BaseException:
            os.close(fd)
            raise
        if not elected:
            os.close(fd)
            return False
        self._lock_fd = fd
        self._barren.clear()
        return True

    def resign(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def free(self, wanted_bytes: int, max_scans: int) -> Step:
        """Work towards room for ``wanted_bytes``, with at most ``max_scans`` scans of a shard."""
        ledger = self._folder.ledger
        objects = n_bytes = 0
        excess_bytes = ledger.excess(wanted_bytes)
        for _ in range(max_scans):
            if not excess_bytes:
                break
            lowest, second = self._two_oldest()
            usage = ledger.usage
            in_vain = not ledger.uncounted and excess_bytes > usage.bytes + usage.quarantine_bytes
            if lowest is None or in_vain:
                return Step(excess_bytes, True, objects, n_bytes)
            now_ns = time.time_ns()
            items = check(self._folder, lowest).scan.items
            excess_bytes = ledger.excess(wanted_bytes)
            if not items:
                self._barren.add(lowest)
            if not items or ledger.uncounted:  # count first: what must go is known only then
                continue
            victims = self._choose(lowest, items, excess_bytes, second)
            if victims:
                rest = items[len(victims) :]
                oldest_left_ns = rest[0].identity.mtime_ns if rest else now_ns
                removed = self._folder.evict(lowest, victims, oldest_left_ns)
                objects, n_bytes = objects + removed[0], n_bytes + removed[1]
                excess_bytes = ledger.excess(wanted_bytes)
        return Step(excess_bytes, False, objects, n_bytes)

    def _two_oldest(self) -> tuple[int | None, int]:
        """The row with the oldest object, as far as is known, and the mtime of the oldest in any other."""
        bounds = [
            (oldest_ns, row)
            for row, oldest_ns in enumerate(self._folder.ledger.oldest())
            if oldest_ns != NOTHING and row not in self._barren
        ]
        bounds.sort()
        if not bounds:
            return None, NOTHING
        return bounds[0][1], bounds[1][0] if len(bounds) > 1 else NOTHING

    def _choose(self, row: int, items: Sequence[Item], excess_bytes: int, others_oldest_ns: int) -> Sequence[Item]:
        """The oldest of a row, until enough is gone: those older than all others, or the row's share of what must go."""
        usage = self._folder.ledger.usage
        share = len(items) * excess_bytes // max(1, usage.bytes + usage.quarantine_bytes)
        if row == QUARANTINE:
            share = len(items)  # worth less than any object
        n_victims = 0
        for item in items:
            if excess_bytes <= 0 or (n_victims >= share and item.identity.mtime_ns > others_oldest_ns):
                break
            n_victims += 1
            excess_bytes -= disk_bytes(item.n_bytes)
        return items[:n_victims]
