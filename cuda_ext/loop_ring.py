"""What wakes the coroutines of one event loop: one ring, one eventfd, one reader, whatever the number of waits and devices."""

from __future__ import annotations

import asyncio
import weakref
from typing import Final

from hicache_actors.cuda_ext.native.events import Event
from hicache_actors.cuda_ext.native.ring import CAPACITY, Counts, Ring
from hicache_actors.errors import StoppedError
from hicache_actors.runtime import bind_log

_RINGS: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopRing]] = weakref.WeakKeyDictionary()


def ring_of(loop: asyncio.AbstractEventLoop) -> LoopRing | None:
    """The open ring of a loop."""
    return _RINGS.get(loop)


class LoopRing:
    """Shared by all who `open` it on one loop, and closed by the last of them.  Called on the loop's thread only.

    While nothing ends it costs nothing; while much ends, one wake-up of the loop resolves all that has ended until then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, capacity: int = CAPACITY) -> None:
        """For `open`.  The loop holds the ring, not the ring the loop: one that is closed without `close` takes it along."""
        self._ring: Ring[asyncio.Future[None]] = Ring(capacity)
        self._users = 0
        self._idle: asyncio.Future[None] | None = None
        loop.add_reader(self._ring.fd, self._resolve)

    @classmethod
    def open(cls, capacity: int = CAPACITY) -> LoopRing:
        """That of the running loop.  Raises `OSError` if there is no descriptor left."""
        loop = asyncio.get_running_loop()
        ring = _RINGS.get(loop)
        if ring is None:
            ring = _RINGS[loop] = cls(loop, capacity)
        ring._users += 1
        return ring

    def watch(self, event: Event, future: asyncio.Future[None]) -> None:
        """Resolve ``future`` when the event has ended, unless it is done by then."""
        self._ring.add(event, future)

    @property
    def in_flight(self) -> int:
        """Futures that wait."""
        return len(self._ring)

    def counts(self) -> Counts:
        return self._ring.counts()

    async def close(self, timeout_s: float) -> bool:
        """Let go of it; the last user waits for what is in flight -> False if something was left after ``timeout_s``.

        What is left fails with `StoppedError`.  Its event may end later: it then finds no descriptor of a stranger.
        """
        loop = asyncio.get_running_loop()
        self._users -= 1
        if self._users or _RINGS.get(loop) is not self:
            return True
        try:
            if self._awaited():
                self._idle = loop.create_future()
                async with asyncio.timeout(timeout_s):
                    await self._idle
        except TimeoutError:
            bind_log(part="device").warning("tickets_left_at_close", tickets=len(self._awaited()))
        finally:
            left = self._end(loop) if not self._users else []
        return not left

    def _end(self, loop: asyncio.AbstractEventLoop) -> list[asyncio.Future[None]]:
        del _RINGS[loop]
        loop.remove_reader(self._ring.fd)
        left = self._awaited()
        self._ring.abandon()
        for future in left:
            future.set_exception(StoppedError("the loop stopped listening before this had ended"))
        return left

    def _awaited(self) -> list[asyncio.Future[None]]:
        """Not those whose waiters have been cancelled."""
        return [future for future in self._ring.waiting() if not future.done()]

    def _resolve(self) -> None:
        for future in self._ring.take():
            if not future.done():
                future.set_result(None)
        if self._idle is not None and not self._idle.done() and not self._awaited():
            self._idle.set_result(None)
