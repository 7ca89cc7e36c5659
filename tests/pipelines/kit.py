"""Traps that stand in one stage of a pipeline, or in a store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Wrapper
from hicache_actors.config import Deadlines

Verb = Literal["exists", "read", "write"]

DEADLINES = Deadlines(load_s=0.5, write_back_s=0.5, backup_s=0.5)
TOO_LONG_S = 3.0  #: longer than any deadline here


class Trap:
    """Stands in one stage and does its deed to the first who comes by.  ``sprung`` tells that somebody did."""

    def __init__(self, deed: Callable[[], Awaitable[None]]) -> None:
        self._deed = deed
        self.sprung = False

    async def stand(self) -> None:
        """In the stage's own task: it goes on when the deed is done, or with what the deed raises."""
        if not self.sprung:
            self.sprung = True
            await self._deed()

    def poke(self) -> None:
        """Beside the stage, which goes on meanwhile."""
        if not self.sprung:
            self.sprung = True
            asyncio.ensure_future(self._deed()).add_done_callback(asyncio.Task.result)


class TrappedBackend(Wrapper):
    """Stops at a trap before a verb reaches the store."""

    def __init__(self, inner: Backend | None = None) -> None:
        super().__init__(inner or MemoryBackend())
        self.traps: dict[Verb, Callable[[], Awaitable[None]]] = {}

    async def exists(self, keys: Sequence[str]) -> int:
        await self._pass("exists")
        return await super().exists(keys)

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        await self._pass("read")
        return await super().read(keys, buffers)

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        await self._pass("write")
        return await super().write(keys, buffers)

    async def _pass(self, verb: Verb) -> None:
        if verb in self.traps:
            await self.traps[verb]()


def inside(pipeline: str) -> bool:
    """Whether the running task is one of this pipeline's."""
    task = asyncio.current_task()
    return task is not None and task.get_name().startswith(f"hicache.{pipeline}-")
