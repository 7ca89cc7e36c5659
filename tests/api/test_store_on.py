"""store_on = "host_evict": the store sees a page when the host fills, when somebody waits for it, and when the cache drains."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.to_thread
import pytest

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.core.words import Match
from hicache_actors.errors import ConfigError
from hicache_actors.testing.engines import StepEngine
from hicache_actors.testing.small import Small, open_small, prompt

LOOPS = pytest.mark.parametrize("anyio_backend", ["virtual:1", "virtual:2", "asyncio", "uvloop"], indirect=True)


async def serve(small: Small, *families: int) -> None:
    """Prompts of four pages, one after the other, each with what it has begun."""
    for family in families:
        await small.engine.answer(prompt(4, family=family))
        with anyio.fail_after(30):
            while small.cache.core.usage().jobs:  # noqa: ASYNC110 (what is waited for has no event)
                await anyio.sleep(0.005)


@LOOPS
async def test_pages_are_written_when_the_host_fills_and_none_is_lost(anyio_backend: object) -> None:
    backend = MemoryBackend()
    async with open_small(host_pages=32, backend=backend, store_on="host_evict") as small:
        await serve(small, *range(1, 7))
        assert backend.stats()["objects"] == 0, "three quarters of the host are in use"
        await serve(small, 7)
        assert backend.stats()["objects"] == 4
        await serve(small, *range(8, 21))
        counts = small.cache.snapshot().counts
        assert counts["evicted_host_pages"] == 20 * 4 - 32
        assert "evicted_unstored_pages" not in counts
        assert counts["stored_ahead_pages"] == backend.stats()["objects"] == 20 * 4 - 32 + 8
        first = await small.engine.answer(prompt(4, family=1))
        assert first.account.storage == 16
        assert await small.cache.drain(30.0) == 0
        assert backend.stats()["objects"] == 20 * 4


@LOOPS
async def test_who_waits_has_the_pages_of_the_prompt_stored(anyio_backend: object) -> None:
    backend = MemoryBackend()
    async with open_small(host_pages=32, backend=backend, store_on="host_evict") as small:
        await serve(small, 1, 2, 3)
        stored = await small.cache.stored(prompt(4, family=2), 30.0)
        assert (stored.tokens, stored.reason) == (16, None)
        assert backend.stats()["objects"] == 4


@LOOPS
async def test_closing_drains_and_the_next_cache_finds_everything(anyio_backend: object) -> None:
    backend = MemoryBackend()
    families = range(1, 7)
    async with open_small(
        host_pages=32, backend=backend, store_on="host_evict", close_timeout_s=30.0, check_pools=False
    ) as small:
        await serve(small, *families)
        answers = [(await small.engine.answer(prompt(4, family=family))).tokens for family in families]
    assert backend.stats()["objects"] == 24
    async with open_small(host_pages=32, backend=backend, store_on="host_evict") as small:
        for family, expected in zip(families, answers, strict=True):
            again = await small.engine.answer(prompt(4, family=family))
            assert again.tokens == expected
            assert again.account.storage == 16


@LOOPS
async def test_a_store_that_comes_later_gets_what_is_above_the_mark(anyio_backend: object) -> None:
    async with open_small(host_pages=32, store_on="host_evict") as small:
        await serve(small, *range(1, 8))
        backend = MemoryBackend()
        await small.cache.attach_storage(backend)
        await serve(small, 7)
        assert backend.stats()["objects"] == 4
        assert await small.cache.drain(30.0) == 0
        assert backend.stats()["objects"] == 28
        assert await small.cache.detach_storage(30.0) == 0
        assert small.cache.match(prompt(4, family=7)) != Match(0, 0, 0)


async def test_closing_drains_for_an_engine_that_has_stopped_stepping() -> None:
    backend = MemoryBackend()
    asked = {f"r{family}": prompt(4, family=family) for family in range(1, 5)}
    settings: dict[str, Any] = {"host_pages": 32, "backend": backend, "driver": "step", "store_on": "host_evict"}
    async with open_small(close_timeout_s=30.0, **settings) as small:
        engine = StepEngine(small.cache, small.model)
        answers = await anyio.to_thread.run_sync(engine.run, list(asked.items()))
        engine.close()
        assert backend.stats()["objects"] == 0
    assert backend.stats()["objects"] == 16
    async with open_small(**settings) as small:
        engine = StepEngine(small.cache, small.model)
        again = await anyio.to_thread.run_sync(engine.run, list(asked.items()))
        engine.close()
    assert {rid: answer.tokens for rid, answer in again.items()} == {rid: a.tokens for rid, a in answers.items()}
    assert sum(answer.account.storage for answer in again.values()) == 4 * 16


@LOOPS
async def test_the_time_may_be_changed_while_the_cache_runs(anyio_backend: object) -> None:
    backend = MemoryBackend()
    async with open_small(host_pages=32, backend=backend, store_on="host_evict") as small:
        await serve(small, 1, 2, 3)
        assert backend.stats()["objects"] == 0
        assert await small.cache.set_store_on("publish") is None
        assert await small.cache.drain(30.0) == 0
        assert backend.stats()["objects"] == 12
        assert await small.cache.set_store_on("host_evict") is None
        await serve(small, 4)
        assert backend.stats()["objects"] == 12
        with pytest.raises(ConfigError, match="store_on"):
            await small.cache.set_store_on("sometimes")  # type: ignore[arg-type]
