"""The values that cross Core's border: counts and refusals for the engine, effects for the system.

Core takes three inputs (an engine call, an agreed completion, the agreed clock) and returns *effects*; it never starts
anything itself.  Units stand in names.  *Slots* are page slots of one pool, packed as native uint32 (``pack_slots``): what a
node holds, what a job moves, and what an effect carries are slices of the same bytes.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Mapping
from typing import Final, Literal, Protocol, TypeAlias, get_args

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


JobKind: TypeAlias = Literal["prefetch", "load", "write_back", "backup", "drain", "attach", "clear", "open"]
Failure: TypeAlias = Literal["load_failed", "twin_failed", "reset", "degraded"]


def pack_slots(slots: Iterable[int]) -> Slots:
    return array("I", slots).tobytes()


def unpack_slots(slots: Slots) -> list[int]:
    return memoryview(slots).cast("I").tolist()


NotOpened: TypeAlias = Literal["refused", "failed", "late", "stopped"]
"""Why a rank has no store ready, or has not cleared it: its settings, the URL or the store do not fit; the store failed; it has not
ended in time; nobody wants it any more."""

OPENED: Final = 1 << 32
"""RESULT of an attach or clear on a rank that has done it; each `not_opened` is less, so MIN takes the first rank that has not."""

_NOT_OPENED: Final[tuple[NotOpened, ...]] = get_args(NotOpened)


def not_opened(rank: int, why: NotOpened) -> int:
    """RESULT of an attach or clear on rank ``rank``, which has not done it.  0 is left to ranks that give up all they have open."""
    return 1 + rank * len(_NOT_OPENED) + _NOT_OPENED.index(why)


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


class Attached(msgspec.Struct, frozen=True):
    """What became of an attach: ``refused`` is None if the store is used from here on, on all ranks; else nothing has changed.

    ``rank``: the first one that has no store ready, if it has said so.  "given_up": a rank whose cache is failing.
    """

    refused: NotOpened | Literal["given_up", "degraded"] | None = None
    rank: int | None = None


def attached(value: int) -> Attached:
    """An agreed RESULT of an attach."""
    if value >= OPENED:
        return Attached()
    if value < 1:
        return Attached("given_up")
    rank, why = divmod(value - 1, len(_NOT_OPENED))
    return Attached(_NOT_OPENED[why], rank)


class Cleared(msgspec.Struct, frozen=True):
    """What became of a clear: ``refused`` is None if all ranks have removed what they had stored; else some of it may be there
    still.  In either case nothing counts as stored any more, but for "no_storage" and "degraded".

    ``rank``: the first one that has not, if it has said so.  "given_up": a rank whose cache is failing.  ``job``: 0 if it is over.
    """

    refused: NotOpened | Literal["given_up", "degraded", "no_storage"] | None = None
    rank: int | None = None
    job: int = 0


def cleared(value: int, job: int) -> Cleared:
    """An agreed RESULT of a clear, which is that of an attach."""
    outcome = attached(value)
    return Cleared(outcome.refused, outcome.rank, job)


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


class Gather(msgspec.Struct, frozen=True):
    """A backup is open, and waits for more pages before it starts."""

    job: int


class StartDrain(msgspec.Struct, frozen=True):
    """Report RELEASED when all ``events`` (of forward passes) and ``holds`` have fired: spoilt, if an event ends with an error."""

    job: int
    events: tuple[object, ...]
    holds: tuple[object, ...] = ()


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


class StartAttach(msgspec.Struct, frozen=True):
    """Open a store beside the one in use; RESULT is `OPENED` or `not_opened`.  Keep it for `UseStorage`, close it if 0 is settled.

    ``number`` names the attach where it was asked for; the other ranks go by ``url``.
    """

    job: int
    number: int
    url: str
    deadline_s: float


class StartClear(msgspec.Struct, frozen=True):
    """Remove what this rank has stored, as far as ``deadline_s`` allows; RESULT is `OPENED` or `not_opened`."""

    job: int
    deadline_s: float


class StartOpen(msgspec.Struct, frozen=True):
    """Make the memory of host slots [first_page, first_page + pages) ready; RESULT is ``pages``, or 0 if it cannot be."""

    job: int
    first_page: int
    pages: int


class UseStorage(msgspec.Struct, frozen=True):
    """Storage jobs started from here on are about the store that was opened for attach ``number``; or there are none, if not
    ``attached``.

    Those started before have ``deadline_s`` to end at the store that they began with.
    """

    attached: bool
    number: int = 0
    deadline_s: float = 0.0


class UseWeights(msgspec.Struct, frozen=True):
    """Storage jobs started from here on are about pages of a model with these weights; those started before, of the old one."""

    weights: str


Effect: TypeAlias = (
    StartPrefetch
    | StartLoad
    | StartWriteBack
    | StartBackup
    | StartDrain
    | Grant
    | Settled
    | StopJob
    | Gather
    | Forget
    | Wake
    | StartAttach
    | StartClear
    | StartOpen
    | UseStorage
    | UseWeights
    | Changed
)
