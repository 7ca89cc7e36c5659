"""Callbacks of the loop, where sniffio is installed: it takes what is in no task for no loop at all."""

from __future__ import annotations

import asyncio
import contextvars

import anyio
import anyio.lowlevel
import pytest
import sniffio

from hicache_actors.runtime import System
from hicache_actors.runtime.sniffing import as_in_a_task

every_loop = pytest.mark.parametrize("anyio_backend", ["virtual:3", "asyncio", "uvloop"], indirect=True)


async def _in_a_callback(fn: object) -> object:
    assert callable(fn)
    future = asyncio.get_running_loop().create_future()

    def callback() -> None:
        assert asyncio.current_task() is None
        try:
            future.set_result(fn())
        except Exception as error:
            future.set_exception(error)

    asyncio.get_running_loop().call_soon(callback)
    return await future


@every_loop
async def test_anyio_knows_the_loop_in_a_callback() -> None:
    with pytest.raises(RuntimeError):
        await asyncio.create_task(_in_a_callback(sniffio.current_async_library), context=_bare())
    assert await asyncio.create_task(_in_a_callback(lambda: as_in_a_task(anyio.CancelScope)), context=_bare())
    with pytest.raises(ValueError, match="its own"):
        await _in_a_callback(lambda: as_in_a_task(_fails))
    with pytest.raises(RuntimeError):
        await asyncio.create_task(_in_a_callback(sniffio.current_async_library), context=_bare())


@every_loop
async def test_a_pipeline_may_be_spawned_in_a_callback() -> None:
    async def pipeline() -> None:
        await anyio.lowlevel.checkpoint()

    async def life() -> None:
        async with System("callbacks") as system:
            job = await _in_a_callback(lambda: system.spawn("job", pipeline))
            await job.wait()  # type: ignore[attr-defined]
            assert job.ended  # type: ignore[attr-defined]

    await asyncio.create_task(life(), context=_bare())


def _bare() -> contextvars.Context:
    """As under `asyncio.run`: nobody has said which loop it is."""
    context = contextvars.copy_context()
    context.run(sniffio.current_async_library_cvar.set, None)
    return context


def _fails() -> None:
    raise ValueError("its own")
