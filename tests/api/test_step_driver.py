"""An engine in a thread of its own: decisions in its steps, bytes on the loop, two steps in flight."""

from __future__ import annotations

import asyncio
import gc

import anyio.lowlevel
import anyio.to_thread
import pytest

from hicache_actors import HiCache, Prompt, Shortfall, UsageError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.testing.engines import Answer, StepEngine
from hicache_actors.testing.pools import check_conservation, check_whole
from hicache_actors.testing.small import Small, open_small, prompt


async def test_a_step_engine_is_served_by_all_tiers() -> None:
    backend = MemoryBackend()
    turns = [[(f"r{turn}.{family}", prompt(5, family=family)) for family in range(4)] for turn in range(3)]
    answers: dict[str, Answer] = {}
    async with open_small(device_pages=7, host_pages=24, backend=backend, driver="step") as small:
        engine = StepEngine(small.cache, small.model)
        for prompts in turns:
            answers = await anyio.to_thread.run_sync(engine.run, prompts)
        engine.close()
        assert len(answers) == 12
        by_family = {family: {answers[f"r{turn}.{family}"].tokens for turn in range(3)} for family in range(4)}
        assert all(len(tokens) == 1 for tokens in by_family.values()), by_family
        assert sum(answer.account.host for answer in answers.values()) > 0
        check_conservation(small.cache.core)
    async with open_small(device_pages=7, host_pages=24, backend=backend, driver="step") as small:
        engine = StepEngine(small.cache, small.model)
        again = await anyio.to_thread.run_sync(engine.run, turns[0])
        engine.close()
        assert sum(answer.account.storage for answer in again.values()) > 0
        assert all(again[rid].tokens == answers[rid].tokens for rid in again)


async def test_changes_belong_between_begin_and_end() -> None:
    async with open_small(driver="step") as small:
        cache = small.cache
        with pytest.raises(UsageError, match="begin_step"):
            cache.lease(prompt(2), "early")
        await cache.begin_step_async()
        lease = cache.lease(prompt(2), "r")
        cache.end_step()
        with pytest.raises(UsageError, match="begin_step"):
            lease.allocate(1)
        lease.release()  # queued
        assert cache.core.usage().leases == 1
        await cache.begin_step_async()
        assert cache.core.usage().leases == 0
        cache.end_step()
        check_whole(cache.core)


async def test_a_foreign_thread_may_only_release() -> None:
    async with open_small(driver="step") as small:
        cache = small.cache
        await cache.begin_step_async()
        lease = cache.lease(prompt(2), "r")
        cache.end_step()
        with pytest.raises(UsageError, match="thread"):
            await anyio.to_thread.run_sync(cache.match, prompt(2))
        await anyio.to_thread.run_sync(lease.release)
        await cache.begin_step_async()
        cache.end_step()
        check_whole(cache.core)


async def test_an_acquire_that_is_cancelled_on_its_way_leaves_the_verdict_to_others() -> None:
    async with open_small(driver="step") as small:
        cache, asked = small.cache, prompt(4)
        await _to_host(small, asked)
        await cache.begin_step_async()
        other = cache.lease(asked, "other")
        assert not isinstance(other.load(), Shortfall)
        cache.end_step()
        acquiring = asyncio.ensure_future(cache.acquire(asked, rid="r").__aenter__())
        await asyncio.sleep(0)
        await cache.begin_step_async()  # it is asked for in this step, answered at the end of it, ...
        acquiring.cancel()  # ... and nobody is there to be told
        await asyncio.wait({acquiring})
        cache.end_step()
        await _idle(cache)
        assert acquiring.cancelled()
        del acquiring  # and with it the handle that nobody has seen
        gc.collect()
        assert other.loading is not None
        assert (await other.loading.verdict()).failed is None
        other.release()
        await _idle(cache)


async def _to_host(small: Small, asked: Prompt) -> None:
    cache = small.cache
    for rid, each in (("first", asked), ("others", prompt(cache.kv.pages - 1, family=9))):
        await cache.begin_step_async()
        lease = cache.lease(each, rid)
        assert not isinstance(lease.allocate(len(each)), Shortfall)
        lease.commit(len(each))
        lease.release()
        cache.end_step()
        await _idle(cache)
    assert (cache.match(asked).device, cache.match(asked).host) == (0, len(asked) - 1)


async def _idle(cache: HiCache) -> None:
    while cache.needs_step:
        await cache.begin_step_async()
        cache.end_step()


async def test_async_verbs_become_intents_of_the_next_step() -> None:
    async with open_small(driver="step", backend=MemoryBackend()) as small:
        cache = small.cache
        done = anyio.Event()

        async def request() -> None:
            async with cache.acquire(prompt(2)) as lease:
                assert lease.usable_tokens == 0
            await cache.reset()
            done.set()

        async with anyio.create_task_group() as group:
            group.start_soon(request)
            with anyio.fail_after(5):
                while not done.is_set():
                    await cache.begin_step_async()
                    cache.end_step()
                    await anyio.lowlevel.checkpoint()
        while cache.needs_step:
            await cache.begin_step_async()
            cache.end_step()
        check_whole(cache.core)
