"""The backend."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.lmcache.protocol import LMCacheConnection
from hicache_actors.backends.sockets import Pool
from hicache_actors.backends.urls import FIELD, number, parse_url
from hicache_actors.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

T = TypeVar("T")

_TOMBSTONE: Final = memoryview(b"\0")


class LMCacheBackend(Backend):
    """``lmcache://HOST:PORT?connections=4&timeout_s=5``: for fleets that run such a server already.

    The server has no way to delete and none to list, evicts nothing (its memory grows), and asks for no password.  What is deleted
    or found bad is overwritten with one byte, which every reader takes for a miss; `exists` of this process misses it as well.
    """

    scope = "cluster"

    def __init__(self, url: str, workers: Workers | None = None) -> None:
        parts = parse_url(url, "lmcache", path=False, options=("connections", "timeout_s"))
        address = re.fullmatch(r"([^:]+):(\d{1,5})", parts.host)
        if address is None:
            raise ConfigError(FIELD, url, f"{parts.host!r} is no address", allowed="lmcache://HOST:PORT")
        self.url = url
        host, port = address[1], int(address[2])
        timeout_s = number(url, "timeout_s", parts.options.get("timeout_s", "5"), least=0.001)
        size = int(number(url, "connections", parts.options.get("connections", "4"), whole=True, least=1))
        self._pool = Pool(lambda: LMCacheConnection(host, port, timeout_s), size)
        self._bad: set[str] = set()  # there, but of no use: to be overwritten
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        try:
            async with self._pool.connection() as connection:
                await connection.exists("hicache-probe")
        except OSError as error:
            raise BackendError(f"{self.url}: cannot be reached: {_text(error)}") from error

    async def close(self) -> None:
        self._pool.close()

    async def exists(self, keys: Sequence[str]) -> int:
        async def leading(connection: LMCacheConnection, batch: range) -> list[int]:
            for at in batch:
                if keys[at] in self._bad or not await connection.exists(keys[at]):
                    return [at]
            return [len(keys)]

        [here] = await self._run("exists", range(len(keys)), leading) if keys else [0]
        return here

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        async def part(connection: LMCacheConnection, batch: range) -> list[int]:
            return [await connection.get_into(keys[at], buffers[at]) for at in batch]

        answers = await self._shared("read", len(keys), part)
        found = [length == len(buffer) for length, buffer in zip(answers, buffers, strict=True)]
        for key, length, here in zip(keys, answers, found, strict=True):
            if isinstance(length, int) and length >= 0 and not here:
                self._bad.add(key)
        self._counts["hits"] += sum(found)
        self._counts["misses"] += len(found) - sum(found)
        return found

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        async def part(connection: LMCacheConnection, batch: range) -> list[Stored]:
            outcomes, unconfirmed = [], None
            for at in batch:
                if keys[at] not in self._bad and await connection.exists(keys[at]):
                    outcomes.append(Stored.PRESENT)
                    continue
                await connection.put(keys[at], buffers[at])
                outcomes.append(Stored.WRITTEN)
                unconfirmed = keys[at]
            if unconfirmed is not None and not await connection.exists(unconfirmed):
                raise ConnectionError("the server has not kept what was put")
            return outcomes

        answers = await self._shared("write", len(keys), part)
        outcomes = [Stored.FAILED if isinstance(answer, BackendError) else answer for answer in answers]
        self._bad.difference_update(key for key, done in zip(keys, outcomes, strict=True) if done is Stored.WRITTEN)
        self._counts["written"] += outcomes.count(Stored.WRITTEN)
        self._counts["present"] += outcomes.count(Stored.PRESENT)
        return outcomes

    async def delete(self, keys: Sequence[str]) -> int:
        async def bury(connection: LMCacheConnection, batch: range) -> list[str]:
            there = [keys[at] for at in batch if keys[at] not in self._bad and await connection.exists(keys[at])]
            for key in there:
                await connection.put(key, _TOMBSTONE)
            if there:
                await connection.exists(there[-1])
            return there

        buried = await self._run("delete", range(len(keys)), bury)
        self._bad.update(buried)
        return len(set(buried))

    async def lengths(self, keys: Sequence[str]) -> list[int | None]:
        async def part(connection: LMCacheConnection, batch: range) -> list[int]:
            return [await connection.get_into(keys[at], memoryview(b"")) for at in batch]

        answers = await self._run("lengths", range(len(keys)), part)
        return [None if length < 0 or key in self._bad else length for key, length in zip(keys, answers, strict=True)]

    async def quarantine(self, key: str) -> bool:
        removed = await self.delete([key]) > 0
        self._counts["quarantined"] += removed
        return removed

    def stats(self) -> Mapping[str, int | float | str]:
        return {"connections": len(self._pool), "reconnects": self._pool.reconnects, **self._counts}

    async def _shared(
        self, what: str, n: int, part: Callable[[LMCacheConnection, range], Awaitable[list[T]]]
    ) -> list[T | BackendError]:
        """``part`` of ``n`` objects on several connections -> its answers, in order; raises if all have failed."""

        async def run(cut: range) -> list[T | BackendError]:
            try:
                answers: list[T] = await self._run(what, cut, part)
                return [*answers]
            except BackendError as error:
                return [error] * len(cut)

        answers = [one for part in await asyncio.gather(*map(run, self._pool.shares(n))) for one in part]
        failed = [answer for answer in answers if isinstance(answer, BackendError)]
        self._counts["failed"] += len(failed)
        if failed and len(failed) == len(answers):
            raise failed[0]
        return answers

    async def _run(
        self, what: str, batch: range, part: Callable[[LMCacheConnection, range], Awaitable[list[T]]]
    ) -> list[T]:
        if not batch:
            return []
        try:
            return await self._pool.run(lambda connection: part(connection, batch))
        except OSError as error:
            raise BackendError(f"{self.url}: {what}: {_text(error)}") from error


def _text(error: BaseException) -> str:
    return "no progress in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
