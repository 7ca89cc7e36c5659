"""A whole cache on a real server that is frozen, killed and started again while requests run."""

from __future__ import annotations

import itertools
from pathlib import Path

import anyio
import pytest

from hicache_actors.testing.servers import valkey
from hicache_actors.testing.small import Small, open_small, prompt

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

_FAMILIES = 8
_PAGES = 8  # of each prompt: all of them are twice as much as device and host hold
_CLIENTS = 3
_ENDS_S = 120.0


class Clients:
    """They ask for the same prompts again and again; an answer that differs from the first one is wrong bytes."""

    def __init__(self, small: Small) -> None:
        self._small = small
        self._numbers = itertools.count()
        self._first: dict[int, tuple[int, ...]] = {}

    async def ask(self, requests: int) -> list[int]:
        """So many requests, some at once -> tokens that each had from storage."""
        had: list[int] = []
        families = [next(self._numbers) % _FAMILIES for _ in range(requests)]

        async def serve() -> None:
            while families:
                family = families.pop()
                answer = await self._small.engine.answer(prompt(_PAGES, family=family), deadline_s=2.0)
                assert answer.tokens == self._first.setdefault(family, answer.tokens)
                had.append(answer.account.storage)

        async with anyio.create_task_group() as group:
            for _ in range(_CLIENTS):
                group.start_soon(serve)
        assert len(had) == requests, "each request was served"
        return had

    async def until_storage_serves(self) -> None:
        with anyio.fail_after(_ENDS_S):
            while not any(await self.ask(_FAMILIES)):
                await self._small.cache.drain(1.0)


async def test_a_server_that_freezes_dies_and_comes_back_costs_prefixes_and_nothing_else(tmp_path: Path) -> None:
    with valkey(tmp_path) as server:
        async with open_small(
            url=f"{server.url}?timeout_s=0.5",
            device_pages=30,
            host_pages=24,
            breaker_max_delay_s=1.0,
            query_timeout_s=1.0,
        ) as small:
            clients = Clients(small)
            await clients.until_storage_serves()
            for harm, repair in ((server.freeze, server.thaw), (server.kill, server.start)):
                async with anyio.create_task_group() as group:
                    group.start_soon(clients.ask, 2 * _FAMILIES)
                    await anyio.sleep(0.01)
                    harm()  # in the midst of them
                assert not any(await clients.ask(2 * _FAMILIES)), "nobody is there to serve"
                storage = small.cache.snapshot().storage
                assert storage is not None
                assert sum(storage.errors.values()) > 0
                repair()
                await clients.until_storage_serves()
            # what is left open, pinned or in limbo fails the end of this block
