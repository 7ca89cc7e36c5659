"""A forward pass may begin when its first layer is there, long before the load has ended."""

from __future__ import annotations

import asyncio

import pytest

from hicache_actors.cache.handles import Load
from hicache_actors.memory.shapes import KVShape
from hicache_actors.testing.small import PAGE_SIZE, Small, evict_device, open_small, prompt
from hicache_actors.transfer.completions import fired

WAIT_S = 60.0


def _shape(layers: int) -> KVShape:
    return KVShape(layers, kv=2, heads=2, head_dim=4, dtype="float32", page_size=PAGE_SIZE)


async def _evicted(small: Small) -> None:
    await small.engine.answer(prompt(4))
    await small.cache.drain(5.0)
    await evict_device(small)
    await small.cache.pipelines.idle()


def _load(loading: Load | None) -> Load:
    assert loading is not None
    return loading


@pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)
@pytest.mark.parametrize("layers", [16, 32])
async def test_the_wait_for_the_first_layer_is_a_small_part_of_the_load(layers: int, anyio_backend: object) -> None:
    """Time to first token is this wait and the forward behind it; who waits for all layers waits for the whole load."""
    loop = asyncio.get_running_loop()
    async with open_small(shape=_shape(layers)) as small:
        await _evicted(small)
        small.device.throttle(latency_s=0.1, stream="load")
        started_s = loop.time()
        async with small.cache.acquire(prompt(4)) as lease:
            load = _load(lease.loading)
            await load.ready(0)
            first_s = loop.time() - started_s
            await load.ready(layers - 1)
            whole_s = loop.time() - started_s
            assert (await load.verdict()).valid_tokens == 4 * PAGE_SIZE
    assert whole_s >= layers * 0.1
    assert first_s <= whole_s / 4
    assert first_s <= whole_s / layers * 1.01


@pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)
async def test_the_first_layer_is_handed_out_while_the_others_have_not_begun(anyio_backend: object) -> None:
    """The same with real threads, counted in pieces of work instead of time."""
    layers = 16
    async with open_small(shape=_shape(layers)) as small:
        await _evicted(small)
        stream = small.device.stream("load")
        before = stream.counts().finished
        gate = small.device.gate("load")
        async with small.cache.acquire(prompt(4)) as lease:
            load = _load(lease.loading)
            await fired(gate.reached)
            gate.allow()
            assert await asyncio.to_thread(load.wait, 0, WAIT_S)  # a forward thread
            assert stream.counts().finished - before == 1 <= layers / 4
            assert not await asyncio.to_thread(load.wait, 1, 0.0)
            assert load.result() is None
            gate.open()
            assert (await load.verdict()).valid_tokens == 4 * PAGE_SIZE
            assert stream.counts().finished - before == layers
