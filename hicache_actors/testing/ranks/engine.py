"""The engine of one simulated rank: the same calls on every rank, two steps in flight, every byte checked.

What it does next follows from the shared seed and from what the cache answers, both of which are replicated; never from what is
local: when a copy ended here, what the store of this rank holds, how long this rank's forward passes take.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, Literal, TypeAlias

import anyio

from hicache_actors.cache.api import HiCache
from hicache_actors.cache.handles import Lease, Load, Prefetch
from hicache_actors.core.words import Shortfall
from hicache_actors.errors import TransferError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.testing.small import PAGE_SIZE
from hicache_actors.testing.toy_model import ToyModel, WrongBytes
from hicache_actors.transfer.completions import Completion

MAX_LIVE: Final = 5
FAMILIES: Final = 4
_FORK_PAGES: Final = 3

Mode: TypeAlias = Literal["serve", "wind down", "reset"]
State: TypeAlias = Literal["waiting", "fetching", "running", "ended"]


class _Pass:
    """A forward pass on this rank's device: later passes run after it, its event fires at its end, however it ended."""

    def __init__(self) -> None:
        self.computed = Completion()
        self.error: Exception | None = None
        self.ended = asyncio.Event()


class _Request:
    def __init__(self, rid: str, prompt: Prompt, decodes: int, *, fetch: bool) -> None:
        self.rid, self.prompt, self.decodes, self.fetch = rid, prompt, decodes, fetch
        self.state: State = "waiting"
        self.prefetch: Prefetch | None = None
        self.lease: Lease | None = None
        self.load: Load | None = None
        self.passes: list[tuple[int, _Pass]] = []  #: with the step that launched it
        self.uncommitted: _Pass | None = None
        self.patience_steps = 0


class ScriptedEngine:
    """``begin``: opens a step of the cache, once its round has come.  ``local``: what may differ from rank to rank."""

    def __init__(
        self, cache: HiCache, model: ToyModel, seed: int, local: random.Random, begin: Callable[[], Awaitable[object]]
    ) -> None:
        self.cache, self.model = cache, model
        self.steps = 0
        self.stats: Counter[str] = Counter()
        self.live: list[_Request] = []
        self.trace: list[tuple[object, ...]] = []  #: of each step: what its calls were answered
        self._random, self._local = random.Random(f"script {seed}"), local
        self._begin = begin
        self._made = 0
        self._launched: list[tuple[_Request, _Pass, int, int]] = []
        self._stream = anyio.Lock()
        self._passes: dict[int, list[_Pass]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        return not self.live and not self.cache.needs_step

    async def step(self, mode: Mode = "serve") -> None:
        """One engine step.  Raises `WrongBytes` if a pass whose load was good has read anything wrong."""
        for ended in self._passes.pop(self.steps - 1, ()):  # two passes may be under way
            await ended.ended.wait()
        await self._begin()
        self.steps += 1
        self.trace.append(())
        try:
            self._decide(mode)
        finally:
            self.cache.end_step()
        for launched in self._launched:
            task = asyncio.get_running_loop().create_task(self._forward(*launched))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._launched = []
        await anyio.sleep(self._local.expovariate(1 / 0.03))

    async def close(self) -> None:
        """Wait for the passes under way."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _note(self, *facts: object) -> None:
        self.trace[-1] += facts

    # -- decisions: replicated -----------------------------------------------------------------------------------------

    def _decide(self, mode: Mode) -> None:
        for request in self.live:
            self._commit(request)
        draw = self._random
        if mode == "serve":
            for _ in range(draw.randrange(3)):
                if len(self.live) < MAX_LIVE:
                    self._admit()
        if mode == "reset" or (mode == "serve" and draw.random() < 0.01):
            self.cache.driver.decide(lambda core: core.reset())
            self.stats["reset"] += 1
        for request in list(self.live):
            if request.state in ("waiting", "fetching"):
                self._schedule(request, mode != "serve")
            elif request.state == "running":
                self._continue(request)
            if request.state == "ended":
                self.live.remove(request)

    def _admit(self) -> None:
        draw = self._random
        self._made += 1
        family, pages, branch = draw.randrange(FAMILIES), draw.randrange(1, 7), draw.randrange(2)
        fork = _FORK_PAGES * PAGE_SIZE
        ids = [1000 * family + at + (500 if branch and at >= fork else 0) for at in range(pages * PAGE_SIZE + 1)]
        request = _Request(f"r{self._made}", Prompt(ids), draw.randrange(3), fetch=draw.random() < 0.7)
        request.patience_steps = draw.choice((4, 40, 400))
        self.live.append(request)

    def _schedule(self, request: _Request, wind_down: bool) -> None:
        request.patience_steps -= 1
        if wind_down and request.prefetch is None:
            request.state = "ended"
            return
        if request.fetch and request.prefetch is None:
            deadline_s = self._random.choice((None, None, None, 0.05))
            request.prefetch = self.cache.prefetch(request.prompt, request.rid, deadline_s=deadline_s)
            request.state = "fetching"
            self._note("prefetch", request.rid)
        if request.prefetch is not None and not request.prefetch.settled:
            if request.patience_steps <= 0:
                request.prefetch.stop()
                self.stats["stopped"] += 1
                if self._random.random() < 0.5:  # the client has gone
                    request.state = "ended"
            return
        self._start(request)

    def _start(self, request: _Request) -> None:
        lease = self.cache.lease(request.prompt, request.rid)
        load = lease.load()
        self._note(request.rid, lease.usable_tokens, isinstance(load, Shortfall))
        room = lease.allocate(len(request.prompt) - lease.usable_tokens)
        if isinstance(room, Shortfall):  # nobody waits for room while holding pages
            lease.release()
            self._note(room.reason, room.missing_pages)
            self.stats["shortfall"] += 1
            if request.patience_steps <= 0:
                request.state = "ended"
            return
        request.lease, request.load = lease, None if isinstance(load, Shortfall) else load
        request.state = "running"
        account = lease.account
        for tier in ("device", "host", "storage", "computed"):
            self.stats[tier] += getattr(account, tier)
        self._note(tuple(lease.pages))
        self._launch(request, lease.usable_tokens, len(request.prompt))

    def _launch(self, request: _Request, start: int, end: int) -> None:
        launched = _Pass()
        request.passes.append((self.steps, launched))
        request.uncommitted = launched
        self._passes.setdefault(self.steps, []).append(launched)
        self._launched.append((request, launched, start, end))

    def _commit(self, request: _Request) -> None:
        if request.lease is not None and request.uncommitted is not None:
            committed = request.lease.commit(len(request.prompt), after=request.uncommitted.computed)
            self._note("commit", request.rid, committed.failed)
            request.uncommitted = None

    def _continue(self, request: _Request) -> None:
        assert request.lease is not None
        if self._random.random() < 0.04:
            self.stats["aborted"] += 1
            self._finish(request, None)
            return
        last_step, last = request.passes[-1]
        verdict = None if request.load is None else request.load.result()
        if last_step > self.steps - 2 or (request.load is not None and verdict is None):
            return
        failed = None if verdict is None else verdict.failed
        self._note("verdict", request.rid, failed)
        if failed not in (None, "twin_failed"):  # no token may come of it; below a twin's failure it stands
            self.stats[str(failed)] += 1
            self._finish(request, last)
            return
        for _, ended in request.passes:
            if ended.error is not None:
                raise ended.error
        self.stats["tokens"] += 1
        if request.decodes and not isinstance(request.lease.allocate(1), Shortfall):
            request.decodes -= 1
            request.prompt.append([900_000 + self._made])
            self._launch(request, len(request.prompt) - 1, len(request.prompt))
            return
        self._finish(request, last)

    def _finish(self, request: _Request, last: _Pass | None) -> None:
        assert request.lease is not None
        request.lease.release(after=None if last is None else last.computed)
        request.state = "ended"

    # -- bytes: local --------------------------------------------------------------------------------------------------

    async def _forward(self, request: _Request, launched: _Pass, start: int, end: int) -> None:
        assert request.lease is not None
        pages, prompt, load = tuple(request.lease.pages), Prompt(request.prompt.tolist()), request.load
        async with self._stream:  # first come, first served: one stream
            try:
                if load is not None:
                    for layer in range(self.model.kv.shape.layers):
                        await load.ready(layer)
                await anyio.sleep(self._local.expovariate(1 / 0.01))
                self.model.forward(prompt, pages, start, end)
            except (TransferError, WrongBytes) as error:
                launched.error = error  # it counts if the verdict on the load is good
            finally:
                launched.computed.finish()
                launched.ended.set()
