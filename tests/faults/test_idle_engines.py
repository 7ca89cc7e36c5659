"""An engine with driver="step" that makes no more steps: nobody waits for it for ever."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from hicache_actors import StoppedError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.cache.api import Stored
from hicache_actors.testing.lives import other_tasks, run_checked
from hicache_actors.testing.small import open_small, prompt

from .kit import stepping

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2])


@SEEDS
def test_deadlines_hold_without_steps(seed: int | None) -> None:
    async def main() -> None:
        async with open_small(driver="step", backend=MemoryBackend()) as small:
            cache = small.cache
            await cache.begin_step_async()
            lease = cache.lease(prompt(3, extra=0), "r")
            lease.allocate(12)
            small.model.forward(prompt(3, extra=0), tuple(lease.pages), 0, 12)
            lease.commit(12)
            cache.end_step()
            started_s = anyio.current_time()
            assert await cache.drain(1.0) == 3
            assert await cache.stored(prompt(3), 1.0) == Stored(0, "pending")
            assert anyio.current_time() - started_s < 3.0
            async with stepping(cache):
                assert await cache.drain(5.0) == 0
                assert await cache.stored(prompt(3, extra=0), 5.0) == Stored(12, None)
                waiting = cache.core._waiting
                assert not waiting.stores
                assert not waiting.drains
                lease.release()
                await anyio.sleep(0.1)

    run_checked(main, seed)


@SEEDS
@pytest.mark.parametrize("inside_a_step", [False, True])
def test_closing_answers_those_who_wait_for_a_step(inside_a_step: bool, seed: int | None) -> None:
    async def main() -> None:
        async with open_small(driver="step", backend=MemoryBackend(), close_timeout_s=0.5) as small:
            cache = small.cache
            if inside_a_step:
                await cache.begin_step_async()

            async def acquire() -> None:
                async with cache.acquire(prompt(3)):
                    raise AssertionError("no step was made")

            verbs = [acquire(), cache.reset(), cache.drain(60.0), cache.stored(prompt(3), 60.0)]
            waiting = [asyncio.ensure_future(verb) for verb in verbs]
            await anyio.sleep(0.1)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(outcome, StoppedError) for outcome in outcomes), outcomes
        assert small.cache.core.usage().leases == 0
        assert not other_tasks()

    run_checked(main, seed)
