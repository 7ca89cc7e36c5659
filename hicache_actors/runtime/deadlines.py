"""One deadline per job: a point on the loop's clock that stages compare with and hand on."""

from __future__ import annotations

import asyncio
import math
from contextlib import AbstractContextManager

import anyio
import msgspec


class Deadline(msgspec.Struct, frozen=True, order=True):
    """``at_s`` on the monotonic clock of the running loop (virtual time in tests).  Compares by time."""

    at_s: float

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """``seconds`` from now; None means never."""
        return cls(math.inf if seconds is None else asyncio.get_running_loop().time() + seconds)

    @property
    def remaining_s(self) -> float:
        """Never below 0."""
        return max(0.0, self.at_s - asyncio.get_running_loop().time())

    @property
    def expired(self) -> bool:
        return self.at_s <= asyncio.get_running_loop().time()

    def sooner(self, seconds: float | None) -> Deadline:
        """The earlier of this one and ``seconds`` from now."""
        return min(self, Deadline.after(seconds))

    def move_on(self) -> anyio.CancelScope:
        """A scope that ends quietly at the deadline: see ``scope.cancelled_caught``."""
        return anyio.CancelScope(deadline=self.at_s)

    def fail(self) -> AbstractContextManager[anyio.CancelScope]:
        """A scope that raises TimeoutError at the deadline."""
        return anyio.fail_after(None if math.isinf(self.at_s) else self.remaining_s)
