"""Pages that gather on the host: a cache that holds some is not idle, and one that closes stores them first."""

from __future__ import annotations

import pytest

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.testing.lives import reference_token, request, run_checked
from hicache_actors.testing.small import open_small, prompt

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2, 3])
PAGES = 3


@SEEDS
def test_a_cache_is_idle_when_what_gathers_has_been_stored(seed: int | None) -> None:
    async def main() -> None:
        async with open_small(backend=MemoryBackend()) as small:
            assert await request(small, prompt(PAGES)) == reference_token(small, prompt(PAGES))
            await small.cache.pipelines.idle()
            assert small.cache.core.usage().stored_pages == PAGES
            assert small.cache.pipelines.open_jobs == 0

    run_checked(main, seed)


@SEEDS
def test_a_cache_that_closes_stores_what_gathers(seed: int | None) -> None:
    async def main() -> None:
        store = MemoryBackend()
        async with open_small(backend=store, check_pools=False) as small:
            assert await request(small, prompt(PAGES)) == reference_token(small, prompt(PAGES))
        assert store.stats()["objects"] == PAGES

    run_checked(main, seed)
