"""``memory://``: a dictionary.  For tests, examples, and as the smallest complete backend to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from anyio.lowlevel import checkpoint

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.urls import parse_url
from hicache_actors.memory.shapes import BATCH_PAGES

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

_named_stores: Final[dict[str, dict[str, bytes]]] = {}


class MemoryBackend(Backend):
    """``memory://`` is private to its owner and empty; ``memory://NAME`` is shared by all of this process that say NAME.

    A named store outlives its backends, so a cache that is opened again finds what the last one wrote.  No threads: each
    object is copied on the loop, with a checkpoint after each.
    """

    batch_pages = BATCH_PAGES

    def __init__(self, url: str = "memory://", workers: Workers | None = None) -> None:
        name = parse_url(url, "memory", path=False).host
        self._objects = _named_stores.setdefault(name, {}) if name else {}
        self._counts: Counter[str] = Counter()

    async def exists(self, keys: Sequence[str]) -> int:
        await checkpoint()
        return next((i for i, key in enumerate(keys) if key not in self._objects), len(keys))

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        found = []
        for key, buffer in zip(keys, buffers, strict=True):
            await checkpoint()
            data = self._objects.get(key)
            whole = data is not None and len(data) == len(buffer)
            if data is not None and whole:
                buffer[:] = data
            found.append(whole)
        self._counts["hits"] += sum(found)
        self._counts["misses"] += len(found) - sum(found)
        return found

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        outcomes = []
        for key, buffer in zip(keys, buffers, strict=True):
            await checkpoint()
            present = self._objects.get(key)
            if present is not None and len(present) == len(buffer):
                outcomes.append(Stored.PRESENT)
            else:
                self._objects[key] = bytes(buffer)
                outcomes.append(Stored.WRITTEN)
        self._counts["written"] += outcomes.count(Stored.WRITTEN)
        self._counts["present"] += outcomes.count(Stored.PRESENT)
        return outcomes

    async def delete(self, keys: Sequence[str]) -> int:
        await checkpoint()
        return sum(self._objects.pop(key, None) is not None for key in keys)

    async def quarantine(self, key: str) -> bool:
        removed = await self.delete([key]) > 0
        self._counts["quarantined"] += removed
        return removed

    async def lengths(self, keys: Sequence[str]) -> list[int | None]:
        await checkpoint()
        return [len(self._objects[key]) if key in self._objects else None for key in keys]

    async def clear(self) -> None:
        await checkpoint()
        self._objects.clear()

    async def keys(self) -> AsyncIterator[str]:
        for key in list(self._objects):
            await checkpoint()
            yield key

    def stats(self) -> Mapping[str, int | float | str]:
        return {"objects": len(self._objects), **self._counts}
