"""``redis://`` and ``valkey://``: objects as strings of one server that speaks RESP, read straight into host slots."""

from hicache_actors.backends.redis.backend import RedisBackend
from hicache_actors.backends.redis.options import RedisOptions

__all__ = ["RedisBackend", "RedisOptions"]
