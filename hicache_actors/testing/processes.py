"""Ranks as real processes: spawned once, given functions to run together, bounded by a kill.

Starting a process costs seconds (it imports torch), so one crew serves many tests; a test that kills a rank has a crew of its own.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from hicache_actors.ranks.group import RankGroup, TransportKind

LIMIT_S = 60.0  #: what a crew is asked for takes no longer, unless somebody says so


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def group_of(rank: int, size: int, port: int, transport: TransportKind = "gloo", **settings: Any) -> RankGroup:
    """Tensor ranks on this host, unless ``settings`` say otherwise.

    Patient with its peers: on a busy machine a healthy rank may be late by seconds.  A test of lateness sets ``deadline_s``.
    """
    settings.setdefault("deadline_s", 20.0)
    axes = {"tp_rank": rank, "tp_size": size} if "tp_size" not in settings else {}
    return RankGroup(
        **axes,
        address=f"127.0.0.1:{port}",
        hosts_store=transport == "gloo",
        transport=transport,
        **settings,
    )


class Answer(msgspec.Struct):
    """What became of one rank: the value its function returned, or the text of what it raised."""

    value: Any = None
    error: str | None = None


class Crew:
    """Processes that run the same function at the same time, each with its rank and a pipe to here."""

    def __init__(self, processes: list[BaseProcess], pipes: list[Connection]) -> None:
        self.processes, self.pipes = processes, pipes

    def run(self, body: Callable[..., Any], *args: Any, size: int | None = None, limit_s: float = LIMIT_S) -> list[Any]:
        """-> what ``body(rank, pipe, *args)`` returned, per rank.  Fails the test if one raises or takes too long."""
        running = range(len(self.processes) if size is None else size)
        self.start(body, *args, size=size)
        answers = [self.answer(rank, limit_s) for rank in running]
        broken = [answer.error for answer in answers if answer.error is not None]
        assert not broken, "\n".join(broken)
        return [answer.value for answer in answers]

    def start(self, body: Callable[..., Any], *args: Any, size: int | None = None) -> None:
        """`run` without waiting.

        ``body`` is a function of a module's top level; the module is loaded from its file, so it may be one of tests.  Coroutines
        are awaited.
        """
        for pipe in self.pipes[:size]:
            pipe.send((body.__code__.co_filename, body.__name__, args))

    def hear(self, rank: int, limit_s: float = LIMIT_S) -> Any:
        """The next message of a rank.  Fails the test if none comes in time."""
        if not self.pipes[rank].poll(limit_s):
            raise AssertionError(f"rank {rank} says nothing for {limit_s:g} s")
        return self.pipes[rank].recv()

    def answer(self, rank: int, limit_s: float = LIMIT_S) -> Answer:
        """The end of what a rank runs; what it says before is dropped."""
        until_s = time.monotonic() + limit_s
        while True:
            heard = self.hear(rank, max(0.0, until_s - time.monotonic()))
            if isinstance(heard, Answer):
                return heard

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)


@contextmanager
def crew(size: int) -> Iterator[Crew]:
    """``size`` new processes; whatever is left of them at the end is killed."""
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process: BaseProcess = context.Process(target=_serve, args=(rank, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        yield Crew(processes, pipes)
    finally:
        for pipe in pipes:
            pipe.close()  # those that are idle end by themselves
        for process in processes:
            process.kill()
            process.join()


def _serve(rank: int, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    try:
        while True:
            file, name, args = pipe.recv()
            pipe.send(_run(rank, pipe, file, name, args))
    except (EOFError, OSError):
        return


def _run(rank: int, pipe: Connection, file: str, name: str, args: tuple[Any, ...]) -> Answer:
    try:
        value = _load(file, name)(rank, pipe, *args)
        if asyncio.iscoroutine(value):
            value = asyncio.run(value)
        return Answer(value)
    except BaseException:
        return Answer(error=f"rank {rank}: {traceback.format_exc()}")


def _load(file: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("rank_bodies", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    body: Callable[..., Any] = getattr(module, name)
    return body
