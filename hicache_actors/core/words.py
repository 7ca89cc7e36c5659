"""The values that cross Core's border: counts and refusals for the engine, effects for the system.

Core takes three inputs (an engine call, an agreed completion, the agreed clock) and returns *effects*; it never starts
anything itself.  Units stand in names.  *Slots* are page slots of one pool, packed as native uint32 (``pack_slots``): what a
node holds, what a job moves, and what an effect carries are slices of the same bytes.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Mapping
from typing import Final, Literal, Protocol, TypeAlias

import msgspec

from hicache_actors.core.records import Changed
from hicache_actors.keys.scope import Scope

Slots: TypeAlias = bytes
"""Page slots, native uint32, in prompt order: 4 bytes a page."""

SLOT_BYTES: Final = 4
TOKEN_BYTES: Final = 8

DEVICE: Final = 0
HOST: Final = 1
TIER_NAMES: Final = ("device", "host")

ABSENT: Final = 0
FILLING: Final = 1
READY: Final = 2


class Phase(enum.IntEnum):
    """What a job waits for; it is part of a value's address on the wire, so a stale value is recognised."""

    HIT = 0  #: a prefetch waits for the agreed hit
    RUN = 1  #: the job's RESULT is awaited
    LIMBO = 2  #: RESULT is agreed; copies or reads may still touch its slots


JobKind: TypeAlias = Literal["prefetch", "load", "write_back", "backup", "drain"]
Failure: TypeAlias = Literal["load_failed", "twin_failed", "reset", "degraded"]


def pack_slots(slots: Iterable[int]) -> Slots:
    return array("I", slots).tobytes()


def unpack_slots(slots: Slots) -> list[int]:
    return memoryview(slots).cast("I").tolist()


def encode_result(pages: int, *, sound: bool = True) -> int:
    """RESULT on the wire: 2n + 1, or 2n if the source was found bad at page n: MIN takes the shorter and keeps the cause."""
    return 2 * pages + sound


def decode_result(value: int) -> tuple[int, bool]:
    """-> (pages, sound)."""
    return value >> 1, bool(value & 1)


class Tokens(Protocol):
    """What Core needs of a prompt (`keys.Prompt` is one).

    ``packed`` is a flat view of bytes: little-endian int64 token ids.  A view taken once stays valid when tokens are appended.
    """

    @property
    def packed(self) -> memoryview: ...

    @property
    def scope(self) -> Scope: ...

    def __len__(self) -> int: ...


# -- answers to the engine ------------------------------------------------------------------------------------------------


class Match(msgspec.Struct, frozen=True):
    """Cumulative page multiples, in tokens: ``device <= loading <= host``.

    ``storage_hint`` is what the last agreed storage query of this prefix found, counted from token 0; a hint, not a promise.
    """

    device: int
    loading: int
    host: int
    storage_hint: int = 0


class Shortfall(msgspec.Struct, frozen=True):
    """A refusal.  Nothing has been evicted, allocated or loaded.

    ``missing_pages``: what was asked beyond what could be had now.  ``freeing_pages``: slots that running jobs will free by
    themselves (limbo, and pages pinned by jobs only), so a later try may pass without anybody releasing a lease.
    """

    reason: Literal["device_capacity", "host_capacity", "degraded", "after_allocate", "load_failed", "reset"]
    missing_pages: int = 0
    freeing_pages: int = 0


class PolicyRefused(msgspec.Struct, frozen=True):
    """Another policy cannot be followed now; nothing has changed.

    "dirty_pages": ``pages`` are on the device alone, and only write_back saves them before they go (drain first).  "host_gaps":
    pages on the host lack their prefix there (they go when they are evicted, or with a reset).  "changing": the change before is
    still being carried out.  "engine_owned": the engine decides what is saved.
    """

    reason: Literal["dirty_pages", "host_gaps", "changing", "engine_owned", "degraded"]
    pages: int = 0


class LoadResult(msgspec.Struct, frozen=True):
    valid_tokens: int
    failed: Failure | None = None


class Committed(msgspec.Struct, frozen=True):
    """``private_pages``: duplicates of what somebody else published meanwhile, and the open page; ours until release.

    ``failed`` is None, or why nothing was published (now and for the rest of this lease).
    """

    published_pages: int
    private_pages: int
    failed: Failure | None = None


class Account(msgspec.Struct, frozen=True):
    """Where the tokens of a request came from: ``device + host + storage + computed`` = prompt tokens, each counted once.

    ``reasons`` says, for each shortfall, why: reason -> tokens.
    """

    device: int
    host: int
    storage: int
    computed: int
    reasons: Mapping[str, int]


# -- effects --------------------------------------------------------------------------------------------------------------


class Path(msgspec.Struct, frozen=True):
    """Pages [first_page, first_page + pages) of a token path; ``tokens`` holds the path from token 0 to its end, packed.

    Page hashes are chained from token 0, so a pipeline needs all of it.  ``prompt`` is the engine's prompt when the path is
    (a prefix of) one: its hashes, once made, are reused.
    """

    scope: Scope
    tokens: bytes | memoryview
    first_page: int
    pages: int
    prompt: Tokens | None = None


class StartPrefetch(msgspec.Struct, frozen=True):
    """Ask the storage for the leading run of ``path``, report HIT (pages), wait for `Grant` or `Settled`, then read."""

    job: int
    rid: str
    path: Path
    deadline_s: float | None  #: the caller's; the pipeline takes the smaller of it and the policy's
    priority: int = 0


class StartLoad(msgspec.Struct, frozen=True):
    """Copy host ``source`` slots to device ``target`` slots, layer by layer; RESULT in pages, in order."""

    job: int
    rid: str
    source: Slots
    target: Slots
    events: tuple[object, ...] = ()  #: engine events that must fire before the target may be written


class StartWriteBack(msgspec.Struct, frozen=True):
    """Copy device ``source`` to host ``target`` once all ``events`` (of the forwards that compute the pages) have fired."""

    job: int
    source: Slots
    target: Slots
    events: tuple[object, ...] = ()


class StartBackup(msgspec.Struct, frozen=True):
    """Store host ``source`` slots.  ``paths`` name the pages, in order (their page counts add up to the slots)."""

    job: int
    source: Slots
    paths: tuple[Path, ...]


class StartDrain(msgspec.Struct, frozen=True):
    """Report RELEASED when all ``events`` (engine events, holds) have fired.  No RESULT."""

    job: int
    events: tuple[object, ...]


class Grant(msgspec.Struct, frozen=True):
    """The agreed HIT of a prefetch has been given these host slots (maybe fewer than the hit): read into them."""

    job: int
    slots: Slots


class Settled(msgspec.Struct, frozen=True):
    """RESULT of a job is agreed and applied (or a prefetch was declined: ``pages`` 0 and a ``reason``); wake its waiters."""

    job: int
    pages: int
    reason: str | None = None


class StopJob(msgspec.Struct, frozen=True):
    """Nobody wants the rest of this prefetch any more: stop between batches and report what has arrived."""

    job: int


class Forget(msgspec.Struct, frozen=True):
    """The job has left Core (RELEASED agreed, or declined at HIT): drop everything local that is filed under its id."""

    job: int


class Wake(msgspec.Struct, frozen=True):
    """A waiter kept in Core (pending acquire, stored, drain) has its answer; ``waiter`` is the id the call returned."""

    waiter: int
    value: object


class UseStorage(msgspec.Struct, frozen=True):
    """Storage jobs started from here on are about the store that has been made ready (``attached``), or there will be none.

    Those started before go on at the store that they began with.
    """

    attached: bool


Effect: TypeAlias = (
    StartPrefetch
    | StartLoad
    | StartWriteBack
    | StartBackup
    | StartDrain
    | Grant
    | Settled
    | StopJob
    | Forget
    | Wake
    | UseStorage
    | Changed
)
