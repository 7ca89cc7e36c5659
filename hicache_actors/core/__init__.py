"""The replicated state of the cache: pure, synchronous, no torch, no asyncio, no clock.  Start with `core.Core`."""

from hicache_actors.core.config import CoreConfig
from hicache_actors.core.core import Core
from hicache_actors.core.fetch import Fetched
from hicache_actors.core.jobs import Wire
from hicache_actors.core.lease import CoreLease
from hicache_actors.core.pool import SlotError
from hicache_actors.core.usage import TierUsage, Usage
from hicache_actors.core.words import *  # noqa: F403

__all__ = ["Core", "CoreConfig", "CoreLease", "Fetched", "SlotError", "TierUsage", "Usage", "Wire"]
