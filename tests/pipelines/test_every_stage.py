"""Each stage of each pipeline fails, is slower than its deadline, loses its task group, or sees the cache close, in turn.

Afterwards, always: both ends of every job have come once, no request got an exception or a wrong byte, and the pools are whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import anyio
import pytest

from hicache_actors.errors import BackendError, HiCacheError, TransferError
from hicache_actors.memory.host import HostMemory
from hicache_actors.testing.lives import (
    LIFE_PAGES,
    live,
    other_tasks,
    reference_token,
    request,
    run_checked,
    stopped_or,
)
from hicache_actors.testing.pools import check_conservation, check_staging, check_whole
from hicache_actors.testing.small import Small, open_small, prompt
from hicache_actors.testing.witness import Witness

from .kit import DEADLINES, TOO_LONG_S, Trap, TrappedBackend
from .stages import INSIDE, STAGES, SUBMITS, layout_of

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2])
ALL = {**STAGES, **SUBMITS}
STAGES_OUTSIDE = pytest.mark.parametrize("stage", sorted(STAGES.keys() - INSIDE))


@SEEDS
@STAGES_OUTSIDE
def test_a_stage_that_fails_shortens_a_prefix_at_most(
    stage: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deed() -> None:
        raise TransferError("planted") if "layer" in stage or "copy" in stage else BackendError("planted")

    run_checked(lambda: _lives_on(stage, Trap(deed), monkeypatch), seed)


@SEEDS
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_slower_than_its_deadline_shortens_a_prefix_at_most(
    stage: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_checked(lambda: _lives_on(stage, Trap(lambda: anyio.sleep(TOO_LONG_S)), monkeypatch), seed)


@SEEDS
@pytest.mark.parametrize("stage", sorted(stage for stage in STAGES.keys() - INSIDE if "hash" not in stage))
def test_a_foreign_exception_of_the_outside_world_is_a_failure_like_others(
    stage: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deed() -> None:
        raise KeyError("planted")

    run_checked(lambda: _lives_on(stage, Trap(deed), monkeypatch), seed)


@SEEDS
@pytest.mark.parametrize("stage", [*STAGES, *SUBMITS])
def test_a_stage_that_loses_its_task_group_still_ends_its_job(
    stage: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure comes while the stage waits, at a moment that the seed decides; for storage calls, while the call runs."""

    async def plant() -> None:
        raise KeyError("planted")

    async def deed(small: Small) -> None:
        small.cache._parts.system.spawn("bug", plant)
        if stage in STAGES:
            await anyio.sleep(0.1)

    async def main() -> None:
        with pytest.raises(HiCacheError, match="planted"):
            await _degrades(stage, deed, monkeypatch)
        assert not other_tasks()

    run_checked(main, seed)


@SEEDS
@pytest.mark.parametrize("stage", [*SUBMITS, *INSIDE])
def test_a_bug_in_a_stage_degrades_and_frees_nothing_too_early(
    stage: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deed(small: Small) -> None:
        raise KeyError("planted")

    async def main() -> None:
        with pytest.raises(HiCacheError, match="planted"):
            await _degrades(stage, deed, monkeypatch)
        assert not other_tasks()

    run_checked(main, seed)


@SEEDS
@pytest.mark.parametrize("stage", [*STAGES, *SUBMITS])
def test_the_cache_may_close_while_a_stage_waits(stage: str, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        kept = HostMemory.mapped()
        async with _open(stage) as small:
            reached = asyncio.Event()

            async def deed() -> None:
                reached.set()
                if stage in STAGES:
                    await anyio.sleep(0.3)

            ALL[stage](small, Trap(deed), monkeypatch)
            witness = Witness(small.cache, monkeypatch)
            life = asyncio.ensure_future(stopped_or(live(small)))
            await reached.wait()
            closed_at_s = anyio.current_time()
        assert anyio.current_time() - closed_at_s < 3.0
        await life
        await asyncio.sleep(1.0)
        assert not other_tasks()
        assert HostMemory.mapped() == kept
        witness.check_closed()

    run_checked(main, seed)


def _open(stage: str) -> AbstractAsyncContextManager[Small]:
    return open_small(backend=TrappedBackend(), layout=layout_of(stage), deadlines=DEADLINES, check_pools=False)


async def _degrades(stage: str, deed: Callable[[Small], Awaitable[None]], patch: pytest.MonkeyPatch) -> None:
    """A life with a deed in it that ends the cache's work, not the engine's."""
    async with _open(stage) as small:
        trap = Trap(lambda: deed(small))
        ALL[stage](small, trap, patch)
        witness = Witness(small.cache, patch)
        small.device.throttle(latency_s=0.05)  # what was submitted before runs on for a while
        wanted = reference_token(small, prompt(LIFE_PAGES))
        assert await live(small) == [wanted] * 4
        assert trap.sprung
        assert small.cache.state == "degraded"
        check_conservation(small.cache.core)
        await small.cache.pipelines.idle()
        await small.cache.reset()
        check_whole(small.cache.core)
        check_staging(small.cache)
        witness.check()


async def _lives_on(stage: str, trap: Trap, patch: pytest.MonkeyPatch) -> None:
    """A life with a trap in it, then one without: the cache stays open."""
    async with _open(stage) as small:
        ALL[stage](small, trap, patch)
        witness = Witness(small.cache, patch)
        wanted = reference_token(small, prompt(LIFE_PAGES))
        assert await live(small) == [wanted] * 4
        assert trap.sprung
        assert small.cache.state == "open"
        check_conservation(small.cache.core)
        await small.cache.reset()
        assert await live(small) == [wanted] * 4
        assert await request(small, prompt(3, family=7)) == reference_token(small, prompt(3, family=7))
        assert await small.cache.drain(30.0) == 0
        await small.cache.pipelines.idle()
        await small.cache.reset()
        check_whole(small.cache.core)
        check_staging(small.cache)
        await anyio.sleep(TOO_LONG_S)  # a fetch that was declined leaves Core before its pipeline has ended
        witness.check()
