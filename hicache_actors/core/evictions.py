"""What has left, when, and for whom: a bounded memory that serves `explain` alone.

It is written when a node is evicted, so it must cost next to nothing there: the node's own key names it (nothing is hashed or
copied), and the oldest entry makes room in a ring.  No decision reads it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from hicache_actors.core.node import Node

KEPT: Final = 2048  #: nodes; about 0.7 kB each with pages of 64 tokens


class Cause(NamedTuple):
    """Who needed the slots: "request", "room", "fetch", "write_back" or "save", and the request, where there is one."""

    what: str
    rid: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.rid}".rstrip()


class Eviction(NamedTuple):
    """``pages`` pages left ``place``, the first of them under this entry's key; ``tag`` names their node in its children's keys."""

    tag: bytes
    pages: int
    place: int
    at_ms: int
    cause: Cause


class Evictions:
    """By the key that the node had: its parent's tag and its first page."""

    def __init__(self) -> None:
        self.reset_ms: int | None = None  # when everything was forgotten last
        self._by_key: dict[bytes, Eviction] = {}
        self._ring: list[bytes] = []
        self._next = 0

    def remember(self, node: Node, pages: int, place: int, at_ms: int, cause: Cause) -> None:
        key = node.key
        if key not in self._by_key:
            if len(self._ring) < KEPT:
                self._ring.append(key)
            else:
                self._by_key.pop(self._ring[self._next], None)
                self._ring[self._next] = key
                self._next = (self._next + 1) % KEPT
        self._by_key[key] = Eviction(node.tag, pages, place, at_ms, cause)

    def find(self, key: bytes) -> Eviction | None:
        return self._by_key.get(key)

    def reset(self, at_ms: int) -> None:
        self.reset_ms = at_ms
        self._by_key.clear()
        self._ring.clear()
        self._next = 0

    def __len__(self) -> int:
        return len(self._by_key)
