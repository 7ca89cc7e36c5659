"""Raw keys: the names that SGLang's file store gives, for objects without a header.

::

    {page hash}_{model}_{tp rank}_{tp size}[_{pp size}_{pp rank}][_cp{cp rank}_{cp size}]
    {page hash}_{model}[_{pp size}_{pp rank}][_cp{cp rank}_{cp size}]                          MLA

'/' in the model's name becomes '-', and the parts of pipeline and context ranks are there only when there are several.  Source:
SGLang 0.5.23, ``HiCacheFile``.  So ``a/b`` and ``a-b`` are one name here, and nothing tells weights, dtypes or layouts apart: the
one documented exception to what keys of our own hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from hicache_actors.errors import ConfigError
from hicache_actors.keys.namespace import SINGLE_RANK, Namespace, Rank
from hicache_actors.keys.scheme import MAX_KEY_CHARACTERS

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_HASH_CHARACTERS: Final = 64


class RawKeys:
    """Raises `ConfigError` for a model's name that makes no safe file name."""

    def __init__(self, namespace: Namespace, rank: Rank = SINGLE_RANK) -> None:
        self.namespace, self.rank = namespace, rank
        self.namespace_digest = namespace.digest  # of no object; for words only
        self.chunks = (0,)
        self.leads = not (rank.tp_rank or rank.pp_rank or rank.cp_rank)
        self.tells_weights = False
        self.writes = not namespace.replicated or rank.tp_rank == 0
        self.model = namespace.model_id.replace("/", "-")
        self.suffix = f"_{self.model}"
        if not namespace.replicated:
            self.suffix += f"_{rank.tp_rank}_{rank.tp_size}"
        if rank.pp_size > 1:
            self.suffix += f"_{rank.pp_size}_{rank.pp_rank}"
        if rank.cp_size > 1:
            self.suffix += f"_cp{rank.cp_rank}_{rank.cp_size}"
        longest = MAX_KEY_CHARACTERS - _HASH_CHARACTERS
        if not _NAME.fullmatch(self.model) or len(self.suffix) > longest:
            raise ConfigError(
                "model.model_id", namespace.model_id, "makes no safe file name",
                allowed=f"letters, digits and '_./-', at most {longest} characters with the rank's",
                fix="use the name under which SGLang serves the model, or storage.keys = 'suffix'",
            )  # fmt: skip

    def keys(self, page_hashes: Iterable[bytes]) -> list[str]:
        suffix = self.suffix
        return [page_hash.hex() + suffix for page_hash in page_hashes]

    def with_weights(self, weights: str) -> RawKeys:
        return RawKeys(replace(self.namespace, weights=weights), self.rank)

    def shared_with(self) -> str:
        return (
            f"raw objects: shared with SGLang's file store and with all others that write names ending in {self.suffix!r}; "
            f"nothing tells weights, dtypes or layouts apart, and nothing is verified"
        )
