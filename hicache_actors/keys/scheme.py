"""Key schemes: how the objects of a page are named in a store.

A page is one object (`SuffixKeys`, `hicache_actors.keys.raw.RawKeys`) or several (`hicache_actors.keys.unified.UnifiedKeys`).
Keys of our own hold ``[0-9a-zA-Z_-]`` only and at most `MAX_KEY_CHARACTERS`, so they are safe as file names, in URLs and for every
engine.  Names of models enter through the namespace digest, never as text, so ``a/b`` and ``a-b`` stay apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol, Self

from msgspec.structs import replace

from hicache_actors.keys.namespace import SINGLE_RANK, Namespace, Rank

MAX_KEY_CHARACTERS: Final = 200


class KeyScheme(Protocol):
    """The names of one rank's objects.  Immutable."""

    @property
    def namespace(self) -> Namespace:
        """What must be equal for two caches to share bytes."""

    @property
    def namespace_digest(self) -> bytes:
        """16 bytes, as in an object's header."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """The objects of a page in the order of its slot: the chunk coordinate in the header of each."""

    @property
    def writes(self) -> bool:
        """Whether this rank stores what it holds: of ranks that hold the same bytes, one does."""

    @property
    def leads(self) -> bool:
        """Whether this is the first rank: what is to be said once is said by it."""

    @property
    def tells_weights(self) -> bool:
        """Whether pages of other weights have other names."""

    def keys(self, page_hashes: Iterable[bytes]) -> list[str]:
        """One name for each chunk of each page, page after page."""

    def with_weights(self, weights: str) -> Self:
        """The names that the same rank gives once the model has these weights."""

    def shared_with(self) -> str:
        """Which deployments find what this one stores: a sentence for the start-up note."""


class SuffixKeys:
    """One object per page and rank: page hash + namespace digest + rank suffix.

    Ranks that hold the same bytes (``namespace.replicated``) share keys, and the first of them writes.
    """

    def __init__(self, namespace: Namespace, rank: Rank = SINGLE_RANK) -> None:
        self.namespace, self.rank = namespace, rank
        self.namespace_digest = namespace.digest
        self.leads = not (rank.tp_rank or rank.pp_rank or rank.cp_rank)
        self.tells_weights = True
        tp_rank, tp_size = (0, 1) if namespace.replicated else (rank.tp_rank, rank.tp_size)
        across = rank.cp_rank * tp_size + tp_rank  # context ranks hold other bytes, also where tensor ranks do not
        # The rank again, so that a misnamed object is found out.
        self.chunks = (across | tp_size * rank.cp_size << 16 | rank.pp_rank << 32 | rank.pp_size << 48,)
        self.writes = not namespace.replicated or rank.tp_rank == 0
        self.suffix = f"_{self.namespace_digest.hex()}_tp{tp_rank}of{tp_size}_pp{rank.pp_rank}of{rank.pp_size}"
        if rank.cp_size > 1:
            self.suffix += f"_cp{rank.cp_rank}of{rank.cp_size}"

    def key(self, page_hash: bytes) -> str:
        return page_hash.hex() + self.suffix

    def keys(self, page_hashes: Iterable[bytes]) -> list[str]:
        suffix = self.suffix
        return [page_hash.hex() + suffix for page_hash in page_hashes]

    def with_weights(self, weights: str) -> SuffixKeys:
        return SuffixKeys(replace(self.namespace, weights=weights), self.rank)

    def shared_with(self) -> str:
        rank, namespace = self.rank, self.namespace
        same = [] if namespace.replicated else [f"tp={rank.tp_size}"]
        same += [f"pp={rank.pp_size}", f"cp={rank.cp_size}", f"layout {namespace.layout}"]
        return (
            f"suffix keys: shared with deployments of the same model, weights, dtype and page size that have "
            f"{', '.join(same)} as well, and with no others"
        )
