"""A prompt: token ids packed once, hashed on demand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice

from hicache_actors.keys.hashes import chain, scope_root
from hicache_actors.keys.packing import pack
from hicache_actors.keys.scope import NO_SCOPE, Scope

_TOKEN_BYTES = 8


class Prompt:
    """Token ids of one request, packed to int64 by the constructor and nothing more; one object for its whole life.

    ``tokens`` is a list, tuple, array, numpy array or CPU tensor of non-negative integers; an empty one is fine.  They are
    copied.  Raises ``TypeError`` or ``ValueError`` naming index and value of the first token that is no token id.

    One thread appends; any thread may read and hash meanwhile.
    """

    __slots__ = ("_buffer", "_hash_lock", "_hashes", "_packed", "scope")

    def __init__(self, tokens: object, scope: Scope = NO_SCOPE) -> None:
        self.scope = scope
        self._buffer = bytearray(pack(tokens))
        self._packed = memoryview(self._buffer).toreadonly()
        self._hashes: dict[int, list[bytes]] = {}
        self._hash_lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._packed) // _TOKEN_BYTES

    def __repr__(self) -> str:
        return f"Prompt({len(self)} tokens, {self.scope})"

    @property
    def packed(self) -> memoryview:
        """Flat read-only view of bytes, little-endian int64.  It keeps its length and content when tokens are appended."""
        return self._packed

    def tolist(self) -> list[int]:
        return self._packed.cast("q").tolist()

    def append(self, tokens: object) -> None:
        """Add generated tokens (a sequence, as in the constructor).  Upon an error nothing has been added."""
        added = pack(tokens)
        used = len(self._packed)
        end = used + len(added)
        if end > len(self._buffer):
            # A buffer with views cannot grow, and must not: they promise to stay.  The old one lives as long as they do.
            grown = bytearray(max(end, 2 * used, 64 * _TOKEN_BYTES))
            grown[:used] = self._packed
            self._buffer = grown
        self._buffer[used:end] = added
        self._packed = memoryview(self._buffer).toreadonly()[:end]

    def hashed_pages(self, page_size: int) -> int:
        """How many pages `page_hashes` has hashed so far: so many it answers at once."""
        return len(self._hashes.get(page_size, ()))

    def page_hashes(self, page_size: int, n_pages: int) -> Sequence[bytes]:
        """Hashes (32 bytes each) of pages [0, ``n_pages``), chained from token 0 and the scope; made once and kept.

        Thread-safe and meant for a worker thread: about 1 us per page not hashed before.  Raises ``ValueError`` if the
        prompt has fewer whole pages.
        """
        packed = self._packed
        page_bytes = page_size * _TOKEN_BYTES
        if n_pages * page_bytes > len(packed):
            raise ValueError(f"{n_pages} pages of {page_size} tokens asked for, the prompt has {len(self)} tokens")
        with self._hash_lock:
            known = self._hashes.setdefault(page_size, [])
            if len(known) < n_pages:
                parent = known[-1] if known else scope_root(self.scope)
                known += chain(parent, packed[len(known) * page_bytes : n_pages * page_bytes], page_size)
            return list(islice(known, n_pages))
