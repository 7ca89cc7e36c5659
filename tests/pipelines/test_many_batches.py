"""Jobs of many batches that end in the middle: stopped, failed, or past their deadline, with batches between their stages."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from hicache_actors import TransferError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Access, Fault, Faulty
from hicache_actors.config import Deadlines, HostLayout
from hicache_actors.memory import shapes
from hicache_actors.testing.lives import reference_token, request, run_checked
from hicache_actors.testing.small import evict_device, open_small, prompt

LAYOUTS = pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
SEEDS = pytest.mark.parametrize("seed", [None, *range(8)])
PAGES = 14


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "BATCH_PAGES", 1)


@SEEDS
@LAYOUTS
def test_a_fetch_may_be_stopped_at_any_turn(layout: HostLayout, seed: int | None) -> None:
    async def main() -> None:
        store = MemoryBackend()
        async with open_small(backend=store, layout=layout, host_pages=40, read_concurrency=2) as small:
            asked = prompt(PAGES)
            wanted = reference_token(small, asked)
            assert await request(small, asked) == wanted
            assert await small.cache.drain(10.0) == 0
            for turns in range(0, 60, 2):
                await small.cache.reset()
                handle = small.cache.prefetch(asked, f"r{turns}")
                for _ in range(turns):
                    await asyncio.sleep(0)
                handle.stop()
                tokens = await handle.wait()
                assert small.cache.match(asked).host == tokens
                assert small.cache.state == "open"
            assert await request(small, asked) == wanted

    run_checked(main, seed)


@SEEDS
@LAYOUTS
def test_a_fetch_whose_batch_fails_keeps_what_came_before(layout: HostLayout, seed: int | None) -> None:
    bad = 0

    def schedule(access: Access) -> Fault | None:
        return Fault.MISS if access.verb == "read" and access.key == keys[bad] else None

    keys: list[str] = []

    async def main() -> None:
        async with open_small(backend=Faulty(MemoryBackend(), schedule), layout=layout, host_pages=40) as small:
            nonlocal bad
            asked = prompt(PAGES)
            keys[:] = small.store.keys.keys(asked.page_hashes(small.cache.page_size, PAGES))
            wanted = reference_token(small, asked)
            assert await request(small, asked) == wanted
            assert await small.cache.drain(10.0) == 0
            for bad in range(PAGES):
                await small.cache.reset()
                assert await small.cache.prefetch(asked, f"r{bad}").wait() == 4 * bad
                await small.cache.pipelines.idle()
            assert await request(small, asked) == wanted

    run_checked(main, seed)


@SEEDS
def test_a_write_back_whose_batch_fails_keeps_what_came_before(seed: int | None) -> None:
    async def main() -> None:
        async with open_small(host_pages=40) as small:
            for bad in range(PAGES):
                asked = prompt(PAGES, family=bad)
                small.device.fail_next(TransferError("planted"), after=bad, stream="write_back")
                assert await request(small, asked) == reference_token(small, asked)
                await small.cache.pipelines.idle()
                usage = small.cache.core.usage()
                assert usage.host.owned_pages == bad
                assert small.cache.state == "open"
                await small.cache.reset()

    run_checked(main, seed)


@SEEDS
@LAYOUTS
def test_a_backup_whose_batch_fails_keeps_what_came_before(layout: HostLayout, seed: int | None) -> None:
    """Also if the batch behind it, which was under way beside it, has been stored."""
    bad = ""

    def schedule(access: Access) -> Fault | None:
        nonlocal bad
        if access.verb != "write" or access.key != bad:
            return None
        bad = ""  # once
        return Fault.FAIL

    async def main() -> None:
        nonlocal bad
        for at in range(PAGES):
            async with open_small(backend=Faulty(MemoryBackend(), schedule), layout=layout, host_pages=40) as small:
                asked = prompt(PAGES)
                bad = small.store.keys.keys(asked.page_hashes(small.cache.page_size, PAGES))[at]
                await request(small, asked)
                assert (await small.cache.stored(asked, 0.9)).tokens == 4 * at
                assert (await small.cache.stored(asked, 30.0)).tokens == 4 * PAGES
                assert small.cache.state == "open"

    run_checked(main, seed)


@SEEDS
@pytest.mark.parametrize("deadline_s", [0.0005, 0.0021, 0.0055])
def test_deadlines_between_batches(deadline_s: float, seed: int | None) -> None:
    async def main() -> None:
        deadlines = Deadlines(load_s=10.0, write_back_s=deadline_s, backup_s=deadline_s)
        async with open_small(backend=MemoryBackend(), host_pages=40, deadlines=deadlines) as small:
            small.device.throttle(latency_s=0.001, stream="write_back")
            asked = prompt(PAGES)
            assert await request(small, asked) == reference_token(small, asked)
            await anyio.sleep(1.0)
            await small.cache.pipelines.idle()
            assert small.cache.core.usage().host.owned_pages == int(deadline_s / 0.001)
            await evict_device(small)
            assert await request(small, asked) == reference_token(small, asked)
            assert small.cache.state == "open"

    run_checked(main, seed)
