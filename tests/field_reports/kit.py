"""What the tests of field reports have in common: a small cache whose invariants are checked, and the usual beginnings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from hicache_actors import Shortfall
from hicache_actors.backends.backend import Backend
from hicache_actors.cache.handles import Lease
from hicache_actors.keys.prompt import Prompt
from hicache_actors.keys.scope import NO_SCOPE, Scope
from hicache_actors.testing.engines import Answer
from hicache_actors.testing.small import PAGE_SIZE, Small, open_small, prompt, tokens

PAGE = PAGE_SIZE
PATTERN = 77.0  #: no row of the toy model looks like a page full of it

LOOPS = pytest.mark.parametrize("anyio_backend", ["virtual:1", "virtual:2", "asyncio"], indirect=True)
VIRTUAL = pytest.mark.parametrize("anyio_backend", ["virtual:1", "virtual:2"], indirect=True)


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[Small]:
    """`open_small`, with every invariant of Core checked before and after its pools are emptied."""
    async with open_small(**settings) as small:
        yield small
        small.cache.core.check()
    small.cache.core.check()


async def store(backend: Backend, *prompts: Prompt) -> list[Answer]:
    """An earlier cache, large enough, has left ``prompts`` in ``backend`` -> what was answered to them."""
    pages = sum(len(each) // PAGE + 1 for each in prompts)
    async with opened(device_pages=pages, host_pages=pages, backend=backend) as small:
        answers = [await compute(small, each) for each in prompts]
        assert await small.cache.drain(60.0) == 0
    return answers


async def compute(small: Small, asked: Prompt) -> Answer:
    """Serve ``asked`` without asking the storage."""
    return await small.engine.answer(asked, deadline_s=0.0)


async def from_storage(small: Small, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> int:
    """Ask again: all whole pages that the host has not come from storage, with the same answers -> tokens that did."""
    tokens = 0
    for asked, first in zip(prompts, answers, strict=True):
        await small.cache.drain(60.0)
        kept = small.cache.match(asked).host
        again = await small.engine.answer(asked)
        assert (again.account.storage, again.account.computed) == (len(asked) - 1 - kept, 1)
        assert again.tokens == first.tokens
        tokens += again.account.storage
    return tokens


def branch(kept_pages: int, pages: int, *, family: int = 0, other: int = 500, scope: Scope = NO_SCOPE) -> Prompt:
    """A prompt of ``pages`` whose first ``kept_pages`` are those of ``family``."""
    return Prompt(tokens(kept_pages, family=family, extra=0) + tokens(pages - kept_pages, family=other, extra=1), scope)


def take(small: Small, pages: int, rid: str = "taker") -> Lease:
    """A lease on nothing but ``pages`` device pages, whoever must be evicted for them."""
    lease = small.cache.lease(prompt(0), rid)
    granted = lease.allocate(pages * PAGE)
    assert not isinstance(granted, Shortfall), granted
    assert len(granted) == pages
    return lease


async def clear_device(small: Small) -> None:
    """Evict everything from the device that no lease holds; the host is left alone."""
    await ended(small, "drain", "load", "write_back")
    device = small.cache.core.usage().device
    take(small, device.free_pages + device.evictable_pages).release()


def jobs(small: Small) -> Mapping[str, int]:
    """Open jobs by "kind.phase"."""
    return small.cache.core.usage().jobs


async def ended(small: Small, *kinds: str) -> None:
    """Wait until no job of these kinds is open."""
    await until(lambda: not any(job.startswith(kinds) for job in jobs(small)))


def scribble(small: Small, lease: Lease) -> None:
    """Write the pattern into all pages of ``lease``."""
    for layer in range(small.cache.kv.shape.layers):
        for tensor in small.cache.kv.layer(layer):
            tensor[list(lease.pages)] = PATTERN


def scribbled(small: Small, lease: Lease) -> bool:
    """Whether the pattern is unbroken."""
    layers = range(small.cache.kv.shape.layers)
    return all(bool((tensor[list(lease.pages)] == PATTERN).all()) for n in layers for tensor in small.cache.kv.layer(n))


def on_device_and_host(small: Small, asked: Prompt) -> tuple[int, int]:
    """Pages of ``asked`` that are ready on the device, and pages that are on some tier."""
    match = small.cache.match(asked)
    return match.device // PAGE, match.host // PAGE


def pins(small: Small) -> int:
    return len(small.cache.core.state.pins.all)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until ``condition`` holds."""
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await anyio.sleep(0.0005)


async def quiet(small: Small) -> None:
    """Wait until no job is open; retries may still be due."""
    with anyio.fail_after(60):
        await small.cache.pipelines.idle()
