"""Stores that are written elsewhere: any backend by its class (``dynamic://``), and those of SGLang (``sglang://``)."""

from hicache_actors.backends.foreign.dynamic import dynamic_backend
from hicache_actors.backends.foreign.sglang import SGLangBackend

__all__ = ["SGLangBackend", "dynamic_backend"]
