"""Field reports, section H: figures and events."""

from __future__ import annotations

import random

import anyio

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.events import Directory
from hicache_actors.testing.small import evict_device, prompt
from tests.events.kit import really

from .kit import LOOPS, VIRTUAL, branch, compute, opened, quiet


@LOOPS
async def test_b115_the_share_of_hits_is_counted_and_not_that_of_the_last_request(anyio_backend: object) -> None:
    """Given 10 requests with 90 % hits, and then one with none.
    When the counters are read.
    Then they give 90 % over the window of the 10."""
    async with opened(device_pages=80) as small:
        await compute(small, prompt(9, extra=4))
        before = small.cache.snapshot().core.served
        for _ in range(10):
            await compute(small, prompt(9, extra=4))  # 36 of 40 tokens
        after = small.cache.snapshot().core.served
        await compute(small, prompt(9, family=3, extra=4))
        last = small.cache.snapshot().core.served
        assert (after.device - before.device, after.computed - before.computed) == (360, 40)
        assert (last.device - before.device, last.computed - before.computed) == (360, 80)


@LOOPS
async def test_b117_pages_and_bytes_are_counted_on_each_of_the_four_ways(anyio_backend: object) -> None:
    """Given 10 pages that move once on each of the four ways.
    Then each way's counters say 10 pages and 10 x the bytes of a page."""
    async with opened(device_pages=16, host_pages=64, backend=MemoryBackend()) as small:
        page_bytes = small.cache.kv.shape.page_bytes
        asked = prompt(10, extra=1)

        def moved() -> dict[str, tuple[int, int]]:
            flows = small.cache.snapshot().flows
            return {way: (flow.pages, flow.bytes) for way, flow in flows.items()}

        await compute(small, asked)
        await small.cache.drain(10.0)
        await quiet(small)
        ten = (10, 10 * page_bytes)
        assert moved() == {"write_back": ten, "backup": ten, "load": (0, 0), "prefetch": (0, 0)}
        await small.cache.reset()
        await small.engine.answer(asked)
        await quiet(small)
        assert moved() == {"write_back": ten, "backup": ten, "load": ten, "prefetch": ten}


@VIRTUAL
async def test_b119_a_subscriber_who_keeps_an_index_is_right_when_all_is_quiet(anyio_backend: object) -> None:
    """Given a subscriber that rebuilds the index from events, and 500 random inserts, splits and evictions with slow copies.
    Then its view equals the real content of each tier at quiescence."""
    chance = random.Random(119)
    async with opened(device_pages=24, host_pages=40, backend=MemoryBackend()) as small:
        small.device.throttle(latency_s=0.02)
        events, directory = small.cache.events(queue_batches=10_000), Directory()
        for number in range(1, 501):
            await compute(small, branch(chance.randrange(5), chance.randrange(5, 8), other=500 + chance.randrange(12)))
            if number % 50:
                continue
            await small.cache.drain(30.0)
            await quiet(small)
            real, told = really(small.cache.core), directory.pages
            with anyio.fail_after(60):
                # storage keeps what the tree has forgotten
                while (told["device"], told["host"]) != (real["device"], real["host"]) or real["storage"] - told[
                    "storage"
                ]:
                    directory.apply(await anext(events))
        counts = small.cache.snapshot().counts
        assert counts["evicted_device_pages"] > 100
        assert counts["evicted_host_pages"] > 100
        assert small.cache.snapshot().events.lost_batches == 0
        await evict_device(small)
