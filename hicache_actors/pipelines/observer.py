"""The public observer: what moved, told once per batch, on the cache's event loop.

An observer is a plain function given to `HiCache.observe`.  It runs while the job still holds its slots, so the bytes that it
looks at are the bytes that moved; it must be quick and must not raise (an exception is a bug and degrades the cache).
`testing.shadow` verifies contents with it; metrics and tracing use it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from hicache_actors.backends.backend import Stored
from hicache_actors.core.words import Slots

BatchKind: TypeAlias = Literal["prefetch", "load", "write_back", "backup"]


class BatchEnd(msgspec.Struct, frozen=True):
    """One batch (at most 256 pages) of a job has ended well.

    ==========  =============  =============  ==========================================
    kind        source         target         keys of the medium
    ==========  =============  =============  ==========================================
    load        host slots     device slots   ``hashes`` is None
    write_back  device slots   host slots     ``hashes`` is None
    backup      host slots     None           ``hashes`` name the objects, ``outcomes`` say what became of each
    prefetch    None           host slots     ``hashes`` name the objects that were read
    ==========  =============  =============  ==========================================
    """

    job: int
    kind: BatchKind
    source: Slots | None = None
    target: Slots | None = None
    hashes: tuple[bytes, ...] | None = None
    outcomes: tuple[Stored, ...] | None = None


class CommitEnd(msgspec.Struct, frozen=True):
    """A lease has committed: ``slots`` hold its pages [first_page, first_page + len(slots) / 4), published or private.

    Told inside `Lease.commit`, on the engine's thread.  If an event was given the bytes are final only when it has fired.
    """

    rid: str
    first_page: int
    slots: Slots


Observation: TypeAlias = BatchEnd | CommitEnd
Observer: TypeAlias = Callable[[Observation], None]
