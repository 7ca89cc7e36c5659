"""The backend: one request an object, many at once."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.s3.options import S3Options
from hicache_actors.backends.urls import FIELD
from hicache_actors.errors import BackendError, ConfigError, MissingExtraError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

T = TypeVar("T")

_AHEAD: Final = 32  #: keys of one `exists` that are asked for before the first answer is looked at
_PROBE: Final = "hicache-probe"
_DELETED_AT_ONCE: Final = 1000  #: the most that S3 takes


class S3Backend(Backend):
    """An object of the cache is an object of the bucket, under ``prefix + key``; S3 shows whole objects only.

    Requests end by themselves, after ``timeout_s`` and ``retries``.  A body is received by obstore and copied once, into the host
    slot, when it is whole and has the length that was asked for.
    """

    scope = "cluster"

    def __init__(self, url: str, workers: Workers | None = None) -> None:
        self.url = url
        self.options = S3Options.parse(url)
        self._s3, self._errors = _obstore()
        self._store: Any = None
        self._turns = asyncio.Semaphore(self.options.requests)
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        """Looks into the bucket: one that does not exist would look like a store in which nothing is ever found."""
        options, bucket = self.options, self.options.bucket
        given = {"endpoint": bucket.endpoint, "region": bucket.region}
        timeouts = {"timeout": f"{options.timeout_s}s", "connect_timeout": f"{options.connect_timeout_s}s"}
        plain = {"allow_http": True} if (bucket.endpoint or "").startswith("http://") else {}
        try:
            self._store = self._s3.store.S3Store(
                bucket.name,
                **{name: value for name, value in given.items() if value is not None},
                virtual_hosted_style_request=not bucket.path_style,
                client_options={**timeouts, **plain},
                retry_config={
                    "max_retries": options.retries,
                    "retry_timeout": timedelta(seconds=options.timeout_s * (options.retries + 1)),
                },
            )
            await self._length(_PROBE)  # who may not read is told apart by this, not by a listing
            async for _ in self._store.list(prefix=bucket.prefix, chunk_size=1):
                break
        except (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError) as error:
            raise ConfigError(
                FIELD, self.url, "the store does not let us in",
                fix="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to keys that may list, read and write this bucket",
            ) from error  # fmt: skip
        except (self._errors.BaseError, OSError) as error:
            if "<Code>NoSuchBucket<" in str(error):
                raise ConfigError(
                    FIELD, self.url, "there is no such bucket",
                    fix=f"make the bucket {bucket.name!r}, or correct its name",
                ) from error  # fmt: skip
            raise BackendError(f"{self.url}: {_first_line(error)}{_keys_missing()}") from error

    async def exists(self, keys: Sequence[str]) -> int:
        async def there(key: str) -> bool:
            return await self._length(key) is not None

        leading = 0
        for start in range(0, len(keys), _AHEAD):
            answers = await self._each("exists", keys[start : start + _AHEAD], there)
            here = next((at for at, answer in enumerate(answers) if answer is not True), len(answers))
            leading += here
            if here < len(answers):
                break
        return leading

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        async def read(at: int) -> bool:
            try:
                answer = await self._s3.get_async(self._store, self._key(keys[at]))
            except FileNotFoundError:
                return False
            if answer.meta["size"] != len(buffers[at]):
                return False
            body = memoryview(await answer.bytes_async())
            if len(body) != len(buffers[at]):
                return False
            buffers[at][:] = body
            return True

        answers = await self._each("read", range(len(keys)), read)
        found = [answer is True for answer in answers]
        self._counts["hits"] += sum(found)
        self._counts["misses"] += len(found) - sum(found)
        return found

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        async def write(at: int) -> Stored:
            if await self._length(keys[at]) == len(buffers[at]):
                return Stored.PRESENT
            await self._s3.put_async(self._store, self._key(keys[at]), buffers[at], use_multipart=False)
            return Stored.WRITTEN

        answers = await self._each("write", range(len(keys)), write)
        outcomes = [Stored.FAILED if isinstance(answer, BackendError) else answer for answer in answers]
        self._counts["written"] += outcomes.count(Stored.WRITTEN)
        self._counts["present"] += outcomes.count(Stored.PRESENT)
        return outcomes

    async def delete(self, keys: Sequence[str]) -> int:
        lengths = await self._each("delete", keys, self._length)
        there = [key for key, length in zip(keys, lengths, strict=True) if isinstance(length, int)]
        for start in range(0, len(there), _DELETED_AT_ONCE):
            part = [self._key(key) for key in there[start : start + _DELETED_AT_ONCE]]
            with self._translated("delete"):
                await self._s3.delete_async(self._store, part)
        return len(there)

    async def quarantine(self, key: str) -> bool:
        removed = await self.delete([key]) > 0
        self._counts["quarantined"] += removed
        return removed

    async def lengths(self, keys: Sequence[str]) -> list[int | None]:
        answers = await self._each("lengths", keys, self._length)
        return [answer if isinstance(answer, int) else None for answer in answers]

    async def clear(self) -> None:
        batch = [self._key(key) async for key in self.keys()]
        for start in range(0, len(batch), _DELETED_AT_ONCE):
            with self._translated("clear"):
                await self._s3.delete_async(self._store, batch[start : start + _DELETED_AT_ONCE])

    async def keys(self) -> AsyncIterator[str]:
        prefix = self.options.bucket.prefix
        with self._translated("list"):
            async for batch in self._store.list(prefix=prefix):
                for found in batch:
                    key = found["path"].removeprefix(prefix)
                    if "/" not in key:  # deeper ones are of other stores
                        yield key

    def stats(self) -> Mapping[str, int | float | str]:
        return dict(self._counts)

    async def _length(self, key: str) -> int | None:
        try:
            head = await self._s3.head_async(self._store, self._key(key))
        except FileNotFoundError:
            return None
        length: int = head["size"]
        return length

    async def _each(
        self, what: str, items: Sequence[T], request: Callable[[T], Awaitable[Any]]
    ) -> list[Any | BackendError]:
        """A request for each -> its answers, or errors; raises if all have failed."""

        async def one(item: T) -> Any:
            async with self._turns:
                try:
                    with self._translated(what):
                        return await request(item)
                except BackendError as error:
                    return error

        answers = await asyncio.gather(*map(one, items))
        failed = [answer for answer in answers if isinstance(answer, BackendError)]
        self._counts["failed"] += len(failed)
        if failed and len(failed) == len(answers):
            raise failed[0]
        return list(answers)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except (self._errors.BaseError, OSError) as error:
            raise BackendError(f"{self.url}: {what}: {_first_line(error)}") from error

    def _key(self, key: str) -> str:
        return self.options.bucket.prefix + key


def _obstore() -> tuple[Any, Any]:
    try:
        import_module("obstore.store")
        return import_module("obstore"), import_module("obstore.exceptions")
    except ModuleNotFoundError as error:
        raise MissingExtraError("obstore", "s3") from error


def _keys_missing() -> str:
    """Without keys of its own obstore asks the machine's role for some, at an address that says nothing to people."""
    missing = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if not os.environ.get(name)]
    return f" ({' and '.join(missing)} not set: keys were asked of this machine's role)" if missing else ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
