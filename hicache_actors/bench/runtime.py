"""What a message costs: a tell until it has been handled, and an ask until the asker runs again.  Plain asyncio, one process."""

from __future__ import annotations

import asyncio
import gc
from argparse import Namespace
from time import perf_counter

from hicache_actors.runtime import Actor, Ask, Message, System, handles

RUNS = 5
ASKS = 5_000
TELL_BATCHES = 200
TELLS_PER_BATCH = 64


class Add(Message, frozen=True):
    count: int


class Total(Ask[int], frozen=True):
    pass


class Adder(Actor):
    """The least an actor can do, so that what is measured is the runtime."""

    def __init__(self) -> None:
        super().__init__("adder")
        self.total = 0

    @handles(Add)
    def add(self, message: Add) -> None:
        self.total += message.count

    @handles(Total)
    def answer(self, message: Total) -> int:
        return self.total


def run(options: Namespace, *, quiet: bool) -> dict[str, float]:
    """Microseconds: ``tell_us``, ``ask_us`` (medians of the best of 5 runs, or of one if quick) and its ``_p999`` and ``_max``.

    A tell is timed in batches of 64 and given per message; an ask is timed alone, with nothing else on the loop.
    """
    return asyncio.run(_run(1 if options.quick else RUNS))


async def _run(runs: int) -> dict[str, float]:
    tells, asks = [], []
    async with System("bench") as system:
        adder = Adder()
        await system.start(adder)
        for _ in range(runs):
            gc.collect()
            gc.disable()
            try:
                tells.append(await _time_tells(adder))
                asks.append(await _time_asks(adder))
            finally:
                gc.enable()
    return {**_figures("tell_us", tells), **_figures("ask_us", asks)}


async def _time_tells(adder: Adder) -> list[float]:
    message = Add(1)
    times_us = []
    for _ in range(TELL_BATCHES):
        expected = adder.total + TELLS_PER_BATCH
        started = perf_counter()
        for _ in range(TELLS_PER_BATCH):
            adder.tell(message)
        while adder.total < expected:  # noqa: ASYNC110 - a turn of the loop is what is timed
            await asyncio.sleep(0)
        times_us.append((perf_counter() - started) / TELLS_PER_BATCH * 1e6)
    return sorted(times_us)


async def _time_asks(adder: Adder) -> list[float]:
    message = Total()
    times_us = []
    for _ in range(ASKS):
        started = perf_counter()
        await adder.ask(message)
        times_us.append((perf_counter() - started) * 1e6)
    return sorted(times_us)


def _figures(name: str, runs: list[list[float]]) -> dict[str, float]:
    best = min(runs, key=lambda times: times[len(times) // 2])
    return {
        name: round(best[len(best) // 2], 3),
        f"{name}_p999": round(best[int(len(best) * 0.999)], 3),
        f"{name}_max": round(best[-1], 3),
    }
