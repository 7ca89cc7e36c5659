"""What all parts of Core share: the tree, pools, pins and jobs, the effects of the open section, clock, epoch and decision log."""

from __future__ import annotations

import enum
import struct
import zlib
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_actors.core.config import CoreConfig
from hicache_actors.core.evictions import Cause, Evictions
from hicache_actors.core.jobs import Job, Jobs
from hicache_actors.core.news import News
from hicache_actors.core.node import PLACES, TIERS, Node
from hicache_actors.core.pins import Pin, Pins
from hicache_actors.core.policies import Policies
from hicache_actors.core.pool import Pool
from hicache_actors.core.reservation import CoreRoom
from hicache_actors.core.residents import Residents
from hicache_actors.core.totals import Totals
from hicache_actors.core.tree import Tree
from hicache_actors.core.words import TIER_NAMES, Effect, Forget, Phase, Tokens
from hicache_actors.errors import UsageError

if TYPE_CHECKING:
    from hicache_actors.core.eviction import Evictor
    from hicache_actors.core.lease import CoreLease
    from hicache_actors.core.saving import Saving

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
    POLICY = 20
    WEIGHTS = 22
    ATTACH = 21
    OPEN = 23
    CLEAR = 24
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
        device_pages = 0 if self.engine_owned else config.device_pages
        sizes = ((device_pages, device_pages), (config.host_pages, config.first_host_pages))
        self.pools = tuple(Pool(TIER_NAMES[place % TIERS], *sizes[place % TIERS]) for place in PLACES)
        self.policies = policies = Policies(config)
        self.residents = Residents(policies.eviction, protect_dirty=policies.protects_dirty)
        self.tree = Tree(config.page_size, self.residents, policies.traits)
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
        self.watches = 0  # how often somebody began to listen; local
        self.reservations: dict[int, CoreRoom] = {}  # by the waiter that it was given to
        self._orders = 0
        self.changed = False  # something that waiters of `stored` or `drained` look at
        self.leases: dict[str, CoreLease] = {}
        self.evictor: Evictor  # puts itself here, as does:
        self.saving: Saving

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

    def lose_pages(self, shrunk: Iterable[tuple[Pin, int]], page: int) -> None:
        """Pages from ``page`` on hold nothing, and have left the tree; ``shrunk``: pins that held some of them."""
        by_pin = {lease.pin.uid: lease for lease in self.leases.values()}
        for pin, _ in shrunk:
            lease = by_pin.get(pin.uid)
            if lease is not None:
                lease.fail("load_failed" if lease.usable_tokens > page * self.page else "twin_failed", page)

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
