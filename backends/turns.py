"""How many threads read at once.

Reading a small object that the page cache has takes a few system calls of microseconds.  Each gives up the interpreter's lock and
wants it back, so threads that do this side by side only wake each other: four of them are slower than one.  As soon as a disk has
to be waited for, or objects are large, they do help.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio

_SMALL_BYTES: Final = 256 << 10
_PATIENCE_S: Final = 0.05


class Turns:
    """On the loop.  Nobody waits for long: behind a read that hangs, others go on beside it."""

    def __init__(self) -> None:
        self._places = anyio.CapacityLimiter(math.inf)

    @asynccontextmanager
    async def turn(self, object_bytes: int) -> AsyncIterator[None]:
        """Around the read of a batch of such objects."""
        if object_bytes > _SMALL_BYTES:
            yield
            return
        place, have_it = object(), False
        with anyio.move_on_after(_PATIENCE_S):
            await self._places.acquire_on_behalf_of(place)
            have_it = True
        try:
            yield
        finally:
            if have_it:
                self._places.release_on_behalf_of(place)

    def saw(self, object_bytes: int, *, disk: bool) -> None:
        """A batch of such objects has been read; whether something that is slower than memory was waited for."""
        if object_bytes <= _SMALL_BYTES:
            self._places.total_tokens = math.inf if disk else 1
