"""A cache to time: pages of a chosen size, real tiers and pipelines, and prompts that share nothing."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any, Final, TypeVar, TypeVarTuple

import torch

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.objects import Expected, Verdict
from hicache_actors.backends.registry import open_backend
from hicache_actors.backends.wrappers import Wrapper
from hicache_actors.cache.api import HiCache
from hicache_actors.cache.assembly import DriverKind
from hicache_actors.config import Config, Deadlines, HostConfig, ModelFacts, StorageConfig
from hicache_actors.core.words import SLOT_BYTES, Shortfall
from hicache_actors.errors import HiCacheError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.shapes import KVShape
from hicache_actors.pipelines.observer import BatchEnd, Observation
from hicache_actors.runtime import Workers

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PAGE_TOKENS: Final = 64
PATIENCE_S: Final = 120.0
_HASH_DIGITS: Final = 64  #: a key begins with the page's hash
SHAPES: Final = {
    64 << 10: KVShape(layers=2, kv=2, heads=1, head_dim=128, dtype="bfloat16", page_size=PAGE_TOKENS),
    1 << 20: KVShape(layers=8, kv=2, heads=4, head_dim=128, dtype="bfloat16", page_size=PAGE_TOKENS),
}
"""By bytes of a page."""


class BenchError(HiCacheError):
    """A benchmark could not do what it wanted to time; its figures would mean nothing."""


class StampingWorkers(Workers):
    """Notes, in the worker's own thread, when the last blocking call has returned."""

    last_end_s = 0.0

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts, on_end: Callable[[], object] | None = None) -> T:
        def stamped(*args: *Ts) -> T:
            try:
                return fn(*args)
            finally:
                self.last_end_s = perf_counter()

        return await super().run(stamped, *args, on_end=on_end)


class Watched(Wrapper):
    """Knows the keys it has stored, so that a benchmark can take them away, and when the last byte of a read was in."""

    def __init__(self, inner: Backend, workers: StampingWorkers) -> None:
        super().__init__(inner)
        self.checks = inner.checks
        self.stored: set[str] = set()
        self.last_byte_s = 0.0
        self._reads: list[tuple[Sequence[str], float]] = []
        self._read_s: dict[str, float] = {}
        self._workers = workers

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        return await self._stamped(keys, self.inner.read(keys, buffers))

    async def read_checked(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> Sequence[Verdict | None]:
        return await self._stamped(keys, self.inner.read_checked(keys, buffers, expected))

    async def _stamped(self, keys: Sequence[str], reading: Awaitable[T]) -> T:
        begun_s = perf_counter()
        found = await reading
        in_thread_s = self._workers.last_end_s
        self.last_byte_s = in_thread_s if in_thread_s > begun_s else perf_counter()
        self._reads.append((keys, self.last_byte_s))  # looked at when somebody asks: not while the clock runs
        return found

    def last_byte_of(self, hashes: Iterable[bytes]) -> float:
        """When the last of these pages was in."""
        for keys, last_byte_s in self._reads:
            self._read_s |= dict.fromkeys((key[:_HASH_DIGITS] for key in keys), last_byte_s)
        self._reads.clear()
        return max(self._read_s[page_hash.hex()] for page_hash in hashes)

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        outcomes = await self.inner.write(keys, buffers)
        self.stored.update(keys)
        return outcomes

    async def write_sealed(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> Sequence[Stored]:
        outcomes = await self.inner.write_sealed(keys, buffers, expected)
        self.stored.update(keys)
        return outcomes

    async def forget(self) -> None:
        """Delete all that was stored since the last time."""
        keys, self.stored = sorted(self.stored), set()
        await self.inner.delete(keys)


class Rig:
    """One open cache and what benchmarks do with it.  ``pages``: of a prompt of `prompt`."""

    def __init__(self, cache: HiCache, backend: Watched, pages: int) -> None:
        self.cache, self.backend, self.pages = cache, backend, pages
        self._on_host_s = 0.0
        self._copied_pages = 0
        cache.observe(self._observe)

    def prompt(self, number: int, pages: int | None = None) -> Prompt:
        """Numbers below 2^16 share no token."""
        tokens = (self.pages if pages is None else pages) * PAGE_TOKENS + 1
        return Prompt(array("q", range(number << 16, (number << 16) + tokens)))

    def publish(self, prompt: Prompt, rid: str) -> None:
        """As a request does that has computed all of ``prompt``.  What stands on the device is not looked at."""
        pages = len(prompt) // PAGE_TOKENS
        lease = self.cache.lease(prompt, rid)
        try:
            refused = lease.allocate(pages * PAGE_TOKENS - lease.capacity_tokens)
            if isinstance(refused, Shortfall):
                raise BenchError(f"no room on the device: {refused.reason}")
            lease.commit(pages * PAGE_TOKENS)
        finally:
            lease.release()

    async def store(self, prompt: Prompt, rid: str) -> float:
        """Publish, let it be copied to the host and stored -> seconds from the last copy to the acknowledgement."""
        pages = len(prompt) // PAGE_TOKENS
        self._copied_pages = 0
        self.publish(prompt, rid)
        stored = await self.cache.stored(prompt, PATIENCE_S)
        ended_s = perf_counter()
        if stored.tokens < pages * PAGE_TOKENS or self._copied_pages < pages:
            raise BenchError(f"{stored.tokens} of {pages * PAGE_TOKENS} tokens were stored ({stored.reason})")
        return ended_s - self._on_host_s

    async def fetch(self, prompt: Prompt, rid: str) -> float:
        """Bring a stored prompt to the host -> seconds from the call to the waiter."""
        wanted = len(prompt) // PAGE_TOKENS * PAGE_TOKENS
        begun_s = perf_counter()
        fetched = await self.cache.prefetch(prompt, rid, deadline_s=PATIENCE_S).wait()
        took_s = perf_counter() - begun_s
        if fetched < wanted:
            raise BenchError(f"{fetched} of {wanted} tokens were fetched")
        return took_s

    async def clear(self) -> None:
        """Empty device and host; the store keeps what it has."""
        await self.cache.drain(PATIENCE_S)
        await self.cache.pipelines.idle()
        await self.cache.reset()

    def _observe(self, what: Observation) -> None:
        if isinstance(what, BatchEnd) and what.kind == "write_back" and what.target is not None:
            self._copied_pages += len(what.target) // SLOT_BYTES
            self._on_host_s = perf_counter()


@asynccontextmanager
async def open_rig(
    url: str,
    *,
    page_bytes: int,
    pages: int,
    host_pages: int | None = None,
    device_pages: int | None = None,
    backend: Backend | None = None,
    driver: DriverKind = "auto",
    **storage: Any,
) -> AsyncIterator[Rig]:
    """A cache over ``url`` (or over ``backend``), with room for ``pages`` on the device and twice as many on the host.

    ``storage`` are settings of `StorageConfig`.  Torch computes in one thread, so that copies have the machine.
    """
    shape = SHAPES[page_bytes]
    patient: dict[str, Any] = {"prefetch_policy": "wait_complete", "prefetch_timeout_max_s": PATIENCE_S}
    settings = StorageConfig(prefetch_threshold_tokens=PAGE_TOKENS, **(patient | storage))
    workers = StampingWorkers("bench-store", settings.read_concurrency + settings.write_concurrency)
    watched = Watched(open_backend(url, workers) if backend is None else backend, workers)
    config = Config(
        model=ModelFacts(model_id="bench", weights="random"),
        page_size=PAGE_TOKENS,
        host=HostConfig(pages=2 * pages + 2 if host_pages is None else host_pages),
        storage=settings,
        deadlines=Deadlines(backup_s=PATIENCE_S),
    )
    kv = KVTensors.make(shape, pages if device_pages is None else device_pages)
    for layer in range(shape.layers):
        for tensor in kv.layer(layer):
            tensor.view(torch.int16).random_(0, 1 << 14)
    try:
        async with HiCache.open(config, kv, backend=watched, driver=driver) as cache:
            yield Rig(cache, watched, pages)
    finally:
        workers.close()


async def sample_lag(lags_s: list[float], period_s: float = 0.002) -> None:
    """Append how late the loop wakes a sleeper, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + period_s
        await asyncio.sleep(period_s)
        lags_s.append(max(0.0, loop.time() - due_s))
