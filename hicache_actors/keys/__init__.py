"""Prompts, page hashes, namespaces and key schemes.  Importable without torch."""

from hicache_actors.keys.namespace import Namespace, Rank
from hicache_actors.keys.prompt import Prompt
from hicache_actors.keys.scheme import SuffixKeys
from hicache_actors.keys.scope import NO_SCOPE, Scope

__all__ = ["NO_SCOPE", "Namespace", "Prompt", "Rank", "Scope", "SuffixKeys"]
