"""What agreement between ranks costs: real processes on this machine, gloo and TCP side by side."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Final, get_args

import anyio.to_thread

from hicache_actors.bench.figures import spread
from hicache_actors.cache.api import HiCache
from hicache_actors.memory.kv import KVTensors
from hicache_actors.ranks import RoundVector
from hicache_actors.ranks.group import TransportKind
from hicache_actors.ranks.link import RankLink
from hicache_actors.testing.processes import crew, free_port, group_of
from hicache_actors.testing.small import SHAPE, prompt, small_config

LIMIT_S: Final = 600.0
STEP_S: Final = 0.01
SIZES: Final = (2, 4)
JOBS: Final = (1, 200)


def run(options: argparse.Namespace, *, quiet: bool = True) -> dict[str, Any]:
    """Nested by transport and number of ranks."""
    figures: dict[str, Any] = {kind: {} for kind in get_args(TransportKind)}
    for size in SIZES:
        with crew(size) as ranks:
            for kind in get_args(TransportKind):
                if not quiet:
                    print(f"  {size} ranks over {kind} ...", file=sys.stderr, flush=True)
                part = 8 if options.quick else 1
                of_ranks = ranks.run(measure, size, free_port(), kind, part, limit_s=LIMIT_S)
                worst = max(each.pop("idle_cpu_percent") for each in of_ranks)
                figures[kind][f"{size}_ranks"] = of_ranks[0] | {"idle_cpu_percent": worst}
    return figures


async def measure(rank: int, pipe: Connection, size: int, port: int, kind: TransportKind, part: int) -> dict[str, Any]:
    """All figures of one rank; runs in a process of its own.  ``part``: this fraction of the work."""
    group = group_of(rank, size, port, kind, deadline_s=30.0)
    kv = KVTensors.make(SHAPE, 16)
    async with HiCache.open(small_config(), kv, driver="step", ranks=group) as cache:
        link = cache._parts.link
        assert link is not None
        engine = _Engine(cache, link, 400 // part)
        figures: dict[str, Any] = {"bare_round_us": await anyio.to_thread.run_sync(engine.bare_rounds, 800 // part)}
        for jobs in JOBS:
            figures[f"jobs_{jobs}"] = await anyio.to_thread.run_sync(engine.with_jobs, jobs, _sleep)
        if size == SIZES[0]:
            waits = await anyio.to_thread.run_sync(engine.with_jobs, 1, _matmul())
            figures["matmul_begin_step_wait_us"] = waits["begin_step_wait_us"]
        figures["idle_cpu_percent"] = await anyio.to_thread.run_sync(engine.idle, 8.0 / part)
    return figures


class _Engine:
    """An engine thread whose steps do next to nothing."""

    def __init__(self, cache: HiCache, link: RankLink, steps: int) -> None:
        self._cache, self._link, self._steps = cache, link, steps
        self._names = 0

    def bare_rounds(self, rounds: int) -> dict[str, float]:
        vector = [0] * len(RoundVector())
        times_s = []
        for _ in range(rounds):
            begun_s = time.perf_counter()
            self._link.sync.reduce(vector, 30.0)
            times_s.append(time.perf_counter() - begun_s)
        return spread(times_s, scale=1e6)

    def with_jobs(self, jobs: int, step: Callable[[], object]) -> dict[str, Any]:
        """Drains that wait for holds are open all the time, so every step has its round."""
        holds = [self._hold() for _ in range(jobs)]
        before, waits_s = self._link.sync.collectives, []
        for _ in range(self._steps):
            begun_s = time.perf_counter()
            self._cache.begin_step()
            waits_s.append(time.perf_counter() - begun_s)
            self._touch()
            self._cache.end_step()
            step()
        collectives = self._link.sync.collectives - before
        assert self._cache.core.usage().jobs == {"drain.limbo": jobs}
        for hold in holds:
            hold.set_result(None)
        while self._cache.needs_step:
            self._cache.begin_step()
            self._cache.end_step()
        return {
            "collectives_per_step": collectives / self._steps,
            "begin_step_wait_us": spread(waits_s, scale=1e6),
        }

    def idle(self, idle_s: float) -> float:
        """Percent of a core that this process uses while all ranks rest in our channel."""
        used_s, begun_s = time.process_time(), time.perf_counter()
        self._cache.wait_intake(idle_s)
        return round((time.process_time() - used_s) / (time.perf_counter() - begun_s) * 100, 3)

    def _hold(self) -> Future[None]:
        hold: Future[None] = Future()
        self._cache.begin_step()
        lease = self._cache.lease(prompt(1), f"held-{self._names}")
        self._names += 1
        lease.hold(hold)
        lease.release()
        self._cache.end_step()
        return hold

    def _touch(self) -> None:
        """A step that decides something is not an empty one, which would pace itself."""
        self._cache.lease(prompt(1), "passing").release()


def _sleep() -> None:
    threading.Event().wait(STEP_S)


def _matmul() -> Callable[[], object]:
    """About a step's time of matrix products, which hold no interpreter lock."""
    import torch

    matrix = torch.rand(256, 256)
    begun_s = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    times = max(1, round(STEP_S / ((time.perf_counter() - begun_s) / 20)))

    def step() -> None:
        for _ in range(times):
            matrix @ matrix

    return step
