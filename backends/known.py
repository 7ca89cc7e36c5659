"""What is known to be stored, for a while: saves the look-up, never decides about a write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

MAX_KEYS: Final = 1 << 18


class Known:
    """Keys that were found, each for ``ttl_s`` seconds from when it was last seen; 0 keeps nothing, infinity for ever.

    Only what is there is kept: what another process has stored meanwhile is found at once.  A key that somebody else removed
    is an answer too many of `exists`, and becomes a miss when it is read.  One thread.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._until_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def leading(self, keys: Sequence[str], now_s: float) -> int:
        """Length of the leading run of ``keys`` that are known to be there."""
        for n, key in enumerate(keys):
            until_s = self._until_s.get(key)
            if until_s is None:
                return n
            if until_s <= now_s:
                del self._until_s[key]
                return n
        return len(keys)

    def add(self, keys: Iterable[str], now_s: float) -> None:
        if not self._ttl_s:
            return
        for key in keys:
            self._until_s.pop(key, None)  # the order is that of their ends
            self._until_s[key] = now_s + self._ttl_s
        while len(self._until_s) > MAX_KEYS:
            del self._until_s[next(iter(self._until_s))]

    def discard(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._until_s.pop(key, None)
