"""What the runtime lets one see: bound logs, counters, rings of recent messages and frozen snapshots.

Logs are bound once per actor and once per job; nothing is logged per message.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import structlog

RING_MESSAGES = 256
_SHOWN_CHARACTERS = 400

ActorState: TypeAlias = Literal["new", "running", "stopped", "failed"]
SystemState: TypeAlias = Literal["new", "running", "closing", "stopped", "failed"]


def bind_log(**values: object) -> Any:
    """A structlog logger bound to ``values`` (``actor=``, ``job=``, ``rid=``).

    Follows the embedder's structlog configuration; without one it goes through the standard logger "hicache_actors", so a
    program that has configured nothing sees warnings and errors on stderr and nothing else.
    """
    if structlog.is_configured():
        return structlog.get_logger(**values)
    return structlog.wrap_logger(
        logging.getLogger("hicache_actors"),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    ).bind(**values)


class ActorSnapshot(msgspec.Struct, frozen=True):
    """``declined``: asks answered with a `Declined`; ``errors``: handlers that raised; ``refused``: puts on a full lane;
    ``discarded``: told messages that were still queued when the actor ended.  High-water marks are taken at wake-ups."""

    name: str
    state: ActorState
    handled: int
    declined: int
    errors: int
    refused: int
    discarded: int
    control_depth: int
    data_depth: int
    control_high_water: int
    data_high_water: int
    busy_s: float


class JobsSnapshot(msgspec.Struct, frozen=True):
    """Pipelines of one name: ``started = running + ended + cancelled + failed``."""

    name: str
    started: int
    running: int
    ended: int
    cancelled: int
    failed: int


class WorkersSnapshot(msgspec.Struct, frozen=True):
    """``lost``: calls whose caller has left while their thread still runs them."""

    name: str
    threads: int
    running: int
    queued: int
    lost: int


class SystemSnapshot(msgspec.Struct, frozen=True):
    name: str
    state: SystemState
    failure: str | None
    actors: tuple[ActorSnapshot, ...]
    jobs: tuple[JobsSnapshot, ...]


class Failure(msgspec.Struct, frozen=True):
    """The first failure of a system.  ``rings``: the last messages of each actor, oldest first, as they were handled; the last
    one of ``source`` is the one that failed."""

    source: str
    error: BaseException
    rings: Mapping[str, Sequence[object]]


def describe_rings(rings: Mapping[str, Sequence[object]]) -> dict[str, list[str]]:
    """Rings as text for a log, each message cut to a few hundred characters."""
    return {name: [_shown(message) for message in ring] for name, ring in rings.items() if ring}


def unwrap(error: BaseException) -> BaseException:
    """The cause inside exception groups that hold only one; a group of several stays a group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _shown(message: object) -> str:
    text = repr(message)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
