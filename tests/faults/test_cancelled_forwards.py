"""A forward pass in a worker thread is never robbed: its slots are handed out again only when the thread has returned."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread
import pytest

from hicache_actors import Shortfall
from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.small import Small, open_small, prompt
from hicache_actors.transfer.completions import Completion, fired

from .kit import nothing_left

LOOPS = pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)
PAGES = 2


class Pass:
    """A forward pass that runs until it is let go."""

    def __init__(self) -> None:
        self.began, self.ended = Completion(), Completion()
        self.pages: tuple[int, ...] = ()
        self._go = threading.Event()

    def __call__(self) -> str:
        self.began.finish()
        assert self._go.wait(20.0)
        self.ended.finish()
        return "done"

    def let_go(self) -> None:
        self._go.set()


async def _serve(small: Small, forward: Pass, family: int = 0) -> None:
    async with small.cache.acquire(prompt(PAGES, family=family, extra=0)) as lease:
        assert not isinstance(lease.allocate(PAGES * 4), Shortfall)
        forward.pages = tuple(lease.pages)
        assert await lease.run(forward) == "done"


async def _all_that_is_free(small: Small) -> set[int]:
    async with small.cache.acquire(prompt(0, family=50)) as lease:
        while not isinstance(lease.allocate(4), Shortfall):
            pass
        return set(lease.pages)


async def _by_cancel(work: Awaitable[None], began: Completion) -> None:
    task = asyncio.ensure_future(work)
    await fired(began)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _by_scope(work: Awaitable[None], began: Completion) -> None:
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                await fired(began)
                scope.cancel()

            group.start_soon(cancel)
            await work
    assert scope.cancelled_caught


async def _by_wait_for(work: Awaitable[None], began: Completion) -> None:
    task = asyncio.ensure_future(work)
    await fired(began)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, 0.05)


@LOOPS
@pytest.mark.parametrize("leave", [_by_cancel, _by_scope, _by_wait_for])
async def test_a_cancelled_forward_keeps_its_slots_until_it_returns(
    anyio_backend: object, leave: Callable[[Awaitable[None], Completion], Awaitable[None]]
) -> None:
    async with open_small(device_pages=8) as small:
        forward = Pass()
        await leave(_serve(small, forward), forward.began)
        assert not forward.ended.query()
        usage = small.cache.core.usage()
        assert (usage.leases, usage.device.limbo_pages) == (0, PAGES)
        assert len(await _all_that_is_free(small)) == 8 - PAGES
        assert not await _all_that_is_free(small) & set(forward.pages)
        check_conservation(small.cache.core)
        forward.let_go()
        await nothing_left(small)
        assert forward.ended.query()
        assert len(await _all_that_is_free(small)) == 8


@LOOPS
async def test_a_forward_that_never_got_a_thread_gives_its_slots_back_at_once(anyio_backend: object) -> None:
    async with open_small(device_pages=16) as small:
        threads = [Pass() for _ in range(4)]
        serving = [asyncio.ensure_future(_serve(small, each, family)) for family, each in enumerate(threads)]
        for each in threads:
            await fired(each.began)
        late = Pass()
        waiting = asyncio.ensure_future(_serve(small, late, 9))
        while not late.pages:  # noqa: ASYNC110
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        while small.cache.core.usage().device.limbo_pages:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert set(late.pages) <= await _all_that_is_free(small)
        for each in threads:
            each.let_go()
        await asyncio.gather(*serving)
        assert not late.began.query()
        await nothing_left(small)


@LOOPS
async def test_many_clients_may_leave_at_once_and_the_next_is_served(anyio_backend: object) -> None:
    """Forward passes that nobody waits for any more end by themselves: the next request waits for a thread, it is not refused."""
    async with open_small(device_pages=32) as small:
        running: list[Pass] = []
        for family in range(12):
            forward = Pass()
            task = asyncio.ensure_future(_serve(small, forward, family))
            await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.wait({task})
            running.append(forward)
        next_one = asyncio.ensure_future(small.engine.answer(prompt(2, family=99)))
        await asyncio.sleep(0.02)
        for forward in running:
            forward.let_go()
        assert len((await next_one).tokens) == 1
        await nothing_left(small)


@LOOPS
async def test_a_forward_that_raises_gives_its_slots_back(anyio_backend: object) -> None:
    async with open_small() as small:

        def fail() -> None:
            raise ZeroDivisionError("of the engine")

        async with small.cache.acquire(prompt(PAGES)) as lease:
            assert not isinstance(lease.allocate(8), Shortfall)
            with pytest.raises(ZeroDivisionError, match="of the engine"):
                await lease.run(fail)
        await nothing_left(small)
        assert small.cache.state == "open"


@LOOPS
async def test_holds_and_events_keep_slots_of_passes_in_the_engines_own_threads(anyio_backend: object) -> None:
    async with open_small(device_pages=8) as small:
        computed, future = Completion(), concurrent.futures.Future[int]()
        async with small.cache.acquire(prompt(2, extra=0)) as lease:
            assert not isinstance(lease.allocate(8), Shortfall)
            lease.hold(future)
            lease.release(after=computed)
        assert len(await _all_that_is_free(small)) == 6
        await anyio.to_thread.run_sync(computed.finish)
        await asyncio.sleep(0.02)
        assert len(await _all_that_is_free(small)) == 6
        await anyio.to_thread.run_sync(future.cancel)  # cancelled is over, too
        await nothing_left(small)
        assert len(await _all_that_is_free(small)) == 8


@LOOPS
async def test_closing_does_not_wait_for_ever_for_a_forward_and_says_so(
    anyio_backend: object, caplog: pytest.LogCaptureFixture
) -> None:
    forward = Pass()
    async with open_small(check_pools=False, close_timeout_s=0.1) as small:
        task = asyncio.ensure_future(_serve(small, forward))
        await fired(forward.began)
    assert "closed_with_work_left" in caplog.text
    assert small.cache.state == "closed"
    forward.let_go()
    await task
