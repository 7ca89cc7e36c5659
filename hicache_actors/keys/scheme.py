"""Key schemes: how an object of a page is named in a store."""

from __future__ import annotations

from collections.abc import Iterable

from hicache_actors.keys.namespace import SINGLE_RANK, Namespace, Rank


class SuffixKeys:
    """One object per page and rank: page hash + namespace digest + rank suffix.

    Keys hold ``[0-9a-z_]`` only, so they are safe as file names and in URLs.  Names of models enter through the digest,
    never as text, so ``a/b`` and ``a-b`` stay apart.  Ranks that hold the same bytes (``namespace.replicated``) share keys.
    """

    def __init__(self, namespace: Namespace, rank: Rank = SINGLE_RANK) -> None:
        self.namespace_digest = namespace.digest
        tp_rank, tp_size = (0, 1) if namespace.replicated else (rank.tp_rank, rank.tp_size)
        across = rank.cp_rank * tp_size + tp_rank  # context ranks hold other bytes, also where tensor ranks do not
        self.chunk = across | tp_size * rank.cp_size << 16 | rank.pp_rank << 32 | rank.pp_size << 48
        """Chunk coordinate of an object's header: the rank again, so that a misnamed file is found out."""
        self.suffix = f"_{self.namespace_digest.hex()}_tp{tp_rank}of{tp_size}_pp{rank.pp_rank}of{rank.pp_size}"
        if rank.cp_size > 1:
            self.suffix += f"_cp{rank.cp_rank}of{rank.cp_size}"

    def key(self, page_hash: bytes) -> str:
        return page_hash.hex() + self.suffix

    def keys(self, page_hashes: Iterable[bytes]) -> list[str]:
        suffix = self.suffix
        return [page_hash.hex() + suffix for page_hash in page_hashes]
