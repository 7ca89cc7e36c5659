"""Every stage of every pipeline, and how a trap is set into it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hicache_actors.config import HostLayout
from hicache_actors.pipelines.job import OpenJob
from hicache_actors.testing.small import Small
from hicache_actors.transfer.completions import fired

from .kit import Trap, TrappedBackend, inside

Deed = Callable[[], Awaitable[None]]
Setter = Callable[[Small, Trap, pytest.MonkeyPatch], None]


def _verb(verb: Any) -> Setter:
    def set_trap(small: Small, trap: Trap, patch: pytest.MonkeyPatch) -> None:
        backend = small.store.backend
        assert isinstance(backend, TrappedBackend)
        backend.traps[verb] = trap.stand

    return set_trap


def _worker(work: str, pipeline: str | None = None) -> Setter:
    """Before a piece of work, asked for by any task or by a pipeline's own, goes to a thread."""

    def set_trap(small: Small, trap: Trap, patch: pytest.MonkeyPatch) -> None:
        workers = small.cache._parts.workers
        run = workers.run

        async def trapped(fn: Callable[..., object], *args: Any) -> object:
            if fn.__name__ == work and (pipeline is None or inside(pipeline)):
                await trap.stand()
            return await run(fn, *args)

        patch.setattr(workers, "run", trapped)
        patch.setattr("hicache_actors.pipelines.movers.HASH_HERE_TOKENS", -1)

    return set_trap


def _grant(small: Small, trap: Trap, patch: pytest.MonkeyPatch) -> None:
    granted = OpenJob.granted

    async def trapped(job: OpenJob) -> bytes | None:
        await trap.stand()
        return await granted(job)

    patch.setattr(OpenJob, "granted", trapped)


def _copy(stream: str, after: int) -> Setter:
    """When the copy number ``after`` of a stream is about to begin; the stream waits until the deed is done."""

    def set_trap(small: Small, trap: Trap, patch: pytest.MonkeyPatch) -> None:
        gate = small.device.gate(stream)
        if after:
            gate.allow(after)
        reached = gate.reached

        async def guard() -> None:
            await fired(reached)
            try:
                await trap.stand()
            except Exception as error:
                small.device.fail_next(error, stream=stream)
            gate.open()

        guards.append(asyncio.ensure_future(guard()))

    guards: list[asyncio.Task[None]] = []  # a task that nobody holds may be collected
    return set_trap


def _submit(stream: str, after: int) -> Setter:
    """When a pipeline submits copy number ``after``: what the deed raises is raised there."""

    def set_trap(small: Small, trap: Trap, patch: pytest.MonkeyPatch) -> None:
        target = small.device.stream(stream)
        submit, seen = target.submit, 0

        def trapped(work: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == after + 1:
                coroutine = trap.stand()
                try:
                    coroutine.send(None)
                except StopIteration:
                    pass
                else:
                    raise AssertionError("nobody can wait in a handler")
            return submit(work)

        patch.setattr(target, "submit", trapped)

    return set_trap


STAGES: dict[str, Setter] = {
    "prefetch: hash": _worker("_hash", "prefetch"),
    "prefetch: query": _verb("exists"),
    "prefetch: grant": _grant,
    "prefetch: read": _verb("read"),
    "prefetch: verify": _worker("verify_many"),
    "load: first layer": _copy("load", 0),
    "load: second layer": _copy("load", 1),
    "load: last layer": _copy("load", 2),
    "write_back: copy": _copy("write_back", 0),
    "backup: hash": _worker("_hash", "backup"),
    "backup: seal": _worker("seal_many"),
    "backup: store": _verb("write"),
    "staged prefetch: read": _verb("read"),
    "staged prefetch: verify": _worker("verify_many"),
    "staged prefetch: scatter": _worker("scatter"),
    "staged backup: gather": _worker("gather"),
    "staged backup: seal": _worker("seal_many"),
    "staged backup: store": _verb("write"),
}
"""Stages that wait, where a deed may take time."""

SUBMITS: dict[str, Setter] = {
    "load: submit first": _submit("load", 0),
    "load: submit second": _submit("load", 1),
    "write_back: submit": _submit("write_back", 0),
}
"""Stages that run in one go."""


def layout_of(stage: str) -> HostLayout:
    """Under which the stage is there."""
    return "layer_first" if stage.startswith("staged") else "page_first_direct"


INSIDE = {"prefetch: grant"}
"""Stages that wait for Core alone: an exception there is a bug of the cache."""
