"""A cache over a GPU serves with the first chunk of its host memory, while the others are touched and registered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from hicache_actors.cache.api import HiCache
from hicache_actors.cuda_ext.native_cuda import NativeCudaDevice
from hicache_actors.errors import ConfigError
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.small import SHAPE, Small, evict_device, open_small, prompt, small_config
from hicache_actors.tiers import host

from .gpu_stub import IMAGE, Stub

pytestmark = pytest.mark.native

WAIT_S = 30.0
CHUNK_PAGES = 16
HOST_PAGES = 40


@pytest.fixture(autouse=True)
def _small_chunks(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.everywhere()
    monkeypatch.setattr(host, "CHUNK_BYTES", CHUNK_PAGES * SlotLayout(SHAPE).slot_bytes)


class HeldDevice(NativeCudaDevice):
    """Registers the first chunk at once, and others when it may."""

    def __init__(self, stub: Stub) -> None:
        super().__init__(path=stub.path, kernel=lambda major, minor: IMAGE)
        self.registered = 0
        self.asked, self.may_register = threading.Event(), threading.Event()

    def register(self, address: int, nbytes: int, *, step_bytes: int) -> None:
        self.registered += 1
        if self.registered > 1:
            self.asked.set()
            assert self.may_register.wait(WAIT_S)
        super().register(address, nbytes, step_bytes=step_bytes)


@asynccontextmanager
async def opened(device: NativeCudaDevice) -> AsyncIterator[Small]:
    config = small_config(host_pages=HOST_PAGES)
    config = type(config)(page_size=config.page_size, host=config.host, model=config.model, close_timeout_s=WAIT_S)
    async with open_small(device=device, config=config, check_pools=False) as small:
        yield small
        check_conservation(small.cache.core)


async def until(small: Small, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_it_serves_while_memory_is_being_registered(stub: Stub) -> None:
    device = HeldDevice(stub)
    async with opened(device) as small:
        usage = small.cache.core.usage().host
        assert (usage.total_pages, usage.free_pages, usage.closed_pages) == (40, 16, 24)
        answers = [await small.engine.answer(prompt(8, family=family)) for family in (1, 2)]
        await small.cache.drain(WAIT_S)
        await evict_device(small)
        again = await small.engine.answer(prompt(8, family=2))
        assert again.tokens == answers[1].tokens
        assert small.cache.core.usage().host.closed_pages == 24
        assert small.cache.core.usage().jobs["open.run"] == 1
        device.may_register.set()
        await until(small, lambda: not small.cache.core.usage().host.closed_pages)
        assert device.raw.facts().registered_bytes == small.cache.snapshot().host.nbytes
        assert device.registered == 3
        for family in range(3, 8):  # more than the first chunk holds
            await small.engine.answer(prompt(8, family=family))
            await small.cache.drain(WAIT_S)
        assert small.cache.core.usage().host.owned_pages > CHUNK_PAGES
    assert stub.live() == {}


async def test_with_steps_it_opens_as_they_go(stub: Stub) -> None:
    device, config = HeldDevice(stub), small_config(host_pages=HOST_PAGES)
    config = type(config)(page_size=config.page_size, host=config.host, model=config.model, close_timeout_s=WAIT_S)
    async with HiCache.open(config, KVTensors.make(SHAPE, 8), device=device, driver="step") as cache:
        closed = []
        async with asyncio.timeout(WAIT_S):
            while cache.driver.needs_step:
                await cache.begin_step_async()
                closed.append(cache.core.usage().host.closed_pages)
                cache.end_step()
                await asyncio.to_thread(device.asked.wait, WAIT_S)
                device.may_register.set()
        assert sorted(set(closed), reverse=True) == [24, 8, 0]
        assert closed == sorted(closed, reverse=True)
    assert stub.live() == {}


async def test_what_cannot_be_registered_stays_closed(stub: Stub) -> None:
    stub.fail("cuMemHostRegister", 2, nth=3)
    with capture_logs() as logs:
        async with opened(NativeCudaDevice(path=stub.path, kernel=lambda major, minor: IMAGE)) as small:
            await until(small, lambda: not small.cache.core.usage().jobs)
            usage = small.cache.core.usage().host
            assert (usage.free_pages, usage.closed_pages) == (32, 8)
            answer = await small.engine.answer(prompt(8))
            await small.cache.drain(WAIT_S)
            await evict_device(small)
            assert (await small.engine.answer(prompt(8))).tokens == answer.tokens
    (said,) = [entry for entry in logs if entry["event"] == "host_memory_stays_closed"]
    assert said["log_level"] == "error"
    assert said["from_page"] == 32
    assert "slots 32 to 39 could not be registered with cuda:0" in said["reason"]
    assert "ulimit -l" in said["reason"]
    assert stub.live() == {}


async def test_a_first_chunk_that_cannot_be_registered_refuses_the_start(stub: Stub) -> None:
    stub.fail("cuMemHostRegister", 2)
    with pytest.raises(ConfigError, match=r"host\.pages.*slots 0 to 15 could not be registered"):
        async with opened(NativeCudaDevice(path=stub.path, kernel=lambda major, minor: IMAGE)):
            pass
    assert stub.live() == {}


async def test_a_cache_that_closes_meanwhile_opens_no_more(stub: Stub) -> None:
    device = HeldDevice(stub)
    async with opened(device):
        await asyncio.to_thread(device.asked.wait, WAIT_S)
        asyncio.get_running_loop().call_later(0.05, device.may_register.set)
    assert device.registered == 2
    assert stub.live() == {}


def test_pages_that_lie_all_over_the_memory_open_together(stub: Stub) -> None:
    device = NativeCudaDevice(path=stub.path, kernel=lambda major, minor: IMAGE)
    assert host.chunk_pages(HostMemory(SlotLayout(SHAPE), HOST_PAGES), device) == CHUNK_PAGES
    assert host.chunk_pages(HostMemory(SlotLayout(SHAPE), CHUNK_PAGES), device) == CHUNK_PAGES
    assert host.chunk_pages(HostMemory(SlotLayout(SHAPE, "layer_first"), 4000), device) == 4000
    assert device.close(WAIT_S)
