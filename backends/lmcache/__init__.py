"""``lmcache://``: the byte store that ``lmcache_server`` is (its ``lm://`` protocol), with a client of our own."""

from hicache_actors.backends.lmcache.backend import LMCacheBackend
from hicache_actors.backends.lmcache.protocol import LMCacheConnection

__all__ = ["LMCacheBackend", "LMCacheConnection"]
