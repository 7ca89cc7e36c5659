"""A long run of all that requests do, on Core and every pipeline: no byte is wrong, no slot is lost, and memory does not grow.

The default run is a tenth of the long one (``slow``) and prints its slope; in so short a run allocators still grow, so its bound is
lax.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections import Counter
from collections.abc import Sequence

import psutil
import pytest

from hicache_actors.errors import TransferError
from hicache_actors.testing.engines import NoRoom
from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.small import PAGE_SIZE, Small, open_small, prompt

MIB = 1 << 20
FAMILIES = 48  #: prompts to choose from; the store holds all of them in the end, and grows no more
WORKERS = 8
SAMPLE_EVERY = 1_000
VIRTUAL = ["virtual:5"]


class Soak:
    """``workers`` that do one operation after the other until ``operations`` have been done."""

    def __init__(self, small: Small, operations: int, seed: int) -> None:
        self.small, self.operations = small, operations
        self.done: Counter[str] = Counter()
        self.rss_bytes: list[int] = []
        self._random = random.Random(seed)
        self._process = psutil.Process()
        self._next = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._work() for _ in range(WORKERS)))

    async def _work(self) -> None:
        kinds = {
            self._answer: 10,
            self._match: 30,
            self._lease: 30,
            self._leave: 6,
            self._prefetch: 6,
            self._stored: 4,
            self._evict: 1,
            self._snapshot: 2,
        }
        chosen = [kind for kind, weight in kinds.items() for _ in range(weight)]
        while self._next < self.operations:
            number, self._next = self._next, self._next + 1
            if number % SAMPLE_EVERY == 0:
                self._sample()
            kind = self._reset if number % 2_500 == 2_499 else self._random.choice(chosen)
            await kind(f"soak-{number}")
            self.done[kind.__name__] += 1

    def _sample(self) -> None:
        check_conservation(self.small.cache.core)
        gc.collect()
        self.rss_bytes.append(self._process.memory_info().rss)

    def _pages(self) -> int:
        return self._random.randint(1, 6)

    def _family(self) -> int:
        return self._random.randrange(FAMILIES)

    # -- operations ----------------------------------------------------------------------------------------------------------

    async def _answer(self, rid: str) -> None:
        """Fetch, load, compute and check every byte, commit, write through."""
        with contextlib.suppress(NoRoom, TransferError):  # a reset while it loads; a full pool
            await self.small.engine.answer(prompt(self._pages(), family=self._family()), self._random.choice((1, 1, 6)))

    async def _match(self, rid: str) -> None:
        found = self.small.cache.match(prompt(self._pages(), family=self._family()))
        assert found.device <= found.host

    async def _lease(self, rid: str) -> None:
        async with self.small.cache.lease(prompt(self._pages(), family=self._family()), rid) as lease:
            lease.load()
            lease.allocate(PAGE_SIZE)

    async def _leave(self, rid: str) -> None:
        """Ask for a lease, and go away before or after it has come."""

        async def ask() -> None:
            async with self.small.cache.acquire(prompt(self._pages(), family=self._family()), rid=rid):
                await asyncio.sleep(0)

        task = asyncio.ensure_future(ask())
        for _ in range(self._random.randrange(6)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})

    async def _prefetch(self, rid: str) -> None:
        fetch = self.small.cache.prefetch(prompt(self._pages(), family=self._family()), rid, deadline_s=2.0)
        if self._random.random() < 0.5:
            await asyncio.sleep(0)
            fetch.stop()
        await fetch.wait()

    async def _stored(self, rid: str) -> None:
        await self.small.cache.stored(prompt(self._pages(), family=self._family()), 0.01)

    async def _evict(self, rid: str) -> None:
        """A prompt that takes most of the device."""
        with contextlib.suppress(NoRoom, TransferError):
            await self.small.engine.answer(prompt(self.small.cache.kv.pages // 2, family=self._family()))

    async def _snapshot(self, rid: str) -> None:
        assert self.small.cache.snapshot().state == "open"

    async def _reset(self, rid: str) -> None:
        await self.small.cache.reset()


def slope_bytes(samples: Sequence[int]) -> float:
    """Growth per 10,000 operations: the line through all samples, by least squares."""
    middle = (len(samples) - 1) / 2
    mean = sum(samples) / len(samples)
    across = sum((at - middle) * (sample - mean) for at, sample in enumerate(samples))
    return across / sum((at - middle) ** 2 for at in range(len(samples))) * (10_000 / SAMPLE_EVERY)


async def soaked(operations: int, seed: int) -> Soak:
    async with open_small(device_pages=48, host_pages=96, url="memory://soak") as small:
        soak = Soak(small, operations, seed)
        await soak.run()
        assert sum(soak.done.values()) == operations
        assert all(soak.done[kind] for kind in ("_answer", "_leave", "_prefetch", "_reset"))
        counts = small.cache.snapshot().flows
        assert all(counts[direction].pages for direction in ("load", "write_back", "backup", "prefetch"))
    return soak


@pytest.mark.parametrize("anyio_backend", VIRTUAL, indirect=True)
async def test_ten_thousand_operations() -> None:
    soak = await soaked(10_000, seed=1)
    slope = slope_bytes(soak.rss_bytes[len(soak.rss_bytes) // 2 :])
    print(f"RSS slope: {slope / MIB:+.2f} MiB per 10,000 operations ({dict(soak.done)})")
    assert slope < 16 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", [*VIRTUAL, "asyncio"], indirect=True)
async def test_a_hundred_thousand_operations() -> None:
    soak = await soaked(100_000, seed=2)
    slope = slope_bytes(soak.rss_bytes[20_000 // SAMPLE_EVERY :])
    print(f"RSS slope: {slope / MIB:+.2f} MiB per 10,000 operations ({dict(soak.done)})")
    assert slope < MIB
