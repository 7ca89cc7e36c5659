"""Work that is seen through, whatever cancels who waits for it."""

from __future__ import annotations

import asyncio
import gc

import anyio
import pytest

from hicache_actors.runtime import see_through

every_loop = pytest.mark.parametrize("anyio_backend", ["virtual:3", "asyncio", "uvloop"], indirect=True)


async def _steps(done: list[int], *, error: Exception | None = None) -> str:
    for step in range(5):
        await anyio.sleep(0.001)
        done.append(step)
    if error is not None:
        raise error
    return "ended"


@every_loop
async def test_without_a_cancel_it_is_an_await(anyio_backend_name: str) -> None:
    assert await see_through(_steps([])) == "ended"
    with pytest.raises(ValueError, match="the work's own"):
        await see_through(_steps([], error=ValueError("the work's own")))


@every_loop
@pytest.mark.parametrize("error", [None, ValueError("nobody is left to hear it")])
async def test_native_cancels_are_raised_when_it_has_ended(anyio_backend_name: str, error: Exception | None) -> None:
    done: list[int] = []
    waiting = asyncio.ensure_future(see_through(_steps(done, error=error)))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert done == [0, 1, 2, 3, 4]
    gc.collect()


@every_loop
async def test_a_cancelled_scope_waits_for_it(anyio_backend_name: str) -> None:
    done: list[int] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        assert await see_through(_steps(done)) == "ended"
    assert done == [0, 1, 2, 3, 4]
    with anyio.move_on_after(0.002) as late:
        await see_through(_steps(done))
        await anyio.sleep(10)
    assert late.cancelled_caught
    assert len(done) == 10


@every_loop
async def test_a_loop_that_ends_may_cancel_the_work_itself(anyio_backend_name: str) -> None:
    before = asyncio.all_tasks()
    waiting = asyncio.ensure_future(see_through(anyio.sleep(10)))
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - before:
        task.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
