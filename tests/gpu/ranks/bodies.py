"""What each rank does, in a process of its own, with its KV on a device of its own.  Control stays on gloo and on the CPU."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias

import anyio.to_thread
import msgspec

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.cache.api import HiCache
from hicache_actors.memory.kv import KVTensors
from hicache_actors.testing.engines import Answer, StepEngine
from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.processes import group_of
from hicache_actors.testing.small import SHAPE, prompt, small_config
from hicache_actors.testing.toy_model import ToyModel

DeviceKind: TypeAlias = Literal["cpu", "cuda"]


@asynccontextmanager
async def opened(
    rank: int, size: int, port: int, kind: DeviceKind, backend: MemoryBackend, **group: Any
) -> AsyncIterator[HiCache]:
    kv = KVTensors.make(SHAPE, 7, device="cpu" if kind == "cpu" else f"cuda:{rank}")
    ranks = group_of(rank, size, port, **group)
    # Pages on a GPU are out of reach of what poisons freed ones.
    config = msgspec.structs.replace(small_config(), poison_freed=kind == "cpu")
    async with HiCache.open(config, kv, backend=backend, driver="step", ranks=ranks) as cache:
        yield cache


async def serve(cache: HiCache, name: str) -> dict[str, Answer]:
    """Prompts that do not fit on the device together; `ToyModel` raises if a page comes back with other bytes."""
    engine = StepEngine(cache, ToyModel(cache.kv), batch=1, lockstep=True)
    prompts = [(f"{name}.{at}", prompt(5, family=family)) for at, family in enumerate((0, 1, 2, 2))]
    answers = await anyio.to_thread.run_sync(engine.run, prompts)
    engine.close()
    check_conservation(cache.core)
    return answers


async def all_tiers(rank: int, pipe: Connection, size: int, port: int, kind: DeviceKind) -> Any:
    """Two turns, then the same prompts once more on the same store -> everything that must be equal on all ranks."""
    backend, seen, digests = MemoryBackend(), list[Any](), list[int]()
    for epoch in range(2):
        async with opened(rank, size, port, kind, backend, epoch=epoch) as cache:
            for turn in range(2 - epoch):
                answers = await serve(cache, f"{epoch}.{turn}")
                seen += [(rid, each.tokens, msgspec.to_builtins(each.account)) for rid, each in answers.items()]
            assert cache.driver.failure is None, cache.driver.failure
            digests.append(cache.core.state_digest())
            await cache.drain(10.0, stepping=True)
    return seen, digests


async def lose_a_peer(rank: int, pipe: Connection, size: int, port: int, kind: DeviceKind) -> Any:
    """The last rank closes its cache and the others' engines go on -> state, and tokens before and after."""
    async with opened(rank, size, port, kind, MemoryBackend(), deadline_s=2.0) as cache:
        before = await serve(cache, "before")
        if rank == size - 1:
            return None
        alone = StepEngine(cache, ToyModel(cache.kv))
        prompts = [(f"after.{at}", prompt(5, family=family)) for at, family in enumerate((0, 1, 2, 2))]
        after = await anyio.to_thread.run_sync(alone.run, prompts)
        alone.close()
        return (
            cache.state,
            sorted(each.tokens for each in before.values()),
            sorted(each.tokens for each in after.values()),
        )
