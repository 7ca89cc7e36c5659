"""The backend: batches shared out over a few connections, each pipelining its part."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.redis.connection import Connection, Reply, ServerError, command, command_with_value
from hicache_actors.backends.redis.options import RedisOptions
from hicache_actors.backends.sockets import Pool
from hicache_actors.backends.urls import FIELD
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.masking import masked

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

T = TypeVar("T")

_ASKED_AT_ONCE: Final = 256  #: keys of one `exists` before the first answer is looked at
_SCANNED_AT_ONCE: Final = 512
_FULL: Final = frozenset({"OOM"})
_REFUSED: Final = frozenset({"NOAUTH", "WRONGPASS", "NOPERM", "ERR"})


class RedisBackend(Backend):
    """Objects are strings under ``prefix + key``, each set by one command, so a reader finds none or a whole one.

    A value is received by the kernel straight into the host slot.  Every command names one key, and no key has braces, so objects
    spread evenly behind a proxy; a server in cluster mode itself is refused at open, for it would answer with redirections.  TLS
    is not spoken: use a local proxy (stunnel, ghostunnel).

    A server that is full (``noeviction``) answers FAILED object by object and is counted; one that is slow ends a call after
    ``timeout_s`` without progress.  The connection is closed then, so that nothing writes into a slot that has been given back.
    """

    def __init__(self, url: str, workers: Workers | None = None) -> None:
        self.options = RedisOptions.parse(url)
        self.scope = "cluster" if self.options.host not in ("", "localhost", "127.0.0.1", "::1") else "host"
        self.url = masked(url)
        self._pool = Pool(lambda: Connection(self.options), self.options.connections)
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        try:
            async with self._pool.connection() as connection:
                cluster = await connection.call("INFO", "cluster")
        except ServerError as error:
            raise self._refusal(error) from error
        except (OSError, TimeoutError) as error:
            raise BackendError(f"{self.url}: cannot be reached: {_text(error)}") from error
        if isinstance(cluster, bytes) and b"cluster_enabled:1" in cluster:
            raise ConfigError(
                FIELD, self.url, "the server is in cluster mode", allowed="a single server, or a proxy in front of a cluster",
                fix="use the address of a proxy that speaks for the cluster",
            )  # fmt: skip

    async def close(self) -> None:
        self._pool.close()

    async def exists(self, keys: Sequence[str]) -> int:
        leading = 0
        for start in range(0, len(keys), _ASKED_AT_ONCE):
            part = keys[start : start + _ASKED_AT_ONCE]
            there = await self._ask([("EXISTS", self._key(key)) for key in part])
            here = next((at for at, answer in enumerate(there) if answer != 1), len(part))
            leading += here
            if here < len(part):
                break
        return leading

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        async def part(connection: Connection, batch: range) -> list[bool | ServerError]:
            await connection.send(b"".join(command("GET", self._key(keys[at])) for at in batch))
            return [await connection.value_into(buffers[at]) for at in batch]

        answers = await self._shared("read", len(keys), part)
        found = [answer is True for answer in answers]
        self._counts["hits"] += sum(found)
        self._counts["misses"] += len(found) - sum(found)
        self._raise_if_all_failed("read", answers)
        return found

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        lengths = await self._ask([("STRLEN", self._key(key)) for key in keys])
        expire = ["EX", str(self.options.expire_s)] if self.options.expire_s else []
        missing = [at for at, length in enumerate(lengths) if length != len(buffers[at])]

        async def part(connection: Connection, batch: range) -> list[Reply]:
            replies = []
            for at in (missing[i] for i in batch):
                head, tail = command_with_value(buffers[at], ["SET", self._key(keys[at])], expire)
                await connection.send(head, buffers[at], tail)
                replies.append(await connection.reply())
            return replies

        outcomes = [Stored.PRESENT] * len(keys)
        answers = await self._shared("write", len(missing), part)
        for at, answer in zip(missing, answers, strict=True):
            outcomes[at] = Stored.WRITTEN if answer == b"OK" else Stored.FAILED
            self._counts["full"] += isinstance(answer, ServerError) and answer.code in _FULL
        self._counts["written"] += outcomes.count(Stored.WRITTEN)
        self._counts["present"] += outcomes.count(Stored.PRESENT)
        if not any(isinstance(answer, ServerError) and answer.code in _FULL for answer in answers):
            self._raise_if_all_failed("write", answers)
        return outcomes

    async def delete(self, keys: Sequence[str]) -> int:
        answers = await self._ask([("UNLINK", self._key(key)) for key in keys])
        return sum(answer for answer in answers if isinstance(answer, int))

    async def quarantine(self, key: str) -> bool:
        removed = await self.delete([key]) > 0
        self._counts["quarantined"] += removed
        return removed

    async def lengths(self, keys: Sequence[str]) -> list[int | None]:
        answers = await self._ask([("STRLEN", self._key(key)) for key in keys])
        return [answer if isinstance(answer, int) and answer else None for answer in answers]

    async def clear(self) -> None:
        async for batch in self._scan():
            await self.delete(batch)

    async def keys(self) -> AsyncIterator[str]:
        seen: set[str] = set()  # a scan may name a key twice
        async for batch in self._scan():
            for key in batch:
                if key not in seen:
                    seen.add(key)
                    yield key

    def stats(self) -> Mapping[str, int | float | str]:
        return {"connections": len(self._pool), "reconnects": self._pool.reconnects, **self._counts}

    async def _scan(self) -> AsyncIterator[list[str]]:
        cursor, prefix = b"0", self.options.prefix
        while True:
            words = ("SCAN", cursor.decode(), "MATCH", f"{prefix}*", "COUNT", str(_SCANNED_AT_ONCE))
            [answer] = await self._ask([words])
            if not isinstance(answer, list) or len(answer) != 2 or not isinstance(answer[1], list):
                raise BackendError(f"{self.url}: SCAN answered {str(answer)[:80]}")
            yield [key.decode()[len(prefix) :] for key in answer[1] if isinstance(key, bytes)]
            if not isinstance(answer[0], bytes) or answer[0] == b"0":
                return
            cursor = answer[0]

    async def _ask(self, commands: Sequence[tuple[str, ...]]) -> list[Reply]:
        """Small commands, pipelined over one connection; an error among the answers is raised."""

        async def part(connection: Connection, batch: range) -> list[Reply]:
            await connection.send(b"".join(command(*commands[at]) for at in batch))
            return [await connection.reply() for _ in batch]

        answers = await self._on_one(commands[0][0] if commands else "", range(len(commands)), part)
        self._raise_if_all_failed(commands[0][0] if commands else "", answers)
        return answers

    async def _shared(
        self, what: str, n: int, part: Callable[[Connection, range], Awaitable[list[T]]]
    ) -> list[T | BackendError]:
        """``part`` of ``n`` objects on several connections -> its answers, in order; a part that failed answers its error."""

        async def run(cut: range) -> list[T | BackendError]:
            try:
                answers: list[T] = await self._on_one(what, cut, part)
                return [*answers]
            except BackendError as error:
                return [error] * len(cut)

        return [answer for answers in await asyncio.gather(*map(run, self._pool.shares(n))) for answer in answers]

    async def _on_one(
        self, what: str, batch: range, part: Callable[[Connection, range], Awaitable[list[T]]]
    ) -> list[T]:
        if not batch:
            return []
        try:
            return await self._pool.run(lambda connection: part(connection, batch))
        except (OSError, ServerError) as error:  # a TimeoutError is an OSError
            raise self._failed(what, error) from error

    def _key(self, key: str) -> str:
        return self.options.prefix + key

    def _raise_if_all_failed(self, what: str, answers: Sequence[object]) -> None:
        failed = [answer for answer in answers if isinstance(answer, ServerError | BackendError)]
        self._counts["failed"] += len(failed)
        if failed and len(failed) == len(answers):
            raise failed[0] if isinstance(failed[0], BackendError) else self._failed(what, failed[0])

    def _failed(self, what: str, error: BaseException) -> BackendError:
        return BackendError(f"{self.url}: {what}: {_text(error)}")

    def _refusal(self, error: ServerError) -> ConfigError | BackendError:
        if error.code not in _REFUSED:
            return self._failed("open", error)  # such as LOADING: it comes up
        return ConfigError(
            FIELD,
            self.url,
            f"the server refuses: {error}",
            fix="correct the user, the password or the database in the URL",
        )


def _text(error: BaseException) -> str:
    return "no progress in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
