"""Several stores as one: the nearest first, such as a disk of this host in front of a store of the cluster."""

from hicache_actors.backends.layers.backend import LayeredBackend
from hicache_actors.backends.layers.options import LayerOptions

__all__ = ["LayerOptions", "LayeredBackend"]
