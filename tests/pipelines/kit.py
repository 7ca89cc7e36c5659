"""A prompt's life through all tiers in virtual time, traps that stand in one stage of it, and a witness of all jobs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

import anyio
import pytest

from hicache_actors import Shortfall, StoppedError
from hicache_actors.api import HiCache
from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Wrapper
from hicache_actors.config import Deadlines
from hicache_actors.core.words import Effect, Forget, Phase, Settled, StartDrain
from hicache_actors.errors import TransferError
from hicache_actors.handles import Lease
from hicache_actors.keys.prompt import Prompt
from hicache_actors.testing.loop import run_virtual
from hicache_actors.testing.small import Small, prompt
from hicache_actors.testing.toy_model import ToyModel
from hicache_actors.transfer.completions import Completion

T = TypeVar("T")
Verb = Literal["exists", "read", "write"]

DEADLINES = Deadlines(load_s=0.5, write_back_s=0.5, backup_s=0.5)
FETCH_S = 1.0  #: deadline of a request's fetch
TOO_LONG_S = 3.0  #: longer than any deadline here
ASKED_PAGES = 6
PATIENCE_S = 30.0  #: of a request, for room and for loads that end well


# -- runs ------------------------------------------------------------------------------------------------------------------


def run_checked(main: Callable[[], Coroutine[Any, Any, T]], seed: int | None) -> T:
    """Run in virtual time; what nobody caught (a callback that raised, a task's error that nobody asked for) fails the test."""
    unhandled: list[dict[str, Any]] = []

    async def checked() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        return await main()

    result = run_virtual(checked, seed)
    assert not unhandled, unhandled
    return result


def other_tasks() -> list[str]:
    """Tasks that still run, besides the caller's."""
    return sorted(task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()})


def reference_token(small: Small, asked: Prompt) -> int:
    """What a model without any cache says."""
    kv = type(small.cache.kv).make(small.cache.kv.shape, len(asked) // small.cache.page_size + 1)
    return ToyModel(kv).forward(asked, range(kv.pages), 0, len(asked))


# -- requests --------------------------------------------------------------------------------------------------------------


class Forward:
    """A forward pass on the engine's own device: it ends, and its event fires, some time after it was launched."""

    def __init__(self, small: Small, asked: Prompt, lease: Lease) -> None:
        self.computed = Completion()
        self._token: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._small, self._asked = small, asked
        self._pages, self._start = tuple(lease.pages), lease.usable_tokens

    def launch(self, after_s: float) -> None:
        asyncio.get_running_loop().call_later(after_s, self._run)

    def _run(self) -> None:
        try:
            token = self._small.model.forward(self._asked, self._pages, self._start, len(self._asked))
        except BaseException as error:
            self._token.set_exception(error)
        else:
            self._token.set_result(token)
        self.computed.finish()

    async def token(self) -> int:
        return await asyncio.shield(self._token)


async def request(small: Small, asked: Prompt, *, forward_s: float = 0.002) -> int:
    """Serve one prompt as an engine with streams does: commit and release right after the launch, with its event."""
    with anyio.fail_after(PATIENCE_S):
        while True:
            async with small.cache.acquire(asked, deadline_s=FETCH_S) as lease:
                refused = lease.allocate(len(asked) - lease.usable_tokens)
                if isinstance(refused, Shortfall):
                    assert refused.freeing_pages, f"no room, and nothing is about to give any: {refused}"
                elif await _loaded(small, lease):
                    forward = Forward(small, asked, lease)
                    forward.launch(forward_s)
                    lease.commit(len(asked), after=forward.computed)
                    lease.release(after=forward.computed)
                    token = await forward.token()
                    load = lease.loading
                    if load is None or (await load.verdict()).failed is None:
                        return token
            await anyio.sleep(0.01)


async def _loaded(small: Small, lease: Lease) -> bool:
    if lease.loading is not None:
        try:
            for layer in range(small.cache.kv.shape.layers):
                await lease.loading.ready(layer)
        except TransferError:
            return False
    return True


async def live(small: Small, *, forward_s: float = 0.002) -> list[int]:
    """Compute a prompt, find it on the host, then in the storage, then on the device -> what was answered each time."""
    asked, tokens = prompt(ASKED_PAGES), []
    tokens.append(await request(small, asked, forward_s=forward_s))
    await small.cache.drain(10.0)
    await request(small, prompt(small.cache.kv.pages - 1, family=900))  # nothing else is left on the device
    await small.cache.drain(10.0)
    tokens.append(await request(small, asked))
    await small.cache.drain(10.0)
    await small.cache.reset()
    tokens.append(await request(small, asked))
    tokens.append(await request(small, asked))
    return tokens


# -- traps -----------------------------------------------------------------------------------------------------------------


class Trap:
    """Stands in one stage and does its deed to the first who comes by.  ``sprung`` tells that somebody did."""

    def __init__(self, deed: Callable[[], Awaitable[None]]) -> None:
        self._deed = deed
        self.sprung = False

    async def stand(self) -> None:
        """In the stage's own task: it goes on when the deed is done, or with what the deed raises."""
        if not self.sprung:
            self.sprung = True
            await self._deed()

    def poke(self) -> None:
        """Beside the stage, which goes on meanwhile."""
        if not self.sprung:
            self.sprung = True
            asyncio.ensure_future(self._deed()).add_done_callback(asyncio.Task.result)


class TrappedBackend(Wrapper):
    """Stops at a trap before a verb reaches the store."""

    def __init__(self, inner: Backend | None = None) -> None:
        super().__init__(inner or MemoryBackend())
        self.traps: dict[Verb, Callable[[], Awaitable[None]]] = {}

    async def exists(self, keys: Sequence[str]) -> int:
        await self._pass("exists")
        return await super().exists(keys)

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        await self._pass("read")
        return await super().read(keys, buffers)

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        await self._pass("write")
        return await super().write(keys, buffers)

    async def _pass(self, verb: Verb) -> None:
        if verb in self.traps:
            await self.traps[verb]()


def inside(pipeline: str) -> bool:
    """Whether the running task is one of this pipeline's."""
    task = asyncio.current_task()
    return task is not None and task.get_name().startswith(f"hicache.{pipeline}-")


# -- the witness -----------------------------------------------------------------------------------------------------------


class Witness:
    """Counts, from the outside, what each job was told and told: both ends must come once, whatever happens."""

    def __init__(self, cache: HiCache, patch: pytest.MonkeyPatch) -> None:
        self.started: dict[int, str] = {}
        self.settled: Counter[int] = Counter()
        self.forgotten: Counter[int] = Counter()
        self.answers: Counter[tuple[int, Phase]] = Counter()
        self.released: Counter[int] = Counter()
        board, driver = cache.driver.board, cache.driver
        done, released, execute = board.done, board.released, cache.pipelines.execute

        def count_done(job: int, phase: Phase, value: int) -> None:
            self.answers[job, phase] += 1
            done(job, phase, value)

        def count_released(job: int) -> None:
            self.released[job] += 1
            released(job)

        def count_effects(effects: list[Effect]) -> None:
            for effect in effects:
                self._see(effect)
            execute(effects)

        patch.setattr(board, "done", count_done)
        patch.setattr(board, "released", count_released)
        patch.setattr(driver, "_execute", count_effects)

    def _see(self, effect: Effect) -> None:
        kind = type(effect).__name__
        if kind.startswith("Start"):
            self.started[effect.job] = kind  # type: ignore[union-attr]
        elif isinstance(effect, Settled):
            self.settled[effect.job] += 1
        elif isinstance(effect, Forget):
            self.forgotten[effect.job] += 1

    def check(self) -> None:
        """All jobs have ended: RESULT and RELEASED came once, on both sides."""
        assert self.started
        for job, kind in self.started.items():
            drain = kind == StartDrain.__name__
            assert self.forgotten[job] == self.released[job] == 1, f"{kind} {job}: RELEASED {self.released[job]} times"
            assert self.settled[job] == (not drain), f"{kind} {job} settled {self.settled[job]} times"
            assert self.answers[job, Phase.RUN] == (not drain), f"{kind} {job}: {self.answers}"
            assert self.answers[job, Phase.HIT] <= 1
        assert set(self.forgotten) == set(self.started)

    def check_closed(self) -> None:
        """The cache was closed meanwhile: nothing came twice, and whoever answered let go of the slots as well."""
        assert self.started
        for counts in (self.settled, self.forgotten, self.answers, self.released):
            assert all(times == 1 for times in counts.values()), counts
        running = {job for job, kind in self.started.items() if kind != StartDrain.__name__}
        assert {job for job, phase in self.answers if phase is Phase.RUN} == running
        assert set(self.released) >= running


async def stopped_or(coroutine: Awaitable[T]) -> T | None:
    """A request that the closing of its cache may end."""
    try:
        return await coroutine
    except StoppedError:
        return None
