"""Who has been asked for before: most prefixes come once, and a disk need not be written for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

_MAX_KEYS: Final = 1 << 18


class Doorkeeper:
    """Keeps the last keys that were asked for and not found.  Any thread.

    A key is admitted from its second time on: the first request computes its pages and is refused, the second computes them
    again and is stored.  Retries of a refused write do not count.
    """

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._asked: dict[str, int] = {}
        self._lock = threading.Lock()

    def ask(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._asked[key] = self._asked.pop(key, 0) + 1  # the order is that of the last time
            while len(self._asked) > self._max_keys:
                del self._asked[next(iter(self._asked))]

    def admits(self, key: str) -> bool:
        with self._lock:
            return self._asked.get(key, 0) >= 2
