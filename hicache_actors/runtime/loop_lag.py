"""How late an event loop wakes who asked to be woken: the time that somebody else has blocked it."""

from __future__ import annotations

from typing import Final, NoReturn

import anyio

from hicache_actors.runtime.histogram import Histogram, HistogramSnapshot

PERIOD_S: Final = 0.1
BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class LoopLag:
    """Spawn `run` in a system: ten wake-ups a second, each compared with when it was due.

    It never ends by itself: cancel its job.  Useless in virtual time, where nothing blocks and every timer is punctual.
    """

    def __init__(self, period_s: float = PERIOD_S) -> None:
        if period_s < 0.05:
            raise ValueError(f"period_s = {period_s}: at least 0.05, or the sampler itself becomes a load")
        self.period_s = period_s
        self._lags = Histogram(BOUNDS_S)

    async def run(self) -> NoReturn:
        while True:
            due = anyio.current_time() + self.period_s
            await anyio.sleep(self.period_s)
            self._lags.add(max(0.0, anyio.current_time() - due))

    def snapshot(self) -> HistogramSnapshot:
        return self._lags.snapshot()
