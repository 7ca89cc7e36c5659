"""Requests as an engine with streams makes them, in virtual time: commit and release go ahead of the forward pass they are about.

`live` takes a prompt through all tiers; whatever is done to the cache meanwhile, each answer must be that of `reference_token`.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import anyio

from hicache_actors.cache.api import HiCache
from hicache_actors.cache.handles import Lease
from hicache_actors.core.words import Shortfall
from hicache_actors.errors import StoppedError, TransferError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.memory.kv import KVTensors
from hicache_actors.testing.loop import run_virtual
from hicache_actors.testing.small import Small, prompt
from hicache_actors.testing.toy_model import ToyModel
from hicache_actors.transfer.completions import Completion

T = TypeVar("T")

FETCH_S: Final = 1.0  #: deadline of a request's fetch
PATIENCE_S: Final = 30.0  #: of a request, for room and for loads that end well
_AFTER_THE_LAST_S: Final = 1e-6
_last_end_s: weakref.WeakKeyDictionary[HiCache, float] = weakref.WeakKeyDictionary()
LIFE_PAGES: Final = 6  #: of the prompt of `live`


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
    kv = KVTensors.make(small.cache.kv.shape, len(asked) // small.cache.page_size + 1)
    return ToyModel(kv).forward(asked, range(kv.pages), 0, len(asked))


class Forward:
    """A forward pass on the engine's own device: it ends, and its event fires, some time after it was launched."""

    def __init__(self, small: Small, asked: Prompt, lease: Lease) -> None:
        self.computed = Completion()
        self._token: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._small, self._asked = small, asked
        self._pages, self._start = tuple(lease.pages), lease.usable_tokens

    def launch(self, after_s: float) -> None:
        """Passes end in the order of their launches, as on one stream: a later one may read what an earlier one writes."""
        loop = asyncio.get_running_loop()
        end_s = max(loop.time() + after_s, _last_end_s.get(self._small.cache, 0.0) + _AFTER_THE_LAST_S)
        _last_end_s[self._small.cache] = end_s
        loop.call_at(end_s, self._run)

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
    asked, tokens = prompt(LIFE_PAGES), []
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


async def stopped_or(coroutine: Awaitable[T]) -> T | None:
    """A request that the closing of its cache may end."""
    try:
        return await coroutine
    except StoppedError:
        return None
