"""What the storage tier is told, and what it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias

import msgspec

from hicache_actors.runtime import Control
from hicache_actors.runtime.breaker import BreakerSnapshot

Direction: TypeAlias = Literal["query", "read", "write"]
"""Calls of one direction share a queue, limits, threads and a breaker.  ``query``: lookups, and all that moves no pages."""

CallKind: TypeAlias = Literal["query", "read", "seal", "write", "quarantine", "delete", "list", "scrub"]

DIRECTIONS: Final[tuple[Direction, ...]] = ("query", "read", "write")

Refusal: TypeAlias = Literal["hung", "breaker", "credits", "latency", "detached"]
"""Why a call was not made: too many calls of its direction hang; its breaker is open; (writes, which are shed first) more bytes
wait than may, or reads take long; the store has been detached."""


class CallBegun(Control, frozen=True):
    """A call goes to the backend."""

    kind: CallKind


class CallFailed(Control, frozen=True):
    kind: CallKind
    error: str


class CallRefused(Control, frozen=True):
    direction: Direction
    reason: Refusal


class Counted(Control, frozen=True):
    """Add to one of the counters of `StorageSnapshot`."""

    what: Literal[
        "read_pages",
        "written_pages",
        "present_pages",
        "joined_pages",
        "corrupt_pages",
        "foreign_pages",
        "lookups",
        "lookup_hits",
        "scrubbed_objects",
        "scrubbed_bytes",
        "scrubbed_bad_objects",
    ]
    pages: int


Note: TypeAlias = Callable[[CallBegun | CallFailed | CallRefused | Counted], None]
"""Where calls are counted."""


class StagingSnapshot(msgspec.Struct, frozen=True):
    """Staging slots of one direction, now.  ``held_pages``: with calls; ``hung_pages`` of them with calls past their deadline."""

    total_pages: int
    held_pages: int
    hung_pages: int


class LaneSnapshot(msgspec.Struct, frozen=True):
    """One direction of the attached store, now.

    ``waiting_*``: not begun; ``running_calls`` (at most ``concurrency``) and ``in_flight_bytes`` (credits: ``limit_bytes``): at the
    backend, within their deadline; ``hung_*``: at the backend, past it.
    """

    waiting_calls: int
    waiting_bytes: int
    running_calls: int
    concurrency: int
    in_flight_bytes: int
    limit_bytes: int | None
    hung_calls: int
    max_hung_calls: int
    hung_bytes: int
    breaker: BreakerSnapshot


class StorageSnapshot(msgspec.Struct, frozen=True):
    """Counters count since the cache was opened, whatever stores it has had; ``lanes``, ``scope`` and ``backend`` are of the
    attached one (``url`` None: there is none), ``staging`` of all of them (empty if pages need none).

    ``calls``, ``errors``: by kind of call; ``refused``: by direction and reason, calls that were not made.  ``present_pages``:
    offered, but stored already; ``joined_pages``: written by another call at the same time.  ``corrupt_pages``: failed the
    checksum, and quarantined; ``foreign_pages``: another namespace's, a plain miss.  ``open_calls`` run now; ``detached_calls`` of
    them at stores that have been detached, and hang.  ``read_latency_s``: moving average, None without recent reads.

    ``shared_with``: who finds what is stored, in words; ``neighbours``: objects of the same model that were seen when the store was
    attached and cannot be shared, by how they divide it.  ``lookups``: those that the store has answered, ``lookup_hits`` of them
    found something; ``never_hits``: the attached store is populated, as far as is known, and not one of many has.  ``scrubbed_*``:
    read in the background to be verified.
    """

    url: str | None
    scope: str | None
    attached: int
    calls: Mapping[str, int]
    errors: Mapping[str, int]
    refused: Mapping[Direction, Mapping[Refusal, int]]
    read_pages: int
    written_pages: int
    present_pages: int
    joined_pages: int
    corrupt_pages: int
    foreign_pages: int
    open_calls: int
    detached_calls: int
    read_latency_s: float | None
    lanes: Mapping[Direction, LaneSnapshot]
    staging: Mapping[Direction, StagingSnapshot]
    shared_with: str | None
    neighbours: Mapping[str, int]
    lookups: int
    lookup_hits: int
    never_hits: bool
    scrubbed_objects: int
    scrubbed_bytes: int
    scrubbed_bad_objects: int
    last_error: str | None
    backend: Mapping[str, int | float | str]
