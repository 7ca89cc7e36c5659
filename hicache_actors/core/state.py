"""What all parts of Core share: the tree, pools, pins and jobs, the effects of the open section, clock, epoch and decision log."""

from __future__ import annotations

import enum
import struct
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_actors.core.config import CoreConfig
from hicache_actors.core.evictions import Cause, Evictions
from hicache_actors.core.jobs import Job, Jobs
from hicache_actors.core.news import News
from hicache_actors.core.node import PLACES, TIERS, UNSTORED, WAITING, Node
from hicache_actors.core.order import ORDERS
from hicache_actors.core.pins import Pins
from hicache_actors.core.pool import Pool
from hicache_actors.core.reservation import CoreRoom
from hicache_actors.core.totals import Totals
from hicache_actors.core.tree import Tree
from hicache_actors.core.words import (
    ABSENT,
    DEVICE,
    HOST,
    SLOT_BYTES,
    TIER_NAMES,
    Effect,
    Forget,
    Phase,
    Shortfall,
    Slots,
    Tokens,
)
from hicache_actors.errors import UsageError

if TYPE_CHECKING:
    from hicache_actors.core.lease import CoreLease

KEPT_DECISIONS: Final = 256  #: the last ones, for the report of a divergence

_PACK = struct.Struct("<4q").pack


class Note(enum.IntEnum):
    """Codes of the decision log: what was decided, beside three numbers."""

    HIT = 1
    RESULT = 2
    RELEASED = 3
    RETRY = 4
    LEASE = 5
    LOAD = 6
    ALLOCATE = 7
    COMMIT = 8
    RELEASE = 9
    PREFETCH = 10
    STOP = 11
    WRITE_BACK = 12
    BACKUP = 13
    DRAIN = 14
    EVICT = 15
    RESET = 16
    DEGRADE = 17
    ACQUIRE = 18
    STORAGE = 19
    LOOKUP = 30
    SAVE = 31
    FINISH = 32
    ROOM = 33


class Decision(NamedTuple):
    """An entry of the decision log; ``digest`` is the rolling one after it."""

    digest: int
    code: int
    a: int
    b: int
    c: int


class State:
    """Shared state; the parts (`leases`, `loads`, `fetch`, `saving`, `waiting`) hold it and decide on it."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.page = config.page_size
        self.engine_owned = config.slots == "engine"  # then no page is resident on the device
        totals = (0 if self.engine_owned else config.device_pages, config.host_pages)
        self.pools = tuple(Pool(TIER_NAMES[place % TIERS], totals[place % TIERS]) for place in PLACES)
        self.tree = Tree(config.page_size, tuple(ORDERS[config.eviction]() for _ in PLACES))
        self.pins = Pins(self.tree, self.pools)
        self.jobs = Jobs(config.table_slots, config.table_rows)
        self.effects: list[Effect] = []
        self.news = News()
        self.evictions = Evictions()
        self.cause = Cause("request")  # who makes room now
        self.counts: dict[str, int] = {}
        self.totals = Totals()
        self.now_ms = 0
        self.epoch = 0
        self.degraded = False
        self.storage = config.storage  # is a store attached?
        self.storage_epoch = 0  # how often that has changed: what is STORED was stored in this one
        self.backlog: deque[Node] = deque()  # maybe on the host and not in the store: to be looked at
        self.log_digest = 0
        self.decided = 0  # decisions so far
        self.decisions: deque[tuple[int, int, int, int, int]] = deque(maxlen=KEPT_DECISIONS)
        self.reservations: dict[int, CoreRoom] = {}  # by the waiter that it was given to
        self._orders = 0
        self.changed = False  # something that waiters of `stored` or `drained` look at
        self.leases: dict[str, CoreLease] = {}
        self.can_write_back: Callable[[Node], bool] = lambda _: False
        self.want_host: Callable[[Node, Tokens | None], None] = lambda _node, _tokens: None

    def next_order(self) -> int:
        """Who came before whom, among leases and waits for room."""
        self._orders += 1
        return self._orders

    def note(self, code: int, a: int = 0, b: int = 0, c: int = 0) -> None:
        """Roll a decision into the digest that travels with each round."""
        self.log_digest = digest = zlib.crc32(_PACK(code, a, b, c), self.log_digest)
        self.decided += 1
        self.decisions.append((digest, code, a, b, c))

    def count(self, what: str, n: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + n

    @staticmethod
    def text(value: str) -> int:
        """A text in the decision log."""
        return zlib.crc32(value.encode())

    def pages_asked(self, tokens: Tokens) -> int:
        """Pages that a match, lease or prefetch looks at: one token is always left to compute."""
        return max(0, (len(tokens) - 1) // self.page)

    def check_owned(self) -> None:
        """Raises `UsageError` where the engine owns its blocks: no lease is to be had there."""
        if self.engine_owned:
            raise UsageError("the engine owns its blocks here: lookup, load_into, save_from and finish, no leases")

    # -- jobs ---------------------------------------------------------------------------------------------------------------

    def to_limbo(self, job: Job) -> None:
        job.phase = Phase.LIMBO
        self.changed = True

    def close(self, job: Job) -> None:
        """The job leaves Core: its pins end, its own slots are free."""
        del self.jobs.open[job.id]
        self.effects.append(Forget(job.id))
        self.changed = True
        job.on_released()
        self.pins.unpin(job.pins)
        self.pools[job.place].give(job.slots)
        job.pins, job.slots = [], b""

    # -- room ---------------------------------------------------------------------------------------------------------------

    def available(self, place: int) -> int:
        """Pages that `make_room` can provide; exact on the device."""
        return self.pools[place].free + self.tree.evictable[place]

    def device_shortfall(self, need: int, available: int) -> Shortfall:
        """Why ``need`` device pages cannot be had, and how many will come free by themselves."""
        jobs = self.jobs.open.values()
        freeing = self.jobs.own_pages(DEVICE, limbo=True)
        freeing += self.pins.pages_held_only_by((pin for job in jobs for pin in job.pins), DEVICE)
        self.count("device_shortfalls")
        return Shortfall("device_capacity", need - available, freeing)

    def make_room(self, place: int, pages: int) -> bool:
        """Evict, in policy order, until ``pages`` slots are free.

        On the device a refusal (False) has evicted nothing.  On the host, where pins are ranges, what could be evicted has been:
        the caller takes what is free.

        A victim that is still on the other tier stays in the tree; another leaves it.  A device-only victim above host-only pages
        would take them along: it is passed over, and its write-back asked for, while that is possible (or a job is at work on
        them) and others can go instead.
        """
        pool, tree = self.pools[place], self.tree
        short = pages - pool.free
        if short <= 0:
            return True
        if place == DEVICE and short > tree.evictable[place]:
            return False
        pop = tree.orders[place].pop
        freed: list[Slots] = []
        aside: list[Node] = []
        passed = 0
        got = 0
        while got < short:
            residency = pop()
            if residency is not None:
                if residency.locks or residency.kids:
                    continue  # offered again when its last lock or child goes
                node = residency.node
                if place == DEVICE and node.kids and not node.at[HOST].state and self._worth_keeping(node):
                    aside.append(node)
                    continue
            elif passed < len(aside):
                node = aside[passed]
                passed += 1
                residency = node.at[place]
            else:
                break
            freed.append(residency.slots)
            got += len(residency.slots) // SLOT_BYTES
            self._evict(node, place)
        if freed:
            pool.give(b"".join(freed))
            self.note(Note.EVICT, place, got, len(freed))
            self.count("evicted_device_pages" if place == DEVICE else "evicted_host_pages", got)
            self.changed = True
        for node in aside[passed:]:
            tree.offer(place, node.at[place])
            self.want_host(node, None)
        return got >= short

    def _worth_keeping(self, node: Node) -> bool:
        """A device-only node above host pages: can it be saved, or is somebody at work on these?"""
        return self.can_write_back(node) or any(below.at[HOST].locks for below in self.tree.subtree(node))

    def _evict(self, node: Node, place: int) -> None:
        tree, residency, parent = self.tree, node.at[place], node.parent
        pages = len(residency.slots) // SLOT_BYTES
        self.evictions.remember(node, pages, place, self.now_ms, self.cause)
        tree.evictable[place] -= pages
        tree.resident[place] -= pages
        residency.slots, residency.state = b"", ABSENT
        if place == DEVICE:
            node.events = ()
        above = parent.at[place]
        above.kids -= 1
        if not above.kids:
            above.tick = max(above.tick, residency.tick)  # a parent has been used whenever its child was
            tree.offer(place, above)
        if any(other.state for other in node.at):
            if place == HOST and node.stored == WAITING:
                node.stored = UNSTORED
        elif node.kids:
            before = self.pins.dropped_pages
            self.pins.drop(node)
            self.count("dropped_subtree_pages", self.pins.dropped_pages - before + pages)
        else:
            tree.remove(node)
            if place == DEVICE:
                self.count("dropped_pages", pages)
