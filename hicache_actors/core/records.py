"""What one section has changed of who holds what, said in records: see `changes`."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from hicache_actors.keys.scope import Scope

STORAGE: Final = 2  #: a place of records, beside DEVICE and HOST

Forgotten: TypeAlias = Literal["begin", "reset", "degraded", "storage"]


class Added(NamedTuple):
    """A node, present nowhere yet.  ``key`` is the parent's tag and its first page, ``rest`` the others; ``scope`` is None unless
    it hangs on a root.
    """

    tag: bytes
    parent: bytes
    scope: Scope | None
    key: bytes
    rest: bytes


class Split(NamedTuple):
    """The first ``pages`` pages of ``tag`` are the node ``head`` now, wherever they are."""

    tag: bytes
    head: bytes
    pages: int


class Joined(NamedTuple):
    """Nodes that followed one another are one, under the tag of the last."""

    tags: tuple[bytes, ...]


class Gone(NamedTuple):
    """The node has left the tree; it was present nowhere any more."""

    tag: bytes


class Came(NamedTuple):
    tag: bytes
    place: int


class Left(NamedTuple):
    tag: bytes
    place: int


class Cleared(NamedTuple):
    """begin: all nodes, for the records start here; reset, degraded: device and host; storage: that alone."""

    why: Forgotten


class Told(NamedTuple):
    """Part of what was there before has been said; ``left`` nodes are still to come."""

    left: int


Record: TypeAlias = Added | Split | Joined | Gone | Came | Left | Cleared | Told


class Changed(msgspec.Struct, frozen=True):
    """The records of one section, in order.  ``decided``: decisions so far, equal on all ranks, more with each such section."""

    decided: int
    epoch: int
    now_ms: int
    records: list[Record]
