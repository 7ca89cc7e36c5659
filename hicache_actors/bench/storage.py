"""The storage tier at full speed: write-through and prefetch of a prompt's pages, beside plain loops that move the same bytes.

Writes are timed from the moment that the host has all pages to the moment that `stored` answers; reads from the call of
`prefetch` to the moment that its waiter runs: hashes, keys, lookups, checksums, decisions and messages are all inside.  The plain
loop does none of that: it makes the same system calls in a thread pool of the same size, a batch a hop.

All of them run once a round, in changing order, each after a sync, so that nobody pays for another's dirty pages; a ratio is the
median over rounds.  Reads find their files in the page cache, but for `read_cold_gb_s`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final

from anyio.lowlevel import checkpoint

from hicache_actors.bench.figures import Figures, quantile, ratio, spread
from hicache_actors.bench.fio import FioLoop, fio_program
from hicache_actors.bench.plain import BackendLoop, ExecutorLoop, Mover, Pages, PeerLoop, load_peer
from hicache_actors.bench.progress import Progress
from hicache_actors.bench.rig import Rig, open_rig, sample_lag
from hicache_actors.masking import masked
from hicache_actors.memory.layout import SlotLayout

SIZES: Final = {"pages_1m": (1 << 20, 128), "pages_64k": (64 << 10, 512)}
RATIOS: Final = {
    "plain loop": "ratio",
    "batched loop": "batched_ratio",
    "peer": "peer_ratio",
    "fio": "fio_ratio",
    "file": "file_ratio",
}
READERS: Final = 4
WRITERS: Final = 2
DELAY_PAGES: Final = 4
DELAY_ROUNDS: Final = 200


def run(options: Namespace, *, quiet: bool = False) -> Figures:
    """Raises `ConfigError` for a wrong URL, `BenchError` if the store does not take the pages."""
    divisor = 8 if options.quick else 1
    sizes = {name: (page_bytes, pages // divisor) for name, (page_bytes, pages) in SIZES.items()}
    rounds, delay_rounds = min(options.rounds, 3 if options.quick else options.rounds), DELAY_ROUNDS // divisor
    if options.url is not None:
        return asyncio.run(measure(options.url, sizes, rounds, delay_rounds, quiet=quiet))
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        return asyncio.run(measure(f"file://{folder}/store", sizes, rounds, delay_rounds, quiet=quiet))


async def measure(
    url: str, sizes: Mapping[str, tuple[int, int]], rounds: int, delay_rounds: int, *, quiet: bool
) -> Figures:
    """``sizes``: name to (bytes of a page, pages)."""
    progress = Progress(len(sizes) * (5 * (rounds + 1) + 1) + 1, quiet=quiet)
    lags_s: list[float] = []
    figures: dict[str, float | str | Figures] = {"url": masked(url)}
    stored: set[str] = set()
    with closing(progress), ExitStack() as folders:
        for name, (page_bytes, pages) in sizes.items():
            async with open_rig(
                _own(url, name), page_bytes=page_bytes, pages=pages, read_concurrency=READERS, write_concurrency=WRITERS
            ) as rig:
                warm = await _size(rig, name, page_bytes, rounds, folders, progress)
                figures[name] = {**warm, **await _cold(rig, name, page_bytes, rounds, progress)}
                await _lag(rig, name, lags_s, progress)
                if _option(rig, "root") is None:
                    await rig.backend.forget()
                stored |= rig.backend.stored
        progress.step("waiter delay")
        async with open_rig(_own(url, "delay"), page_bytes=64 << 10, pages=DELAY_PAGES) as rig:
            figures["waiter_delay_us"] = spread(await _delays_s(rig, delay_rounds), scale=1e6, digits=1)
            rig.backend.stored |= stored
            await rig.backend.forget()
    figures["loop_lag_p99_ms"] = round(quantile(lags_s, 0.99) * 1e3, 3)
    return figures


class Ours:
    """The pipelines of an open cache, as a `Mover`."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    async def write(self, number: int) -> float:
        took_s = await self._rig.store(self._rig.prompt(number), f"write-{number}")
        await self._rig.clear()
        return took_s

    async def read(self, number: int) -> float:
        # A prompt of its own: what the writer has hashed already is hashed again.
        took_s = await self._rig.fetch(self._rig.prompt(number), f"read-{number}")
        await self._rig.clear()
        return took_s


async def _size(rig: Rig, name: str, page_bytes: int, rounds: int, folders: ExitStack, progress: Progress) -> Figures:
    pages = Pages(rig.pages, SlotLayout(rig.cache.kv.shape).object_bytes)
    write_s: dict[str, list[float]] = {}
    read_s: dict[str, list[float]] = {}
    ours_cpu_s: list[float] = []
    async with _movers(rig, pages, page_bytes, folders) as movers:
        labels = list(movers)
        for number in range(rounds + 1):
            for at in range(len(labels)):
                label = labels[(at + number) % len(labels)]
                progress.step(f"{name}: {label}")
                write_took_s, read_took_s, cpu_s = await _pass(movers[label], number)
                if number and label == "ours":
                    ours_cpu_s.append(cpu_s)
                if number:  # the first round warms up
                    write_s.setdefault(label, []).append(write_took_s)
                    read_s.setdefault(label, []).append(read_took_s)
    moved_gb = 2 * rig.pages * page_bytes / 1e9  # written and read
    figures: dict[str, float | str | Figures] = {"core_s_per_gb": round(median(ours_cpu_s) / moved_gb, 3)}
    for direction, times_s in (("write", write_s), ("read", read_s)):
        ours_s = times_s.pop("ours")
        if "fio" in times_s:
            figures[f"fio_{direction}_gb_s"] = round(rig.pages * page_bytes / median(times_s["fio"]) / 1e9, 3)
        figures[f"{direction}_gb_s"] = round(rig.pages * page_bytes / median(ours_s) / 1e9, 3)
        for label, theirs_s in times_s.items():
            # A ratio of speeds is one of times, upside down.
            figures[f"{RATIOS[label]}_{direction}"] = ratio(list(zip(theirs_s, ours_s, strict=True)))
    return figures


@asynccontextmanager
async def _movers(rig: Rig, pages: Pages, page_bytes: int, folders: ExitStack) -> AsyncIterator[dict[str, Mover]]:
    """The pipelines and what they are compared with, by label; ``folders`` gets what is to be removed.

    Files stay until the end of all sizes: a file system that has just lost many files may be slow at making new ones.
    """
    movers: dict[str, Mover] = {"ours": Ours(rig)}
    root = _option(rig, "root")
    if root is None:
        movers["plain loop"] = BackendLoop(rig.backend, pages, readers=READERS, writers=WRITERS)
        async with AsyncExitStack() as opened:
            if _option(rig, "kind") == "slab":
                store = _option(rig, "folder")
                os.makedirs(store, exist_ok=True)
                program = fio_program()
                if program is not None:
                    fio = FioLoop(program, Path(store), pages.count, pages.page_bytes)
                    opened.callback(fio.close)
                    movers["fio"] = fio
                files = folders.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=store))
                beside = open_rig(
                    f"file://{files}", page_bytes=page_bytes, pages=rig.pages, read_concurrency=READERS,
                    write_concurrency=WRITERS,
                )  # fmt: skip
                movers["file"] = Ours(await opened.enter_async_context(beside))
            yield movers
        return
    with ExitStack() as stack:

        def folder() -> str:
            # Inside the store's, so that it is the same disk; the store leaves alone what is not its own.
            return folders.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=root))

        for label, batched in (("plain loop", False), ("batched loop", True)):
            executor_loop = ExecutorLoop(folder(), pages, readers=READERS, writers=WRITERS, batched=batched)
            stack.callback(executor_loop.close)
            movers[label] = executor_loop
        peer = load_peer("file_per_page", folder())
        if peer is not None:
            movers["peer"] = PeerLoop(peer, pages)
        yield movers


def _own(url: str, name: str) -> str:
    """For stores whose slots have one length: each size in a folder of its own."""
    between = {"slab": "/", "mmap": "/", "shm": "-"}.get(url.partition(":")[0])
    place, mark, options = url.partition("?")
    return url if between is None else f"{place}{between}{name}{mark}{options}"


def _option(rig: Rig, name: str) -> Any:
    """An option of the store's backend; None if it has none of that name."""
    return getattr(getattr(rig.backend.inner, "options", None), name, None)


async def _pass(mover: Mover, number: int) -> tuple[float, float, float]:
    """-> seconds of a write, and of a read of the same pages; and processor time of the process for both."""
    cpu_s = 0.0
    times_s: list[float] = []
    for move in (mover.write, mover.read):
        await asyncio.to_thread(os.sync)
        begun_cpu_s = process_time()
        times_s.append(await move(number))
        cpu_s += process_time() - begun_cpu_s
    write_s, read_s = times_s
    return write_s, read_s, cpu_s


async def _cold(rig: Rig, name: str, page_bytes: int, rounds: int, progress: Progress) -> Figures:
    """Reads of a store on this disk when the page cache has nothing of it."""
    folder = _option(rig, "root") or _option(rig, "folder")
    if folder is None or _option(rig, "kind") == "shm":
        return {}
    ours, times_s = Ours(rig), []
    for number in range(rounds):
        progress.step(f"{name}: cold reads")
        await ours.write(0xFE00 | number)
        await asyncio.to_thread(_drop_cache, folder)
        times_s.append(await ours.read(0xFE00 | number))
    return {"read_cold_gb_s": round(rig.pages * page_bytes / median(times_s) / 1e9, 3)}


def _drop_cache(folder: str) -> None:
    os.sync()  # what is not on the disk yet stays
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


async def _lag(rig: Rig, name: str, lags_s: list[float], progress: Progress) -> None:
    """Two more passes, with a sampler on the loop."""
    ours = Ours(rig)
    for number in range(2):
        progress.step(f"{name}: loop lag")
        sampler = asyncio.ensure_future(sample_lag(lags_s))
        await ours.write(0xFF00 | number)
        await ours.read(0xFF00 | number)
        while not lags_s:  # a tiny run may end before the first sample
            await checkpoint()
        sampler.cancel()


async def _delays_s(rig: Rig, rounds: int) -> list[float]:
    prompt = rig.prompt(1)
    await rig.store(prompt, "delay")
    delays_s: list[float] = []
    for number in range(rounds + 1):
        await rig.clear()
        await rig.fetch(prompt, f"delay-{number}")
        delays_s.append(perf_counter() - rig.backend.last_byte_s)
    await rig.clear()
    return delays_s[1:]
