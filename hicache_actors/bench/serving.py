"""What a serving engine feels of the cache: a small random Llama behind the batching engine, on this machine's CPU.

Inter-token latency is that of decodes that run while (idle) no tier moves a byte, and (busy) loads, write-backs, backups and
prefetches follow each other without a pause on the same cache and loop.  Overhead is measured in pairs: a new prompt through the
engine with all tiers on, and through the same engine and model with the cache switched off, one after the other, in changing order.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final

import torch

from hicache_actors.backends.registry import open_backend
from hicache_actors.bench.figures import Figures, spread
from hicache_actors.bench.progress import Progress
from hicache_actors.bench.rig import BenchError, StampingWorkers, Watched
from hicache_actors.cache.api import HiCache
from hicache_actors.config import Config, HostConfig, StorageConfig
from hicache_actors.core.words import Shortfall
from hicache_actors.errors import MissingExtraError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.memory.kv import KVTensors

PAGE_TOKENS: Final = 16
PROMPT_TOKENS: Final = 256
ANSWER_TOKENS: Final = 4
STREAMS: Final = 4
VOCABULARY: Final = 2_000
MOVED_PAGES: Final = 32  #: of a prompt of the busy tiers
MOVED_PROMPTS: Final = 24  #: more pages than the host has
DEVICE_PAGES: Final = 384
HOST_PAGES: Final = 512


class Sizes:
    """How much of everything."""

    def __init__(self, divisor: int = 1) -> None:
        self.ttfts = max(2, 48 // divisor)
        self.tokens = max(4, 160 // divisor)
        self.rounds = max(1, 3 // divisor)
        self.pairs = max(2, 160 // divisor)


def run(options: Namespace, *, quiet: bool = False) -> Figures:
    sizes = Sizes(8 if options.quick else 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the other cores are for copies
    try:
        if options.url is not None:
            return asyncio.run(measure(options.url, sizes, quiet=quiet))
        with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
            return asyncio.run(measure(f"file://{folder}", sizes, quiet=quiet))
    finally:
        torch.set_num_threads(threads)


async def measure(url: str, sizes: Sizes, *, quiet: bool) -> Figures:
    progress = Progress(2 * (sizes.ttfts + sizes.rounds + sizes.pairs), quiet=quiet)
    figures: dict[str, float | str | Figures] = {}
    try:
        async with AsyncExitStack() as stack:
            model = _model()
            on = await stack.enter_async_context(_open(url, model))
            off = await stack.enter_async_context(_open(None, model))
            await _warm_up(on, off)
            for name, latencies_s in (await _first_tokens(on, sizes, progress)).items():
                figures[name] = spread(latencies_s, scale=1e3)
            idle_s, busy_s, moved_gb_s = await _between_tokens(on, sizes, progress)
            figures["itl_idle_ms"] = spread(idle_s, scale=1e3)
            figures["itl_busy_ms"] = spread(busy_s, scale=1e3)
            figures["busy_gb_s"] = round(moved_gb_s, 3)
            figures |= await _overhead(on, off, sizes, progress)
    finally:
        progress.close()
    return figures


class Serving:
    """An engine over a cache of its own."""

    def __init__(self, cache: HiCache, served: Any, engine: Any) -> None:
        self.cache, self.served, self.engine = cache, served, engine
        self._prompts = int.from_bytes(os.urandom(6), "little")  # an earlier run may have left its own in the store

    def new_prompt(self, tokens: int = PROMPT_TOKENS) -> list[int]:
        """One that nobody has asked before."""
        self._prompts += 1
        generator = torch.Generator().manual_seed(self._prompts)
        found: list[int] = torch.randint(3, VOCABULARY, (tokens,), generator=generator).tolist()
        return found

    async def answer(self, prompt: Sequence[int], tokens: int) -> list[float]:
        """-> when each token came, after the submission, in seconds."""
        begun_s = perf_counter()
        return [perf_counter() - begun_s async for _ in self.engine.generate(prompt, max_new_tokens=tokens)]

    async def settle(self) -> None:
        """Let all that was published be written, and every job end."""
        await self.cache.drain(30.0)
        await self.cache.pipelines.idle()


def _model() -> Any:
    """One for both engines: each would find weights of its own pushed out of the processor's cache by the other's."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise MissingExtraError("transformers", "transformers") from error
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            dtype="float32",
        )
    )
    model.train(False)
    return model


@asynccontextmanager
async def _open(url: str | None, model: Any) -> AsyncIterator[Serving]:
    """``url`` None: the cache is switched off."""
    from hicache_actors.integrations.serving import ServedModel, ServingEngine
    from hicache_actors.integrations.transformers import kv_shape_of, model_facts

    config = Config(
        model=model_facts(model, model_id="random", weights="seed-7"),
        page_size=PAGE_TOKENS,
        host=HostConfig(pages=HOST_PAGES),
        storage=StorageConfig(prefetch_threshold_tokens=PAGE_TOKENS, prefetch_policy="wait_complete"),
        enabled=url is not None,
    )
    kv = KVTensors.make(kv_shape_of(model, page_size=PAGE_TOKENS), DEVICE_PAGES)
    served = ServedModel(model, kv)
    workers = StampingWorkers("bench-store", config.storage.read_concurrency + config.storage.write_concurrency)
    store = None if url is None else Watched(open_backend(url, workers), workers)
    try:
        async with HiCache.open(config, kv, backend=store) as cache:
            async with ServingEngine.open(cache, served) as engine:
                yield Serving(cache, served, engine)
            if store is not None:
                await cache.drain(30.0)
                await store.forget()
    finally:
        served.detach()
        workers.close()


async def _warm_up(*engines: Serving) -> None:
    for serving in engines:
        for _ in range(3):
            await serving.answer(serving.new_prompt(), ANSWER_TOKENS)
        await serving.settle()


async def _first_tokens(on: Serving, sizes: Sizes, progress: Progress) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"ttft_ms": [], "ttft_cached_ms": []}
    prompts = [on.new_prompt() for _ in range(sizes.ttfts)]
    for name, latencies_s in times.items():
        for prompt in prompts:
            progress.step("first tokens")
            latencies_s.append((await on.answer(prompt, 1))[0])
            await on.settle()
        await _evict(on)
        del name
    return times


async def _evict(on: Serving) -> None:
    """Take the device away from all prompts but one."""
    await _publish(on, on.new_prompt(DEVICE_PAGES * PAGE_TOKENS), DEVICE_PAGES)
    await on.settle()


async def _between_tokens(on: Serving, sizes: Sizes, progress: Progress) -> tuple[list[float], list[float], float]:
    """-> gaps with idle tiers, gaps with busy ones (seconds), and how much moved (1e9 bytes a second)."""
    idle_s: list[float] = []
    busy_s: list[float] = []
    moved_bytes, took_s = 0, 0.0
    prompts = [on.new_prompt(MOVED_PAGES * PAGE_TOKENS) for _ in range(MOVED_PROMPTS)]
    for prompt in prompts:  # so that storage has them
        await _publish(on, prompt, MOVED_PAGES)
    await on.settle()
    for _ in range(sizes.rounds):
        progress.step("tokens, idle tiers")
        await on.settle()
        idle_s += await _gaps_s(on, sizes.tokens)
        progress.step("tokens, busy tiers")
        before_bytes, begun_s = _moved_bytes(on), perf_counter()
        movers = [asyncio.ensure_future(_keep_reading(on, prompts)), asyncio.ensure_future(_keep_writing(on))]
        busy_s += await _gaps_s(on, sizes.tokens)
        moved_bytes += _moved_bytes(on) - before_bytes
        took_s += perf_counter() - begun_s
        for mover in movers:
            if mover.done():
                mover.result()
            mover.cancel()
        await asyncio.wait(movers)
    return idle_s, busy_s, moved_bytes / took_s / 1e9


async def _gaps_s(on: Serving, tokens: int) -> list[float]:
    times_s = await asyncio.gather(*(on.answer(on.new_prompt(PAGE_TOKENS), tokens + 1) for _ in range(STREAMS)))
    return [later - earlier for one in times_s for earlier, later in pairwise(one[1:])]


async def _keep_reading(on: Serving, prompts: Sequence[Sequence[int]]) -> None:
    """Storage to host to device, over more prompts than the host holds."""
    while True:
        for prompt in prompts:
            async with on.cache.acquire(Prompt([*prompt, 1])) as lease:
                if lease.loading is not None:
                    await lease.loading.verdict()
            await asyncio.sleep(0)


async def _keep_writing(on: Serving) -> None:
    """Device to host to storage, as if somebody computed very fast."""
    while True:
        await _publish(on, on.new_prompt(MOVED_PAGES * PAGE_TOKENS), MOVED_PAGES)


async def _publish(on: Serving, prompt: Sequence[int], pages: int) -> None:
    """Commit pages that nobody has computed, and wait until they are stored."""
    whole = Prompt([*prompt, 1])
    async with on.cache.acquire(whole) as lease:
        if lease.loading is not None:
            await lease.loading.verdict()
        refused = lease.allocate(pages * PAGE_TOKENS - lease.capacity_tokens)
        if isinstance(refused, Shortfall):
            await asyncio.sleep(0.001)  # running answers hold the rest
            return
        lease.commit(pages * PAGE_TOKENS)
    await on.cache.stored(whole, 30.0)


def _moved_bytes(on: Serving) -> int:
    return sum(flow.bytes for flow in on.cache.snapshot().flows.values())


async def _overhead(on: Serving, off: Serving, sizes: Sizes, progress: Progress) -> dict[str, float | str | Figures]:
    with_s: list[float] = []
    without_s: list[float] = []
    bare_s: list[float] = []
    cpu_s: dict[Serving, list[float]] = {on: [], off: []}
    await asyncio.to_thread(os.sync)  # the kernel has been given more than it has written to the disk yet
    for number in range(sizes.pairs):
        progress.step("overhead")
        prompt = on.new_prompt()
        for serving, times_s in ((on, with_s), (off, without_s)) if number % 2 else ((off, without_s), (on, with_s)):
            begun_cpu_s = process_time()
            times_s.append((await serving.answer(prompt, ANSWER_TOKENS))[-1])
            await serving.settle()
            cpu_s[serving].append(process_time() - begun_cpu_s)
    for _ in range(sizes.pairs):  # not between the pairs: one of the two would come right after a run on its own pages
        progress.step("bare passes")
        bare_s.append(await _bare(off, off.new_prompt()))
    return {
        "request_ms": spread(with_s, scale=1e3),
        "overhead_ms_p50": _extra_ms(with_s, without_s),
        "overhead_cpu_ms_p50": _extra_ms(cpu_s[on], cpu_s[off]),
        "bare_ms_p50": round(median(bare_s) * 1e3, 3),
    }


def _extra_ms(with_s: Sequence[float], without_s: Sequence[float]) -> float:
    """Median over pairs."""
    return round(median(one - other for one, other in zip(with_s, without_s, strict=True)) * 1e3, 3)


async def _bare(off: Serving, prompt: Sequence[int]) -> float:
    """The same passes, one hop each, on pages of the idle engine's pool -> seconds."""
    from hicache_actors.integrations.serving import Piece

    pages = list(range(-(-(len(prompt) + ANSWER_TOKENS) // PAGE_TOKENS)))
    if off.engine.snapshot().running:
        raise BenchError("the engine is not idle")

    def forward(tokens: Sequence[int], start: int) -> int:
        return int(off.served.forward([Piece(tokens, start, pages)])[0].argmax())

    begun_s = perf_counter()
    token = await asyncio.to_thread(forward, prompt, 0)
    for at in range(ANSWER_TOKENS - 1):
        token = await asyncio.to_thread(forward, [token], len(prompt) + at)
    return perf_counter() - begun_s
