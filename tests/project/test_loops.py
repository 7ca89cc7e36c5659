"""The `anyio_backend` fixture gives a test the loop that it asks for."""

from __future__ import annotations

import asyncio

import pytest

from hicache_actors.testing.loop import VirtualLoop


async def test_plain_asyncio_is_the_default() -> None:
    loop = asyncio.get_running_loop()
    assert type(loop).__module__.startswith("asyncio.")


@pytest.mark.parametrize("anyio_backend", ["virtual", "virtual:7"], indirect=True)
async def test_virtual_time_jumps() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    began = loop.time()
    await asyncio.sleep(3600)
    assert loop.time() - began >= 3600


@pytest.mark.parametrize("anyio_backend", ["uvloop"], indirect=True)
async def test_uvloop() -> None:
    assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
