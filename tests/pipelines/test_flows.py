"""What has moved is counted once per job, by direction."""

from __future__ import annotations

import pytest

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.errors import TransferError
from hicache_actors.testing.small import PAGE_SIZE, SHAPE, evict_device, open_small, prompt

LOOPS = pytest.mark.parametrize("anyio_backend", ["virtual:1", "asyncio"], indirect=True)


@LOOPS
async def test_pages_bytes_and_jobs_of_each_direction(anyio_backend: object) -> None:
    async with open_small(device_pages=12, host_pages=24, backend=MemoryBackend()) as small:
        await small.engine.answer(prompt(8))
        await small.cache.drain(5.0)
        await evict_device(small)
        await small.engine.answer(prompt(8))  # a load
        await small.cache.drain(5.0)
        await small.cache.reset()
        await small.engine.answer(prompt(8))  # a prefetch and a load
        flows = small.cache.movers.flows.snapshot()
        pages = {direction: flow.pages for direction, flow in flows.items()}
        assert pages["load"] == 16
        assert pages["prefetch"] == 8
        assert pages["write_back"] >= pages["backup"] >= 19
        for flow in flows.values():
            assert flow.bytes == flow.pages * SHAPE.page_bytes
            assert flow.seconds.count > 0


@LOOPS
async def test_a_load_that_fails_moves_nothing(anyio_backend: object) -> None:
    async with open_small(device_pages=12, host_pages=24) as small:
        await small.engine.answer(prompt(8))
        await evict_device(small)
        small.device.fail_next(TransferError("planted"), stream="load")
        answer = await small.engine.answer(prompt(8))
        assert answer.retries == 1
        load = small.cache.movers.flows.snapshot()["load"]
        assert load.seconds.count == 2
        assert load.pages == answer.account.host // PAGE_SIZE > 0
