"""Prompts, page hashes, namespaces and key schemes.  Importable without torch."""

from hicache_actors.keys.namespace import Namespace, Rank
from hicache_actors.keys.prompt import Prompt
from hicache_actors.keys.raw import RawKeys
from hicache_actors.keys.scheme import KeyScheme, SuffixKeys
from hicache_actors.keys.scope import NO_SCOPE, Scope
from hicache_actors.keys.unified import Shard, UnifiedKeys

__all__ = [
    "NO_SCOPE",
    "KeyScheme",
    "Namespace",
    "Prompt",
    "Rank",
    "RawKeys",
    "Scope",
    "Shard",
    "SuffixKeys",
    "UnifiedKeys",
]
