"""Several ranks with timings of their own tell the same, batch by batch."""

from __future__ import annotations

import asyncio

import pytest

from hicache_actors.events import Directory, EventBatch, PagesRemoved, PagesStored, Subscription
from hicache_actors.testing.ranks import RankHarness, RankOptions, SimRank


@pytest.mark.parametrize("seed", range(4))
def test_simulated_ranks_tell_the_same(seed: int) -> None:
    heard: dict[int, list[EventBatch]] = {}
    listening: set[asyncio.Task[None]] = set()

    async def listen(events: Subscription, batches: list[EventBatch]) -> None:
        directory = Directory()
        async for batch in events:
            directory.apply(batch)  # raises if one is missing
            batches.append(batch)

    def attach(rank: SimRank) -> None:
        heard[rank.number] = []
        task = listen(rank.cache.events(queue_batches=1 << 20), heard[rank.number])
        listening.add(asyncio.get_running_loop().create_task(task))

    harness = RankHarness(RankOptions(seed=seed, ranks=3, steps=40, trouble="none"), attach=attach).run()
    assert harness.stats["tokens"]
    assert all(task.done() and task.exception() is None for task in listening)
    told = [[(batch.id, batch.epoch, batch.events) for batch in heard[number][1:]] for number in range(3)]
    common = min(map(len, told))  # what is told while a rank closes may not be heard any more
    assert common > 20
    assert told[0][:common] == told[1][:common] == told[2][:common]
    kinds = {type(event) for _, _, events in told[0] for event in events}
    assert kinds >= {PagesStored, PagesRemoved}
