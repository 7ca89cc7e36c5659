"""What the tests of cancellation share."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anyio

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Slow
from hicache_actors.cache.api import HiCache
from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.small import Small, open_small


class Leaves(Protocol):
    """Runs a request and cancels it after so many turns of the loop, or pauses -> whether it was cancelled."""

    async def __call__(self, work: Awaitable[None], turns: int, pause_s: float = 0.0) -> bool: ...


async def by_native_cancel(work: Awaitable[None], turns: int, pause_s: float = 0.0) -> bool:
    """``task.cancel()`` after so many turns of the loop, as web servers do."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(pause_s)
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return task.cancelled()


async def by_two_cancels(work: Awaitable[None], turns: int, pause_s: float = 0.0) -> bool:
    """A second cancel comes while the first is being dealt with."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(pause_s)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return task.cancelled()


async def by_scope(work: Awaitable[None], turns: int, pause_s: float = 0.0) -> bool:
    """anyio's level cancellation."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                for _ in range(turns):
                    await anyio.sleep(pause_s)
                scope.cancel()

            group.start_soon(cancel)
            await work
            group.cancel_scope.cancel()
    return scope.cancelled_caught


async def by_wait_for(work: Awaitable[None], turns: int, pause_s: float = 0.0) -> bool:
    """``asyncio.wait_for`` gives up after so many pauses."""
    try:
        await asyncio.wait_for(work, turns * (pause_s or 1e-4))
    except TimeoutError:
        return True
    return False


async def by_timeout(work: Awaitable[None], turns: int, pause_s: float = 0.0) -> bool:
    """``asyncio.timeout`` after so many pauses."""
    try:
        async with asyncio.timeout(turns * (pause_s or 1e-4)):
            await work
    except TimeoutError:
        return True
    return False


BY_TIME = ("asyncio.wait_for", "asyncio.timeout")

WAYS: dict[str, Leaves] = {
    "task.cancel": by_native_cancel,
    "two cancels": by_two_cancels,
    "anyio scope": by_scope,
    "asyncio.wait_for": by_wait_for,
    "asyncio.timeout": by_timeout,
}


@asynccontextmanager
async def open_for(way: str, **settings: Any) -> AsyncIterator[Small]:
    """A cache whose store and device take time if the cancel comes by time, and else only turns of the loop."""
    latency_s = 0.001 if way in BY_TIME else 0.0
    backend = Slow(MemoryBackend("memory://" + settings.pop("store", "")), latency_s=latency_s)
    async with open_small(backend=backend, **settings) as small:
        small.device.throttle(latency_s=latency_s)
        yield small


@asynccontextmanager
async def stepping(cache: HiCache) -> AsyncIterator[None]:
    """An engine with driver="step" that makes a step each millisecond."""

    async def step() -> None:
        while True:
            await cache.begin_step_async()
            cache.end_step()
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as group:
        group.start_soon(step)
        try:
            yield
        finally:
            group.cancel_scope.cancel()


async def nothing_left(small: Small, *, deadline_s: float = 20.0) -> None:
    """No lease, no waiter, no open job, no slot in limbo, and no verdict that nobody will ask for."""
    cache = small.cache
    with anyio.fail_after(deadline_s):
        while cache.driver.needs_step or cache.pipelines.open_jobs or cache.core.usage().leases:  # noqa: ASYNC110
            await anyio.sleep(0.001)
    usage = cache.core.usage()
    assert usage.leases == usage.pending_acquires == 0
    assert not usage.jobs
    assert usage.device.limbo_pages == usage.host.limbo_pages == 0
    assert not cache.pipelines._waiters
    if cache.core._loads.verdicts:
        gc.collect()  # the traceback of a cancelled task may still hold a handle
    assert not cache.core._loads.verdicts
    check_conservation(cache.core)
