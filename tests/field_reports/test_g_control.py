"""Field reports, section G: control at run time: detach, reset, and the question whether anything is under way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Slow, Wrapper
from hicache_actors.testing.pools import check_conservation, check_whole
from hicache_actors.testing.small import prompt

from .kit import LOOPS, PAGE, VIRTUAL, compute, opened, store


class Counting(Wrapper):
    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.calls = 0

    async def exists(self, keys: Sequence[str]) -> int:
        self.calls += 1
        return await super().exists(keys)

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        self.calls += 1
        return await super().read(keys, buffers)

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        self.calls += 1
        return await super().write(keys, buffers)


@VIRTUAL
async def test_b109_detach_waits_for_what_is_pending_and_the_backend_sees_no_call_after_it(
    anyio_backend: object,
) -> None:
    """Given 3 copies and 2 writes under way.
    When the store is detached.
    Then that waits for them, match and snapshot stay quick meanwhile, and no call is made afterwards."""
    backend = Counting(Slow(MemoryBackend(), latency_s=1.0))
    async with opened(device_pages=64, host_pages=64, backend=backend) as small:
        for family in range(2):
            await compute(small, prompt(4, family=family))
            await anyio.sleep(0.1)  # or they would be stored together
        assert small.cache.core.usage().jobs["backup.run"] == 2
        small.device.throttle(latency_s=0.1)
        for family in range(2, 5):
            await compute(small, prompt(4, family=family))
        looks = 0

        async def look() -> None:
            nonlocal looks
            while True:
                began_s = anyio.current_time()
                small.cache.snapshot()
                small.cache.match(prompt(4))
                assert anyio.current_time() == began_s
                looks += 1
                await anyio.sleep(0.05)

        async with anyio.create_task_group() as group:
            group.start_soon(look)
            assert await small.cache.detach_storage(30.0) == 0
            group.cancel_scope.cancel()
        calls = backend.calls
        assert looks > 5
        assert calls >= 2
        for family in range(5, 10):
            await compute(small, prompt(4, family=family))
        await small.cache.drain(10.0)
        await anyio.sleep(10.0)
        assert backend.calls == calls


@LOOPS
async def test_b111_a_reset_right_after_each_request_works_each_time(anyio_backend: object) -> None:
    """Given write_through.
    When a reset directly follows each of 120 requests, whose copies and writes still run.
    Then each works within its limit, nothing is found afterwards, and no page is lost."""
    await _reset_after_each_request(backend=MemoryBackend())


async def test_b111_a_reset_right_after_each_request_works_with_files(tmp_path: Path) -> None:
    """As above, with a folder as the store: 120 requests, each followed by a reset."""
    await _reset_after_each_request(url=f"file://{tmp_path}")


async def _reset_after_each_request(**settings: Any) -> None:
    async with opened(**settings) as small:
        for number in range(120):
            await compute(small, prompt(3, family=number % 7))
            with anyio.fail_after(5.0):
                await small.cache.reset()
            assert small.cache.match(prompt(3, family=number % 7)).host == 0
        with anyio.fail_after(5.0):
            await small.cache.pipelines.idle()
        check_whole(small.cache.core)


@VIRTUAL
async def test_b113_the_cache_is_not_idle_in_any_stage_and_nothing_looks_lost(anyio_backend: object) -> None:
    """Given slow copies and calls, so that each stage lasts.
    When one looks every 50 ms, and again when all has ended.
    Then open work is seen in each stage and every page has an owner; at the end nothing is open."""
    memory = MemoryBackend()
    await store(memory, prompt(6, family=9))
    backend = Slow(memory, latency_s=0.5)
    async with opened(device_pages=16, host_pages=32, backend=backend) as small:
        small.device.throttle(latency_s=0.2)
        seen: set[str] = set()
        done = False

        async def work() -> None:
            nonlocal done
            for family in (9, 1, 9, 2):
                await small.engine.answer(prompt(6, family=family))
            await compute(small, prompt(14, family=3))
            await small.engine.answer(prompt(6, family=9))
            await small.cache.drain(30.0)
            done = True

        async with anyio.create_task_group() as group:
            group.start_soon(work)
            while not done:
                usage = small.cache.core.usage()
                check_conservation(small.cache.core)
                small.cache.core.check()
                seen |= set(usage.jobs)
                assert bool(small.cache.pipelines.open_jobs) >= bool(usage.jobs)
                await anyio.sleep(0.05)
        assert {"prefetch.hit", "prefetch.run", "load.run", "write_back.run", "backup.run"} <= seen
        await small.cache.pipelines.idle()
        assert not small.cache.core.usage().jobs
        assert small.cache.match(prompt(6, family=9)).host == 6 * PAGE
