"""A request may be cancelled at every await of `acquire`, in every way there is: no pin, no slot and no waiter is left."""

from __future__ import annotations

import asyncio

import anyio.lowlevel
import pytest

from hicache_actors import Shortfall
from hicache_actors.keys.prompt import Prompt
from hicache_actors.testing.lives import reference_token, request, run_checked
from hicache_actors.testing.small import Small, prompt

from .kit import WAYS, nothing_left, open_for, stepping

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2])
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
ASKED = 4
MOST_TURNS = 120


@SEEDS
@EVERY_WAY
@pytest.mark.parametrize("where", ["storage", "host", "nowhere"])
def test_a_cancelled_acquire_leaves_nothing(where: str, way: str, seed: int | None) -> None:
    async def main() -> None:
        async with open_for(way) as small:
            asked = prompt(ASKED)
            wanted = reference_token(small, asked)
            assert await request(small, asked) == wanted
            await small.cache.drain(10.0)
            ways = await _sweep(small, asked, where, way)
            assert ways == {True, False}  # early ones were cancelled, late ones were served
            assert await request(small, asked) == wanted

    run_checked(main, seed)


async def _sweep(small: Small, asked: Prompt, where: str, way: str) -> set[bool]:
    """Cancel later and later, until three requests in a row were served."""
    ways: set[bool] = set()
    served = 0
    for turns in range(MOST_TURNS):
        cancelled = await WAYS[way](_hold(small, await _only_at(small, asked, where, turns)), turns)
        await nothing_left(small)
        ways.add(cancelled)
        served = 0 if cancelled else served + 1
        if served == 3:
            break
    return ways


async def _only_at(small: Small, asked: Prompt, where: str, turns: int) -> Prompt:
    if where == "nowhere":
        return prompt(ASKED, family=100 + turns)
    await small.cache.reset()
    if where == "host":
        handle = small.cache.prefetch(asked, f"warm-{turns}")
        assert await handle.wait() == 4 * ASKED
        await nothing_left(small)
    return asked


async def _hold(small: Small, asked: Prompt) -> None:
    async with small.cache.acquire(asked, deadline_s=2.0) as lease:
        assert not isinstance(lease.allocate(len(asked) - lease.usable_tokens), Shortfall)
        for _ in range(3):
            await anyio.lowlevel.checkpoint()


@SEEDS
@EVERY_WAY
def test_a_cancelled_request_harms_nobody_who_waits_for_the_same(way: str, seed: int | None) -> None:
    async def main() -> None:
        async with open_for(way, device_pages=24) as small:
            asked = prompt(ASKED)
            wanted = reference_token(small, asked)
            assert await request(small, asked) == wanted
            await small.cache.drain(10.0)
            for turns in range(0, 60, 3):
                await small.cache.reset()
                other = asyncio.ensure_future(request(small, asked))
                if turns % 2:
                    await asyncio.sleep(0)  # the other opens the fetch, not we
                await WAYS[way](_hold(small, asked), turns)
                assert await other == wanted
                await nothing_left(small)

    run_checked(main, seed)


@SEEDS
@EVERY_WAY
def test_a_cancelled_acquire_leaves_nothing_in_step_mode(way: str, seed: int | None) -> None:
    async def main() -> None:
        store = f"steps-{way}-{seed}"
        async with open_for(way, store=store) as small:
            await request(small, prompt(ASKED))
            await small.cache.drain(10.0)
        async with open_for(way, store=store, driver="step") as small, stepping(small.cache):
            ways = set()
            for turns in range(0, 100, 3):
                await small.cache.reset()
                ways.add(await WAYS[way](_acquire_only(small, prompt(ASKED)), turns, pause_s=3e-4))
                await nothing_left(small)
            assert ways == {True, False}

    run_checked(main, seed)


async def _acquire_only(small: Small, asked: Prompt) -> None:
    async with small.cache.acquire(asked, deadline_s=2.0) as lease:
        assert lease.rid


@SEEDS
@EVERY_WAY
@pytest.mark.parametrize("verb", ["stored", "drain"])
def test_who_stops_waiting_for_the_store_leaves_nothing(verb: str, way: str, seed: int | None) -> None:
    async def main() -> None:
        async with open_for(way) as small:

            async def wait(asked: Prompt) -> None:
                if verb == "stored":
                    assert (await small.cache.stored(asked, 5.0)).tokens == 4 * ASKED
                else:
                    assert await small.cache.drain(5.0) == 0

            for turns in range(0, 60, 4):
                asked = prompt(ASKED, family=turns)
                await request(small, asked)
                await WAYS[way](wait(asked), turns)
                waiting = small.cache.core._waiting
                assert not waiting.stores
                assert not waiting.drains
                await nothing_left(small)

    run_checked(main, seed)
