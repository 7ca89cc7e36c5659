"""Field reports, section C, under each write policy; and what write_back promises on a whole cache."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hicache_actors import Config, PolicyConfig, PolicyRefused, Shortfall
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Hanging
from hicache_actors.cache.api import Stored as StoredTokens
from hicache_actors.policy_config import EVICTIONS, WRITE_POLICIES, WritePolicy
from hicache_actors.testing.small import prompt, small_config

from .kit import LOOPS, PAGE, VIRTUAL, branch, compute, ended, from_storage, on_device_and_host, opened, quiet, until


def config(write_policy: WritePolicy, host_pages: int = 32, **policy: Any) -> Config:
    return msgspec.structs.replace(
        small_config(host_pages=host_pages), write_policy=write_policy, policy=PolicyConfig(**policy)
    )


@LOOPS
async def test_b040_dirty_pages_without_room_on_the_host_are_a_miss(anyio_backend: object) -> None:
    """Given write_back, and a host pool in which every page is pinned.
    When 4 dirty device pages are in the way of a request.
    Then it is served; they are a miss, counted, and were never listed as on the host."""
    slow = Hanging(MemoryBackend(), ["write"])
    settings = config("write_back", host_pages=8, write_back_water_mark=1.0, write_back_dirty_cap=1.0)
    async with opened(device_pages=16, config=settings, backend=slow) as small:
        pinned, asked = prompt(8, family=1), prompt(4)
        await compute(small, pinned)
        assert (await small.cache.stored(pinned, 0.2)).reason == "pending"
        await until(lambda: slow.hung == 1)
        await compute(small, asked)
        await ended(small, "write_back", "drain", "load")
        assert on_device_and_host(small, asked) == (4, 4)
        host = small.cache.core.usage().host
        assert (host.free_pages, host.evictable_pages) == (0, 0)
        lease = small.cache.lease(prompt(0), "needs all")
        granted = lease.allocate(16 * PAGE)
        assert not isinstance(granted, Shortfall), granted
        assert on_device_and_host(small, asked) == (0, 0)
        assert small.cache.snapshot().counts["dropped_dirty_pages"] == 4
        lease.release()
        slow.release()


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@LOOPS
async def test_b047_every_write_policy_reaches_the_store(anyio_backend: object, write_policy: WritePolicy) -> None:
    """Given traffic of 4 times the device and twice the host, each prompt used twice.
    When all prefixes are replayed.
    Then the store gives what the host had dropped, and more than nothing."""
    backend = MemoryBackend()
    async with opened(device_pages=8, config=config(write_policy, host_pages=16), backend=backend) as small:
        prompts = [prompt(4, family=family) for family in range(8)]
        answers = []
        for asked in prompts:
            answers.append(await compute(small, asked))
            assert (await compute(small, asked)).account.device == 4 * PAGE
            await quiet(small)
        assert await small.cache.drain(60.0) == 0
        assert backend.stats()["objects"] == 32
        assert await from_storage(small, prompts, answers) >= 2 * 4 * PAGE


@LOOPS
async def test_b056_a_request_is_counted_once(anyio_backend: object) -> None:
    """Given write_through_selective with its threshold of 2.
    When one request runs to its end, in chunks, and then a second with the same prefix.
    Then the first backs up nothing, the second the prefix, once."""
    backend = MemoryBackend()
    async with opened(config=config("write_through_selective"), backend=backend) as small:
        asked, second = prompt(6), branch(6, 8)
        async with small.cache.acquire(asked, deadline_s=0.0) as lease:
            for start in range(0, len(asked), 2 * PAGE):
                end = min(start + 2 * PAGE, len(asked))
                assert not isinstance(lease.allocate(end - start), Shortfall)
                await lease.run(small.model.forward, asked, lease.pages, start, end, None)
                lease.commit(end)
                await ended(small, "write_back", "backup")
        await quiet(small)
        assert backend.stats()["objects"] == 0
        assert await small.cache.drain(5.0) == 0, "the policy wants nothing more saved"
        assert await small.cache.stored(asked, 5.0) == StoredTokens(0, "policy")
        await compute(small, second)
        await quiet(small)
        assert backend.stats()["objects"] == 6
        assert await small.cache.stored(second, 5.0) == StoredTokens(6 * PAGE, "policy")


@pytest.mark.parametrize("eviction", EVICTIONS)
@VIRTUAL
async def test_write_back_bounds_what_is_dirty_and_loses_nothing(anyio_backend: object, eviction: Any) -> None:
    """Given write_back under each eviction order, and traffic of 6 times the device.
    When it has been served and the prompts come again.
    Then dirty pages never exceeded a quarter of the pool by more than what runs, and every page is in some tier."""
    settings = msgspec.structs.replace(config("write_back", host_pages=128), eviction=eviction)
    async with opened(device_pages=16, config=settings, backend=MemoryBackend()) as small:
        prompts = [prompt(5, family=family) for family in range(20)]
        first = []
        for asked in prompts:
            first.append(await small.engine.answer(asked, deadline_s=0.0))
            await quiet(small)
            assert small.cache.core.usage().dirty_pages <= 4
        for asked, before in zip(prompts, first, strict=True):
            again = await compute(small, asked)
            assert again.tokens == before.tokens
            assert again.account.computed == 1
        assert "dropped_pages" not in small.cache.snapshot().counts


@LOOPS
async def test_closing_saves_what_is_dirty(anyio_backend: object) -> None:
    """Given write_back, and pages that were never copied.
    When the cache is closed and another one opened on the same store.
    Then it finds all of them."""
    backend, asked = MemoryBackend(), prompt(6)
    settings = config("write_back", write_back_water_mark=1.0, write_back_dirty_cap=1.0)
    async with opened(config=settings, backend=backend, check_pools=False) as small:
        await compute(small, asked)
        await quiet(small)
        assert backend.stats()["objects"] == 0
    assert backend.stats()["objects"] == 6
    async with opened(backend=backend) as small:
        assert (await small.engine.answer(asked)).account.storage == 6 * PAGE


@VIRTUAL
async def test_an_engine_that_has_stopped_stepping_leaves_nothing_dirty(anyio_backend: object) -> None:
    """Given write_back and an engine that makes steps.
    When it stops, and the cache is closed.
    Then what was dirty is in the store."""
    backend, asked = MemoryBackend(), prompt(6)
    settings = config("write_back", write_back_water_mark=1.0, write_back_dirty_cap=1.0)
    async with opened(config=settings, backend=backend, driver="step") as small:
        cache = small.cache
        await cache.begin_step_async()
        lease = cache.lease(asked, "r")
        assert not isinstance(lease.allocate(len(asked)), Shortfall)
        small.model.forward(asked, lease.pages, 0, len(asked))
        lease.commit(len(asked))
        lease.release()
        cache.end_step()
        assert backend.stats()["objects"] == 0
    assert backend.stats()["objects"] == 6


@LOOPS
async def test_policies_change_while_the_cache_is_open(anyio_backend: object) -> None:
    """Given write_back, and dirty pages.
    When write_through is asked for, before and after a drain, and another eviction order.
    Then the first is refused with the reason, the others hold from there on."""
    backend, asked = MemoryBackend(), prompt(4)
    async with opened(config=config("write_back"), backend=backend) as small:
        await compute(small, asked)
        await quiet(small)
        assert await small.cache.set_write_policy("write_through") == PolicyRefused("dirty_pages", 4)
        assert await small.cache.drain(60.0) == 0
        assert await small.cache.set_write_policy("write_through") is None
        assert await small.cache.set_eviction("mru") is None
        await compute(small, prompt(4, family=1))
        await quiet(small)
        assert backend.stats()["objects"] == 8
        await compute(small, prompt(10, family=2))
        assert on_device_and_host(small, asked) == (4, 4), "what was used last has gone"
        assert on_device_and_host(small, prompt(4, family=1))[0] < 4
