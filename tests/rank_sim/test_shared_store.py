"""Whole caches that divide a model differently on one store, with unified keys: over tensor ranks and stages of a pipeline."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import pytest

from hicache_actors import Config, HiCache, HostConfig, KVTensors, ModelFacts, Prompt, RankGroup, Shortfall
from hicache_actors.testing.ranks import SimNetwork
from hicache_actors.testing.sim_device import SimDevice
from hicache_actors.testing.small import PAGE_SIZE, SHAPE, prompt, small_config
from hicache_actors.testing.toy_model import ToyModel

LAYERS = 6
HEADS = 8
HELD_LAYERS = 2  # of an object; every stage of every deployment begins at a multiple

pytestmark = pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)


class Grid(NamedTuple):
    """How a deployment divides the model: tensor ranks, and the layers of each stage of its pipeline."""

    tp_size: int
    stages: tuple[int, ...]

    def groups(self) -> list[RankGroup]:
        """All ranks, the leader first."""
        pp_size = len(self.stages)
        return [
            RankGroup(tp_rank=tp, tp_size=self.tp_size, pp_rank=pp, pp_size=pp_size, address="simulated:1")
            for pp in range(pp_size)
            for tp in range(self.tp_size)
        ]


def config(url: str, first_layer: int) -> Config:
    base = small_config(url=url, host_pages=32)
    return msgspec.structs.replace(
        base,
        model=ModelFacts(model_id="toy", weights="v1", total_kv_heads=HEADS, first_layer=first_layer),
        host=HostConfig(pages=32, layout="page_unified"),
        storage=msgspec.structs.replace(base.storage, keys="unified", tp_lcm_size=8, layer_partition=HELD_LAYERS),
    )


class Held(NamedTuple):
    """A rank, and its part of the model."""

    cache: HiCache
    model: ToyModel


@asynccontextmanager
async def deployment(url: str, grid: Grid) -> AsyncIterator[list[Held]]:
    """All ranks, open."""
    groups = grid.groups()
    network = SimNetwork(len(groups), 1)
    ranks: list[Held] = []
    async with anyio.create_task_group() as opening:
        ready = [anyio.Event() for _ in groups]
        done = anyio.Event()
        closed = [anyio.Event() for _ in groups]

        async def live(group: RankGroup) -> None:
            first_layer = sum(grid.stages[: group.pp_rank])
            heads = HEADS // grid.tp_size
            shape = msgspec.structs.replace(SHAPE, layers=grid.stages[group.pp_rank], heads=heads)
            kv = KVTensors.make(shape, 16)
            async with HiCache.open(
                config(url, first_layer),
                kv,
                driver="step",
                device=SimDevice(),
                ranks=group if len(groups) > 1 else None,
                transport=network.transport(group.rank) if len(groups) > 1 else None,
            ) as cache:
                model = ToyModel(kv, first_layer=first_layer, first_head=heads * group.tp_rank)
                ranks.append(Held(cache, model))
                ready[group.rank].set()
                await done.wait()
            closed[group.rank].set()

        for group in groups:
            opening.start_soon(live, group)
        for event in ready:
            await event.wait()
        yield ranks
        done.set()
        for event in closed:
            await event.wait()


async def serve(cache: HiCache, model: ToyModel, asked: Prompt) -> int:
    """One request as an engine with steps makes it -> tokens that came from the store; the model looks at every byte of them."""
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


async def serve_all(ranks: list[Held], asked: Prompt) -> list[int]:
    """The same request on all ranks."""
    hits: list[int] = []

    async def one(rank: Held) -> None:
        hits.append(await serve(rank.cache, rank.model, asked))

    async with anyio.create_task_group() as serving:
        for rank in ranks:
            serving.start_soon(one, rank)
    return hits


TP4, TP8_PP2, TP1, TP2_PP3 = Grid(4, (6,)), Grid(8, (4, 2)), Grid(1, (6,)), Grid(2, (2, 2, 2))


@pytest.mark.parametrize(
    ("writer", "reader"), [(TP4, TP8_PP2), (TP8_PP2, TP4), (TP8_PP2, TP1), (TP1, TP2_PP3), (TP2_PP3, TP2_PP3)]
)
async def test_caches_that_divide_the_model_differently_serve_one_anothers_pages(
    writer: Grid, reader: Grid, anyio_backend: object, tmp_path: Path
) -> None:
    """Through files of one folder, and both ways: what the reader adds, the writer finds."""
    url = f"file://{tmp_path}"
    short, long = prompt(6), prompt(9)
    for grid, asked, pages in ((writer, short, 0), (reader, long, 6), (writer, long, 9)):
        async with deployment(url, grid) as ranks:
            assert await serve_all(ranks, asked) == [pages * PAGE_SIZE] * len(ranks)
    assert len(list(tmp_path.glob("objects/*/*.kv"))) == 9 * HEADS * LAYERS // HELD_LAYERS  # noqa: ASYNC240
