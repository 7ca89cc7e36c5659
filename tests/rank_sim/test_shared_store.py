"""Whole caches that divide a model differently on one store, with unified keys: two tensor ranks and one."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from hicache_actors import Config, HiCache, HostConfig, KVTensors, ModelFacts, Prompt, RankGroup, Shortfall
from hicache_actors.testing.ranks import SimNetwork
from hicache_actors.testing.sim_device import SimDevice
from hicache_actors.testing.small import PAGE_SIZE, SHAPE, prompt, small_config
from hicache_actors.testing.toy_model import ToyModel

HEADS = 4
_names = itertools.count()

pytestmark = pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)


def config(url: str) -> Config:
    base = small_config(url=url, host_pages=32)
    return msgspec.structs.replace(
        base,
        model=ModelFacts(model_id="toy", weights="v1", total_kv_heads=HEADS),
        host=HostConfig(pages=32, layout="page_unified"),
        storage=msgspec.structs.replace(base.storage, keys="unified", tp_lcm_size=4, layer_partition=2),
    )


@asynccontextmanager
async def deployment(url: str, tp_size: int) -> AsyncIterator[list[HiCache]]:
    """The caches of all tensor ranks, open."""
    network = SimNetwork(tp_size, 1)
    shape = msgspec.structs.replace(SHAPE, heads=HEADS // tp_size)
    caches: list[HiCache] = []
    async with anyio.create_task_group() as opening:
        ready = [anyio.Event() for _ in range(tp_size)]
        done = anyio.Event()
        closed = [anyio.Event() for _ in range(tp_size)]

        async def live(tp_rank: int) -> None:
            group = RankGroup(tp_rank=tp_rank, tp_size=tp_size, address="simulated:1")
            async with HiCache.open(
                config(url),
                KVTensors.make(shape, 16),
                driver="step",
                device=SimDevice(),
                ranks=group if tp_size > 1 else None,
                transport=network.transport(tp_rank) if tp_size > 1 else None,
            ) as cache:
                caches.append(cache)
                ready[tp_rank].set()
                await done.wait()
            closed[tp_rank].set()

        for tp_rank in range(tp_size):
            opening.start_soon(live, tp_rank)
        for event in ready:
            await event.wait()
        yield caches
        done.set()
        for event in closed:
            await event.wait()


async def serve(cache: HiCache, asked: Prompt) -> int:
    """One request as an engine with steps makes it -> tokens that came from the store."""
    model = ToyModel(cache.kv)
    await cache.begin_step_async()
    fetch = cache.prefetch(asked, "r")
    cache.end_step()
    while not fetch.settled:
        await cache.begin_step_async()
        cache.end_step()
    await cache.begin_step_async()
    lease = cache.lease(asked, "r")
    load = lease.load()
    assert not isinstance(load, Shortfall)
    assert not isinstance(lease.allocate(len(asked) - lease.usable_tokens), Shortfall)
    hit = lease.account.storage
    cache.end_step()
    while load.tokens and load.result() is None:
        await cache.begin_step_async()
        cache.end_step()
    model.forward(asked, lease.pages, lease.usable_tokens, len(asked))
    await cache.begin_step_async()
    lease.commit(len(asked))
    lease.release()
    cache.end_step()
    while cache.needs_step:
        await cache.begin_step_async()
        cache.end_step()
    return hit


async def serve_all(caches: list[HiCache], asked: Prompt) -> list[int]:
    """The same request on all ranks."""
    hits: list[int] = []

    async def one(cache: HiCache) -> None:
        hits.append(await serve(cache, asked))

    async with anyio.create_task_group() as ranks:
        for cache in caches:
            ranks.start_soon(one, cache)
    return hits


@pytest.mark.parametrize(("writer", "reader"), [(2, 1), (1, 2), (4, 2), (2, 2)])
async def test_caches_of_other_tensor_sizes_serve_one_anothers_pages(
    writer: int, reader: int, anyio_backend: object
) -> None:
    url, asked = f"memory://grid-{next(_names)}", prompt(6)
    async with deployment(url, writer) as caches:
        assert await serve_all(caches, asked) == [0] * writer
    async with deployment(url, reader) as caches:
        assert await serve_all(caches, asked) == [6 * PAGE_SIZE] * reader
