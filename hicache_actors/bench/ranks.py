"""What agreement between ranks costs: real processes on this machine, gloo and TCP side by side."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Final, get_args

import anyio.to_thread

from hicache_actors.bench.figures import spread
from hicache_actors.cache.api import HiCache
from hicache_actors.memory.kv import KVTensors
from hicache_actors.ranks import Pending, Round, RoundVector, StepDriver
from hicache_actors.ranks.group import TransportKind
from hicache_actors.ranks.link import RankLink
from hicache_actors.testing.processes import crew, free_port, group_of
from hicache_actors.testing.small import SHAPE, prompt, small_config

LIMIT_S: Final = 600.0
STEP_S: Final = 0.01
IDLE_S: Final = 10.0
STEPS: Final = 400
SIZES: Final = (2, 4)
JOBS: Final = (1, 200)


def run(options: argparse.Namespace, *, quiet: bool = True) -> dict[str, Any]:
    """Nested by transport and number of ranks; ``alone``: one rank, which has nobody to agree with."""
    figures: dict[str, Any] = {"alone": {}} | {kind: {} for kind in get_args(TransportKind)}
    part = 8 if options.quick else 1
    for size in SIZES:
        with crew(size) as ranks:
            if not figures["alone"]:
                (figures["alone"],) = ranks.run(measure_alone, part, size=1, limit_s=LIMIT_S)
            for kind in get_args(TransportKind):
                if not quiet:
                    print(f"  {size} ranks over {kind} ...", file=sys.stderr, flush=True)
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
        engine = _Engine(cache, STEPS // part)
        figures: dict[str, Any] = {
            "bare_round_us": await anyio.to_thread.run_sync(bare_rounds, link, 2 * STEPS // part)
        }
        for jobs in JOBS:
            figures[f"jobs_{jobs}"] = await anyio.to_thread.run_sync(engine.with_jobs, jobs, _sleep)
        if size == SIZES[0]:
            times = await anyio.to_thread.run_sync(engine.with_jobs, 1, _matmul())
            figures["matmul"] = {name: times[name] for name in ("begin_step_wait_us", "begin_step_us")}
        figures["idle_cpu_percent"] = await anyio.to_thread.run_sync(engine.idle, IDLE_S / part)
    return figures


async def measure_alone(rank: int, pipe: Connection, part: int) -> dict[str, Any]:
    """The same steps where there is nothing to wait for: what is left is the work, on cold caches."""
    async with HiCache.open(small_config(), KVTensors.make(SHAPE, 16), driver="step") as cache:
        times = await anyio.to_thread.run_sync(_Engine(cache, STEPS // part).with_jobs, 1, _sleep)
    return {name: times[name] for name in ("begin_step_us", "end_step_us")}


def bare_rounds(link: RankLink, rounds: int) -> dict[str, float]:
    vector = [0] * len(RoundVector())
    times_s = []
    for _ in range(rounds):
        begun_s = time.perf_counter()
        link.sync.reduce(vector, 30.0)
        times_s.append(time.perf_counter() - begun_s)
    return spread(times_s, scale=1e6)


class _Timed:
    """A round under way that keeps how long somebody has waited for it."""

    def __init__(self, pending: Pending, waits_s: list[float]) -> None:
        self._pending, self._waits_s = pending, waits_s

    def result(self, timeout_s: float) -> Sequence[int]:
        begun_s = time.perf_counter()
        vector = self._pending.result(timeout_s)
        self._waits_s.append(time.perf_counter() - begun_s)
        return vector


class _Engine:
    """An engine thread whose steps do next to nothing."""

    def __init__(self, cache: HiCache, steps: int) -> None:
        self._cache, self._steps = cache, steps
        self._names = 0
        driver = cache.driver
        assert isinstance(driver, StepDriver)
        self._issue, driver._exchange = driver._exchange, self._exchange
        self._timing = False  # of the round under way: the wait for it; else the whole of `begin_step`, undisturbed
        self._waits_s: list[float] = []

    def with_jobs(self, jobs: int, step: Callable[[], object]) -> dict[str, Any]:
        """Drains that wait for holds are open all the time, so every step has its round."""
        holds = [self._hold() for _ in range(jobs)]
        before = self._collectives
        begins_s, ends_s = list[float](), list[float]()
        self._waits_s.clear()
        for _ in range(self._steps):
            begun_s = time.perf_counter()
            self._cache.begin_step()
            took_s = time.perf_counter() - begun_s
            if not self._timing:
                begins_s.append(took_s)
            self._timing = not self._timing
            self._touch()
            begun_s = time.perf_counter()
            self._cache.end_step()
            ends_s.append(time.perf_counter() - begun_s)
            step()
        collectives = self._collectives - before
        assert self._cache.core.usage().jobs == {"drain.limbo": jobs}
        for hold in holds:
            hold.set_result(None)
        while self._cache.needs_step:
            self._cache.begin_step()
            self._cache.end_step()
        return {
            "collectives_per_step": collectives / self._steps,
            "begin_step_wait_us": spread(self._waits_s, scale=1e6),
            "begin_step_us": spread(begins_s, scale=1e6),
            "end_step_us": spread(ends_s, scale=1e6),
        }

    def idle(self, idle_s: float) -> float:
        """Percent of a core that this process uses while all ranks rest in our channel."""
        used_s, begun_s = time.process_time(), time.perf_counter()
        self._cache.wait_intake(idle_s)
        return round((time.process_time() - used_s) / (time.perf_counter() - begun_s) * 100, 3)

    @property
    def _collectives(self) -> int:
        link = self._cache._parts.link
        return 0 if link is None else link.sync.collectives

    def _exchange(self, sent: Round) -> Pending:
        pending = self._issue(sent)
        return _Timed(pending, self._waits_s) if self._timing else pending

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
