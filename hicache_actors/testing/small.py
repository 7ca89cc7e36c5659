"""Small caches for tests: real parts throughout, a toy model that checks every byte it reads, and a leak test at the end.

On a virtual-time loop the device is a `SimDevice` and the store needs no threads; elsewhere copies run in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from hicache_actors.backends.backend import Backend
from hicache_actors.cache.api import HiCache
from hicache_actors.cache.assembly import DriverKind
from hicache_actors.config import Config, Deadlines, HostConfig, HostLayout, ModelFacts, StorageConfig
from hicache_actors.core.config import SlotOwner
from hicache_actors.cuda_ext import open_cpu_device
from hicache_actors.cuda_ext.controls import ControlledDevice
from hicache_actors.keys.prompt import Prompt
from hicache_actors.keys.scope import NO_SCOPE, Scope
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.shapes import KVShape
from hicache_actors.testing.engines import LoopEngine
from hicache_actors.testing.pools import pools_whole
from hicache_actors.testing.sim_device import SimDevice
from hicache_actors.testing.toy_model import ToyModel
from hicache_actors.tiers.storage import Store

PAGE_SIZE = 4
SHAPE = KVShape(layers=3, kv=2, heads=2, head_dim=4, dtype="float32", page_size=PAGE_SIZE)


class Small(msgspec.Struct):
    """An open cache and what a test does with it."""

    cache: HiCache
    model: ToyModel
    engine: LoopEngine
    device: ControlledDevice[Any]

    @property
    def store(self) -> Store:
        """The attached store."""
        store = self.cache.movers.storage.store
        assert store is not None, "this cache has no storage"
        return store


def small_config(
    *,
    host_pages: int = 32,
    layout: HostLayout = "page_first_direct",
    url: str | None = None,
    deadlines: Deadlines | None = None,
    close_timeout_s: float = 2.0,
    **storage: Any,
) -> Config:
    """Pages of 4 tokens, and a prefetch threshold of one page."""
    return Config(
        page_size=PAGE_SIZE,
        host=HostConfig(pages=host_pages, layout=layout),
        model=ModelFacts(model_id="toy", weights="v1"),
        storage=StorageConfig(url=url, prefetch_threshold_tokens=PAGE_SIZE, **storage),
        deadlines=deadlines or Deadlines(),
        poison_freed=True,  # reuse that comes too early shows as wrong bytes
        close_timeout_s=close_timeout_s,
    )


def tokens(pages: int, *, family: int = 0, extra: int = 1) -> list[int]:
    """``pages`` whole pages and ``extra`` tokens; families share nothing."""
    return [1000 * family + at for at in range(pages * PAGE_SIZE + extra)]


def prompt(pages: int, *, family: int = 0, extra: int = 1, scope: Scope = NO_SCOPE) -> Prompt:
    """A prompt of which ``pages`` can be reused: at least one token is always computed."""
    return Prompt(tokens(pages, family=family, extra=extra), scope)


@asynccontextmanager
async def open_small(
    *,
    device_pages: int = 16,
    shape: KVShape = SHAPE,
    config: Config | None = None,
    backend: Backend | None = None,
    device: ControlledDevice[Any] | None = None,
    slots: SlotOwner = "owned",
    driver: DriverKind = "auto",
    check_pools: bool = True,
    **settings: Any,
) -> AsyncIterator[Small]:
    """``settings`` are those of `small_config`.  When the block ends well, every pool must be whole.

    ``device``: default is the CPU device of this machine, or one of timers in virtual time.
    """
    threads = not getattr(asyncio.get_running_loop(), "threadless", False)
    if device is None:
        device = open_cpu_device() if threads else SimDevice()
    kv = KVTensors.make(shape, device_pages)
    async with HiCache.open(
        config or small_config(**settings), kv, device=device, backend=backend, slots=slots, driver=driver
    ) as cache:
        model = ToyModel(kv)
        yield Small(cache, model, LoopEngine(cache, model, threads=threads), device)
        if check_pools and driver == "auto":
            await pools_whole(cache)


async def evict_device(small: Small, *, family: int = 900) -> None:
    """Fill the device pool with other prompts, so that nothing else is left on it."""
    pages = small.cache.kv.pages
    await small.engine.answer(prompt(pages - 1, family=family))
    await small.cache.drain(5.0)


async def answer_all(small: Small, prompts: Iterable[Prompt]) -> list[tuple[int, ...]]:
    return [(await small.engine.answer(each)).tokens for each in prompts]
