"""`HiCache.explain`, and what only this rank knows: whether its store can be asked."""

from __future__ import annotations

from collections.abc import Sequence

import anyio.to_thread
import pytest

from hicache_actors import UsageError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.errors import BackendError
from hicache_actors.testing.small import evict_device, open_small, prompt

LOOPS = pytest.mark.parametrize("anyio_backend", ["virtual:1", "asyncio"], indirect=True)


class Broken(MemoryBackend):
    async def exists(self, keys: Sequence[str]) -> int:
        raise BackendError("it is on fire")


@LOOPS
async def test_a_prompt_is_explained_on_its_way_through_the_tiers(anyio_backend: object) -> None:
    async with open_small(device_pages=12, host_pages=24, backend=MemoryBackend()) as small:
        cache, asked = small.cache, prompt(8)
        assert cache.explain(asked).spans[0].reason == "never_seen"
        await small.engine.answer(asked)
        await cache.drain(5.0)
        assert [(span.place, span.detail) for span in cache.explain(asked).spans[:-1]] == [("device", "stored")]
        await evict_device(small)
        places = {span.place for span in cache.explain(asked).spans[:-1]}
        assert places <= {"device", "host"}
        assert "host" in places
        assert "left the device" in str(cache.explain(asked))


@LOOPS
async def test_an_open_breaker_is_a_reason(anyio_backend: object) -> None:
    async with open_small(backend=Broken(), breaker_failures=1, breaker_delay_s=30.0) as small:
        await small.engine.answer(prompt(4))
        await small.cache.drain(1.0)
        explanation = small.cache.explain(prompt(4, family=3))
        assert explanation.fetch_refused == "breaker_open"
        assert "nothing is fetched: breaker_open" in str(explanation)


async def test_without_a_store_nothing_is_fetched() -> None:
    async with open_small() as small:
        with pytest.raises(UsageError, match="thread"):
            await anyio.to_thread.run_sync(small.cache.explain, prompt(4))
        assert small.cache.explain(prompt(4)).fetch_refused == "no_storage"
