"""``mooncake://``: objects in the memory that the hosts of a Mooncake cluster lend, by pointer (extra ``mooncake``)."""

from hicache_actors.backends.mooncake.backend import MooncakeBackend
from hicache_actors.backends.mooncake.options import MooncakeOptions

__all__ = ["MooncakeBackend", "MooncakeOptions"]
