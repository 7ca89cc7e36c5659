"""Events of the engine: slots of released leases, and copies, wait for them; what becomes of both if they come late or never."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from hicache_actors import HiCacheError, Shortfall
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.testing.lives import other_tasks, reference_token, request, run_checked
from hicache_actors.testing.pools import check_conservation, check_whole
from hicache_actors.testing.small import Small, open_small, prompt
from hicache_actors.testing.witness import Witness
from hicache_actors.transfer.completions import Completion

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2, 3])
COMMITS = pytest.mark.parametrize("commit", [False, True])
PAGES = 3


async def _released_with(small: Small, computed: Completion, *, commit: bool) -> list[int]:
    """A lease that ended while its forward pass runs -> its pages."""
    asked = prompt(PAGES, extra=0)
    async with small.cache.acquire(asked) as lease:
        assert not isinstance(lease.allocate(len(asked)), Shortfall)
        pages = list(lease.pages)
        if commit:
            lease.commit(len(asked), after=computed)
        lease.release(after=computed)
    return pages


async def _bug() -> None:
    raise KeyError("planted")


@SEEDS
@COMMITS
def test_slots_wait_for_the_event_however_long(commit: bool, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with open_small(device_pages=8, backend=MemoryBackend()) as small:
            witness = Witness(small.cache, monkeypatch)
            computed = Completion()
            pages = await _released_with(small, computed, commit=commit)
            await anyio.sleep(1000.0)
            check_conservation(small.cache.core)
            async with small.cache.acquire(prompt(0, family=4)) as lease:
                while not isinstance(lease.allocate(4), Shortfall):
                    assert not set(lease.pages) & set(pages)
            small.model.forward(prompt(PAGES, extra=0), pages, 0, 4 * PAGES)
            computed.finish()
            await small.cache.pipelines.idle()
            assert await request(small, prompt(PAGES)) == reference_token(small, prompt(PAGES))
            await small.cache.drain(5.0)
            await small.cache.pipelines.idle()
            await small.cache.reset()
            check_whole(small.cache.core)
            await asyncio.sleep(0.1)
            witness.check()

    run_checked(main, seed)


@SEEDS
@COMMITS
def test_a_dead_task_group_frees_nothing_under_a_forward(
    commit: bool, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with open_small(backend=MemoryBackend(), check_pools=False) as small:
            witness = Witness(small.cache, monkeypatch)
            computed = Completion()
            await _released_with(small, computed, commit=commit)
            small.cache._parts.system.spawn("bug", _bug)
            await anyio.sleep(1.0)
            assert small.cache.state == "degraded"
            assert small.cache.core.usage().device.limbo_pages == PAGES
            assert small.cache.core.usage().jobs == {"drain.limbo": 1}
            computed.finish()
            await small.cache.pipelines.idle()
            check_whole(small.cache.core)
            assert small.device.snapshot()["submitted"] == 0
            witness.check()

    async def main() -> None:
        with pytest.raises(HiCacheError, match="planted"):
            await body()
        assert not other_tasks()

    run_checked(main, seed)


@SEEDS
@COMMITS
def test_closing_does_not_wait_for_ever_for_an_event(
    commit: bool, seed: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with open_small(backend=MemoryBackend(), check_pools=False, close_timeout_s=0.5) as small:
            await _released_with(small, Completion(), commit=commit)
            closing_s = anyio.current_time()
        assert anyio.current_time() - closing_s < 3.0
        assert not other_tasks()
        assert "closed_before_events" in caplog.text

    run_checked(main, seed)


@SEEDS
def test_closing_waits_for_an_event_that_comes_in_time(seed: int | None) -> None:
    async def main() -> None:
        computed = Completion()
        async with open_small(backend=MemoryBackend(), check_pools=False, close_timeout_s=1.0) as small:
            pages = await _released_with(small, computed, commit=True)

            def compute() -> None:
                small.model.forward(prompt(PAGES, extra=0), pages, 0, 4 * PAGES)
                computed.finish()

            asyncio.get_running_loop().call_later(0.3, compute)
        assert not small.cache.core.usage().jobs
        storage = small.cache.snapshot().storage
        assert storage is not None
        assert storage.written_pages == PAGES

    run_checked(main, seed)
