"""The storage tier: the actor, the store that is attached, and what keeps a bad store from doing harm.

``tier`` (the actor) owns ``store`` (a backend, and the jobs about it), whose ``calls`` go through a ``lane`` for each direction,
with a breaker; ``flights`` keeps a key from being written twice at once, ``latency`` says when stores are shed, and ``threads``
gives each direction its own.

``pages`` says what a page is to a store (one object or several), ``chains`` what stands before it, ``neighbours`` who else stores
the same model there and whether anything is ever found, and ``scrub`` looks for bad objects before they are needed.
"""

from hicache_actors.runtime.breaker import BreakerSnapshot
from hicache_actors.tiers.storage.call import Call
from hicache_actors.tiers.storage.chains import Chains
from hicache_actors.tiers.storage.store import Source, Store
from hicache_actors.tiers.storage.threads import StoreThreads
from hicache_actors.tiers.storage.tier import Candidate, StorageTier
from hicache_actors.tiers.storage.words import DIRECTIONS, Direction, LaneSnapshot, Refusal, StorageSnapshot

__all__ = [
    "DIRECTIONS",
    "BreakerSnapshot",
    "Call",
    "Candidate",
    "Chains",
    "Direction",
    "LaneSnapshot",
    "Refusal",
    "Source",
    "StorageSnapshot",
    "StorageTier",
    "Store",
    "StoreThreads",
]
