"""What storage figures are compared with: the same calls without the library, and re-created peers.

All of them move the same number of bytes, from and to memory that has been touched before, and take the clock around all of it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Protocol

from hicache_actors.backends.backend import Backend
from hicache_actors.memory.shapes import BATCH_PAGES, batch_pages

PEERS: Final = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
"""In a source tree.  Peers are not part of the package."""


class Peer(Protocol):
    """What a file in the folder of peers names ``PEER``: made with a folder of its own; blocking."""

    def write(self, names: Sequence[str], pages: Sequence[memoryview]) -> int: ...

    def read(self, names: Sequence[str], pages: Sequence[memoryview]) -> int: ...


class Mover(Protocol):
    """Writes or reads all pages of a pass, whose number no other pass has -> seconds."""

    async def write(self, number: int) -> float: ...

    async def read(self, number: int) -> float: ...


class Pages:
    """Memory of ``count`` pages, touched and aligned, as host slots are; names that no pass shares."""

    def __init__(self, count: int, page_bytes: int) -> None:
        self.count, self.page_bytes = count, page_bytes
        whole = memoryview(mmap.mmap(-1, count * page_bytes))
        whole[:] = (os.urandom(1 << 16) * -(-count * page_bytes // (1 << 16)))[: count * page_bytes]
        self.views = [whole[at * page_bytes : (at + 1) * page_bytes] for at in range(count)]

    def names(self, number: int) -> list[str]:
        return [f"{number:08x}{at:056x}" for at in range(self.count)]

    def batches(self, most_pages: int = BATCH_PAGES) -> Iterator[slice]:
        """As the library cuts them for a store that takes ``most_pages`` a call."""
        return self.cut(min(most_pages, batch_pages(self.page_bytes)))

    def cut(self, step: int) -> Iterator[slice]:
        return (slice(first, first + step) for first in range(0, self.count, step))


class ExecutorLoop:
    """The system calls of our file store (open, write, close, rename; open, read, close) in plain thread pools.

    ``batched``: a batch a hop, as the library does it; else a page a hop, as one writes it down.
    """

    def __init__(self, folder: str, pages: Pages, *, readers: int, writers: int, batched: bool) -> None:
        self._folder, self._pages, self._batched = folder, pages, batched
        self._readers, self._writers = ThreadPoolExecutor(readers), ThreadPoolExecutor(writers)

    async def write(self, number: int) -> float:
        return await self._run(self._writers, self._write, number)

    async def read(self, number: int) -> float:
        return await self._run(self._readers, self._read, number)

    def close(self) -> None:
        self._readers.shutdown()
        self._writers.shutdown()

    async def _run(self, pool: ThreadPoolExecutor, call: Callable[..., None], number: int) -> float:
        loop, names, views = asyncio.get_running_loop(), self._pages.names(number), self._pages.views
        begun_s = perf_counter()
        parts = self._pages.batches() if self._batched else self._pages.cut(1)
        await asyncio.gather(*(loop.run_in_executor(pool, call, names[part], views[part]) for part in parts))
        return perf_counter() - begun_s

    def _write(self, names: Sequence[str], views: Sequence[memoryview]) -> None:
        for name, view in zip(names, views, strict=True):
            path = self._path(name)
            temporary = f"{path}.tmp"
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                written = os.write(fd, view)
            finally:
                os.close(fd)
            assert written == len(view), "the disk is full"
            os.rename(temporary, path)

    def _read(self, names: Sequence[str], views: Sequence[memoryview]) -> None:
        for name, view in zip(names, views, strict=True):
            fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                read = os.readv(fd, (view,))
            finally:
                os.close(fd)
            assert read == len(view), "a short read"

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


class BackendLoop:
    """A backend's own calls, a batch a call, ``readers`` and ``writers`` at once: for stores that are no local folder."""

    def __init__(self, backend: Backend, pages: Pages, *, readers: int, writers: int) -> None:
        self._backend, self._pages = backend, pages
        self._readers, self._writers = readers, writers

    async def write(self, number: int) -> float:
        return await self._run(self._backend.write, self._writers, number)

    async def read(self, number: int) -> float:
        return await self._run(self._backend.read, self._readers, number)

    async def forget(self, number: int) -> None:
        await self._backend.delete(self._pages.names(number))

    async def _run(self, call: Callable[..., Any], at_once: int, number: int) -> float:
        names, turn = self._pages.names(number), asyncio.Semaphore(at_once)

        async def one(part: slice) -> None:
            async with turn:
                outcomes = await call(names[part], self._pages.views[part])
            assert all(outcomes), "the store refused a page"

        begun_s = perf_counter()
        await asyncio.gather(*map(one, self._pages.batches(self._backend.batch_pages)))
        return perf_counter() - begun_s


class PeerLoop:
    """A peer, in one thread beside the loop."""

    def __init__(self, peer: Peer, pages: Pages) -> None:
        self._peer, self._pages = peer, pages

    async def write(self, number: int) -> float:
        return await self._run(self._peer.write, number)

    async def read(self, number: int) -> float:
        return await self._run(self._peer.read, number)

    async def _run(self, call: Callable[[Sequence[str], Sequence[memoryview]], int], number: int) -> float:
        names = self._pages.names(number)
        begun_s = perf_counter()
        done = await asyncio.to_thread(call, names, self._pages.views)
        took_s = perf_counter() - begun_s
        assert done == len(names), "the peer failed"
        return took_s


def load_peer(name: str, folder: str) -> Peer | None:
    """The peer in ``benchmarks/peers/<name>.py``; None where there is no source tree."""
    spec = importlib.util.spec_from_file_location(f"hicache_peer_{name}", PEERS / f"{name}.py")
    if spec is None or spec.loader is None or not (PEERS / f"{name}.py").is_file():
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    peer: Peer = module.PEER(folder)
    return peer
