"""How late an event loop wakes who asked to be woken: the time that somebody else has blocked it."""

from __future__ import annotations

import asyncio
from typing import Final

from hicache_actors.runtime.histogram import Histogram, HistogramSnapshot

PERIOD_S: Final = 0.25
BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class LoopLag:
    """Spawn `run` in a system: four wake-ups a second, each compared with when it was due.

    It never ends by itself: cancel its job.  Useless in virtual time, where nothing blocks and every timer is punctual.
    """

    def __init__(self, period_s: float = PERIOD_S) -> None:
        if period_s < 0.05:
            raise ValueError(f"period_s = {period_s}: at least 0.05, or the sampler itself becomes a load")
        self.period_s = period_s
        self._lags = Histogram(BOUNDS_S)

    async def run(self) -> None:
        """By bare timers of the loop: a coroutine that wakes so often would be most of what an idle process costs."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def woken(due_s: float) -> None:
            nonlocal timer
            now_s = loop.time()
            self._lags.add(max(0.0, now_s - due_s))
            timer = loop.call_later(self.period_s, woken, now_s + self.period_s)

        timer = loop.call_later(self.period_s, woken, loop.time() + self.period_s)
        try:
            await loop.create_future()
        finally:
            timer.cancel()

    def snapshot(self) -> HistogramSnapshot:
        return self._lags.snapshot()
