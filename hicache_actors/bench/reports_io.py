"""Reports about moving pages: what fetches cost others, and what others cost fetches."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Slow
from hicache_actors.bench.figures import Figures, ratio, spread
from hicache_actors.bench.plain import ExecutorLoop, Pages
from hicache_actors.bench.rig import PAGE_TOKENS, Rig, open_rig
from hicache_actors.config import StorageConfig
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.shapes import batch_pages
from hicache_actors.runtime import Workers

PAGE_BYTES: Final = 64 << 10
READERS: Final = 4
LARGE_BATCHES: Final = 2 * READERS


async def busy_thread(folder: str, divisor: int) -> Figures:
    """P08: what a thread that computes in Python loses to the cache's threads while they wait, and while they fetch."""
    rounds, pages = max(2, 8 // divisor), 256
    alone: list[float] = []
    idle: list[float] = []
    moving: list[float] = []
    for _ in range(rounds):
        alone.append(await asyncio.to_thread(_turns))
        async with open_rig(f"file://{folder}", page_bytes=PAGE_BYTES, pages=pages) as rig:
            await rig.store(rig.prompt(1), "write")
            await rig.clear()
            idle.append(await asyncio.to_thread(_turns))
            mover = asyncio.ensure_future(_keep_fetching(rig))
            moving.append(await asyncio.to_thread(_turns))
            await _stop(mover)
            await rig.clear()
    return {
        "idle_loss_percent": _loss(idle, alone),
        "idle_loss_percent_limit": 5.0,  # two threads that poll every 50 us: 30; every ms: 5 to 7
        "fetching_loss_percent": _loss(moving, alone),
    }


async def busy_process(folder: str, divisor: int) -> Figures:
    """P09: what a fetch loses to a model that computes in the same process, beside what a bare loop of the same reads loses."""
    pages, rounds = 512 // divisor, max(3, 9 // divisor)
    inside_s: list[float] = []
    alone_s: list[float] = []
    bare_s: list[float] = []
    bare_alone_s: list[float] = []
    async with open_rig(f"file://{folder}", page_bytes=PAGE_BYTES, pages=pages, read_concurrency=READERS) as rig:
        plain = Pages(pages, SlotLayout(rig.cache.kv.shape).object_bytes)
        with ExitStack() as stack:
            loop = ExecutorLoop(folder, plain, readers=READERS, writers=2, batched=True)
            stack.callback(loop.close)
            await loop.write(0)
            await rig.store(rig.prompt(1), "write")
            await rig.clear()
            for number in range(rounds):
                bare_alone_s.append(await loop.read(0))
                alone_s.append(await rig.fetch(rig.prompt(1), f"alone-{number}"))
                await rig.clear()
                with _forward_passes():
                    bare_s.append(await loop.read(0))
                    inside_s.append(await rig.fetch(rig.prompt(1), f"read-{number}"))
                await rig.clear()
        await rig.backend.forget()
    return {
        "inside_ms": spread(inside_s, scale=1e3),
        "alone_ms": spread(alone_s, scale=1e3),
        "bare_ms": spread(bare_s, scale=1e3),
        "bare_alone_ms": spread(bare_alone_s, scale=1e3),
        "slowdown": ratio(list(zip(inside_s, alone_s, strict=True))),
        "slowdown_limit": 20.0,  # 0.17 s alone, 3.4 to 6.8 s inside
        "bare_slowdown": ratio(list(zip(bare_s, bare_alone_s, strict=True))),
    }


async def noticed(folder: str, divisor: int) -> Figures:
    """P10: 200 requests in line, all fetching; from the last byte of a request's own fetch until it may run."""
    requests, pages = 200 // divisor, 2
    async with open_rig(f"file://{folder}", page_bytes=PAGE_BYTES, pages=requests * pages) as rig:
        prompts = [rig.prompt(number, pages) for number in range(requests)]
        for number, prompt in enumerate(prompts):
            await rig.store(prompt, f"write-{number}")
        await rig.clear()
        delays_s: list[float] = []

        async def request(number: int) -> None:
            prompt = rig.prompt(number, pages)
            async with rig.cache.acquire(prompt) as lease:
                now_s = perf_counter()
                assert lease.account.storage == pages * PAGE_TOKENS, lease.account
                delays_s.append(now_s - rig.backend.last_byte_of(prompt.page_hashes(PAGE_TOKENS, pages)))
                if lease.loading is not None:
                    await lease.loading.verdict()

        await asyncio.gather(*map(request, range(requests)))
        await rig.clear()
        await rig.backend.forget()
    return {"delay_ms": spread(delays_s, scale=1e3), "delay_ms_limit": 2400.0}


async def behind_a_large_one(folder: str, divisor: int) -> Figures:
    """P11: a fetch of 4 pages, alone, and behind one of 8 batches from a store that takes 50 ms for each, 4 at a time."""
    large_pages, small_pages, batch_s = LARGE_BATCHES * batch_pages(PAGE_BYTES), 4, 0.05
    slow = Slow(MemoryBackend("memory://behind", Workers("unused", 1)), bytes_per_s=_of_batches(batch_s))
    alone_s: list[float] = []
    behind_s: list[float] = []
    async with open_rig(
        "", page_bytes=PAGE_BYTES, pages=large_pages + small_pages, backend=slow, read_concurrency=READERS
    ) as rig:
        large, small = rig.prompt(1, large_pages), rig.prompt(2, small_pages)
        await rig.store(large, "large")
        await rig.store(small, "small")
        for number in range(max(2, 5 // divisor)):
            await rig.clear()
            alone_s.append(await rig.fetch(small, f"alone-{number}"))
            await rig.clear()
            first = asyncio.ensure_future(rig.fetch(large, f"large-{number}"))
            await asyncio.sleep(batch_s / 2)
            behind_s.append(await rig.fetch(small, f"behind-{number}"))
            await first
        await rig.clear()
    return {
        "alone_ms": spread(alone_s, scale=1e3),
        "behind_ms": spread(behind_s, scale=1e3),
        "behind_ms_limit": round((median(alone_s) + batch_s) * 1e3, 3),  # no more than what is under way
        "large_ms": round(LARGE_BATCHES / READERS * batch_s * 1e3, 3),
    }


async def stop_policies(folder: str, divisor: int) -> Figures:
    """P12: 8 batches from a store that takes 0.4 s for each, 4 at a time, while other requests come and go:
    how long each policy waits, and what part it gets.  The timeout is 0.6 s."""
    pages, batch_s = LARGE_BATCHES * batch_pages(PAGE_BYTES), 0.4 / divisor
    store = MemoryBackend("memory://policies", Workers("unused", 1))
    slow = Slow(store)
    figures: dict[str, float | str | Figures] = {}
    for policy in ("best_effort", "wait_complete", "timeout"):
        slow.bytes_per_s = float("inf")
        async with open_rig(
            "",
            page_bytes=PAGE_BYTES,
            pages=pages,
            backend=slow,
            read_concurrency=READERS,
            prefetch_policy=policy,
            prefetch_timeout_base_s=1.5 * batch_s,
            prefetch_timeout_per_ki_token_s=0.0,
        ) as rig:
            await rig.store(rig.prompt(1), "write")
            await rig.clear()
            slow.bytes_per_s = _of_batches(batch_s)
            others = asyncio.ensure_future(_come_and_go(rig))
            begun_s = perf_counter()
            async with rig.cache.acquire(rig.prompt(1)) as lease:
                took_s = perf_counter() - begun_s
                got = lease.account.storage / (pages * PAGE_TOKENS)
            await _stop(others)
            figures[f"{policy}_ms"] = round(took_s * 1e3, 1)
            figures[f"{policy}_part"] = round(got, 3)
            await rig.clear()
    longest_s = StorageConfig(url=None).prefetch_timeout_s(1_000_000)
    assert longest_s is not None
    return figures | {"timeout_at_1m_tokens_s": longest_s, "timeout_at_1m_tokens_s_limit": 257.0}


async def asked_again(folder: str, divisor: int) -> Figures:
    """P13: 24 stored prompts of 60 pages, all asked again at once on an empty cache; the host as large as the device, and twice."""
    prompts, pages = 24 // divisor, 60
    figures: dict[str, float | str | Figures] = {}
    for times in (1, 2):
        async with open_rig(
            f"file://{folder}", page_bytes=PAGE_BYTES, pages=prompts * pages, host_pages=times * prompts * pages
        ) as rig:
            for number in range(prompts):
                await rig.store(rig.prompt(number, pages), f"write-{number}")
            await rig.clear()
            found, reasons = await _ask_all(rig, prompts, pages)
            whole = sum(tokens == pages * PAGE_TOKENS for tokens in found)
            figures[f"host_x{times}_hit_rate"] = round(sum(found) / (prompts * pages * PAGE_TOKENS), 3)
            figures[f"host_x{times}_whole_prompts"] = whole
            figures[f"host_x{times}_reasons"] = ", ".join(sorted(reasons)) or "none"
            await rig.clear()
    return figures | {"hit_rate_floor": 0.469, "prompts": prompts}


# -- parts ------------------------------------------------------------------------------------------------------------------


def _of_batches(batch_s: float) -> float:
    """Bytes a second, of which a batch takes so long."""
    return batch_pages(PAGE_BYTES) * PAGE_BYTES / batch_s


async def _ask_all(rig: Rig, prompts: int, pages: int) -> tuple[list[int], Counter[str]]:
    """-> cached tokens of each request, and why others were not."""
    found: list[int] = []
    reasons: Counter[str] = Counter()

    async def ask(number: int) -> None:
        async with rig.cache.acquire(rig.prompt(number, pages)) as lease:
            account = lease.account
            found.append(account.device + account.host + account.storage)
            reasons.update({reason: tokens for reason, tokens in account.reasons.items() if tokens > 1})
            if lease.loading is not None:
                await lease.loading.verdict()

    await asyncio.gather(*map(ask, range(prompts)))
    return found, reasons


def _turns(seconds: float = 0.25) -> float:
    """How much pure Python this thread gets done."""
    turns, until_s = 0, perf_counter() + seconds
    while perf_counter() < until_s:
        for _ in range(500):
            turns += 1
    return float(turns)


def _loss(turns: list[float], alone: list[float]) -> float:
    return round((1 - ratio(list(zip(turns, alone, strict=True)))) * 100, 1)


async def _keep_fetching(rig: Rig) -> None:
    number = 0
    while True:
        number += 1
        await rig.fetch(rig.prompt(1), f"read-{number}")
        await rig.clear()


async def _come_and_go(rig: Rig) -> None:
    """Short requests for what nobody has stored: best effort looks at its fetches when something else has ended."""
    number = 1000
    while True:
        number += 1
        async with rig.cache.acquire(rig.prompt(number, 1), rid=f"other-{number}"):
            await asyncio.sleep(0.01)


async def _stop(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


@contextmanager
def _forward_passes() -> Iterator[None]:
    """A thread that multiplies matrices, as a model does."""
    ended = threading.Event()

    def compute() -> None:
        left = torch.rand(256, 256)
        while not ended.is_set():
            torch.tanh(left @ left)

    thread = threading.Thread(target=compute, daemon=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        torch.set_num_threads(threads)
