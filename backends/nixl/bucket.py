"""``nixl://BUCKET/PREFIX``: objects of a bucket, put and got through NIXL's OBJ plugin.

::

    <prefix>epoch                          a record: how often this store has been cleared
    <prefix><epoch>/r/<key>                a record: the length of the object, 0 if it has been removed
    <prefix><epoch>/<length>/<key>         its bytes

NIXL can put, get and ask whether something is there: it has no listing, no removal and no length, and a get of more bytes than
there are goes well.  So the length is part of the name, under which nothing of another length is ever put (but nothing at all, of
which a get is an error), and records have one length.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.nixl.agent import Agent, Item, nixl_api
from hicache_actors.backends.nixl.options import bucket_options
from hicache_actors.backends.urls import FIELD
from hicache_actors.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

_REGION: Final = "us-east-1"  #: unless the environment names one
_REACH_S: Final = 3.0
_AHEAD: Final = 64  #: keys of one `exists` that are asked for before the first answer is looked at
_RECORD: Final = struct.Struct("<8sQ")
_MAGIC: Final = b"hicnixl1"
_PROBE: Final = 100


class Names(NamedTuple):
    """Of the objects in the bucket."""

    prefix: str
    epoch: int

    @property
    def of_epoch(self) -> str:
        return f"{self.prefix}epoch"

    def record(self, key: str) -> str:
        return f"{self.prefix}{self.epoch}/r/{key}"

    def data(self, key: str, length: int) -> str:
        return f"{self.prefix}{self.epoch}/{length}/{key}"


class NixlBucket(Backend):
    """S3 shows whole objects only, so what is found under a name with the length in it is whole.

    What is removed leaves an empty object and a record behind.  `clear` begins anew under other names: caches that are open go on
    with the old ones, and the bytes stay until a rule of the bucket removes them.  Keys cannot be listed.

    NIXL tells no error from another, repeats requests for half a minute and more when the store is gone, and cannot be told to give
    up.  So the store's port is tried before each call, and who waits is let go by the tier's deadlines; the thread and the slots of
    such a call stay taken until it has ended.
    """

    scope = "cluster"

    def __init__(self, url: str, workers: Workers) -> None:
        self.url = url
        self.bucket = bucket_options(url)
        nixl_api()  # missing is said before anything is opened
        self._workers = workers
        self._agent: Agent | None = None
        self._names = Names(self.bucket.prefix, 0)
        self._bad: set[str] = set()  # recorded, but not to be had: to be written anew
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        await self._knock()
        await self._workers.run(self._open)

    async def register_memory(self, memory: memoryview) -> None:
        await self._workers.run(self._opened().register, memory)

    async def close(self) -> None:
        self._agent = None

    async def exists(self, keys: Sequence[str]) -> int:
        if keys:
            await self._knock()
        for start in range(0, len(keys), _AHEAD):
            lengths = await self._workers.run(self._lengths, keys[start : start + _AHEAD])
            for at, length in enumerate(lengths, start):
                if not length:
                    return at
        return len(keys)

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        if not keys:
            return []
        await self._knock()
        found = await self._workers.run(self._read, keys, buffers)
        self._counts["hits"] += sum(found)
        self._counts["misses"] += len(found) - sum(found)
        return found

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        if not keys:
            return []
        await self._knock()
        outcomes = await self._workers.run(self._write, keys, buffers)
        self._counts["written"] += outcomes.count(Stored.WRITTEN)
        self._counts["present"] += outcomes.count(Stored.PRESENT)
        self._counts["failed"] += outcomes.count(Stored.FAILED)
        if outcomes.count(Stored.FAILED) == len(outcomes):
            raise BackendError(f"{self.url}: write: the store takes none of {len(keys)} objects")
        return outcomes

    async def delete(self, keys: Sequence[str]) -> int:
        if not keys:
            return 0
        await self._knock()
        return await self._workers.run(self._delete, keys)

    async def quarantine(self, key: str) -> bool:
        removed = await self.delete([key]) > 0
        self._counts["quarantined"] += removed
        return removed

    async def lengths(self, keys: Sequence[str]) -> list[int | None]:
        if not keys:
            return []
        await self._knock()
        return [length or None for length in await self._workers.run(self._lengths, keys)]

    async def clear(self) -> None:
        """Of use to who opens this store afterwards, and to this backend."""
        await self._knock()
        await self._workers.run(self._clear)

    def stats(self) -> Mapping[str, int | float | str]:
        agent = self._agent
        return {"registered_bytes": agent.registered_bytes if agent else 0, **self._counts}

    async def _knock(self) -> None:
        if self.bucket.address is None:
            return
        try:
            with anyio.fail_after(_REACH_S):
                stream = await anyio.connect_tcp(*self.bucket.address)
            await stream.aclose()
        except (OSError, TimeoutError) as error:
            raise BackendError(f"{self.url}: nobody answers at {self.bucket.endpoint}: {error}") from error

    # -- in threads ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        bucket = self.bucket
        endpoint = {"endpoint_override": bucket.endpoint} if bucket.endpoint else {}
        self._agent = Agent(
            "OBJ",
            {
                **endpoint,
                "bucket": bucket.name,
                "region": bucket.region or os.environ.get("AWS_REGION", _REGION),
                "scheme": "http" if (bucket.endpoint or "").startswith("http://") else "https",
                "use_virtual_addressing": "false" if bucket.path_style else "true",
                "req_checksum": "required",
            },
        )
        probe, empty = f"{bucket.prefix}probe", f"{bucket.prefix}empty"
        expected, back = bytes(range(_PROBE)), bytearray(_PROBE)
        if self._put({probe: memoryview(expected), empty: memoryview(b"")}) != [True] * 2:
            raise ConfigError(
                FIELD, self.url, "the bucket takes no object",
                fix=f"make the bucket {bucket.name!r}, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to keys that may "
                "read and write it",
            )  # fmt: skip
        if self._get({probe: memoryview(back)}) != [True] or back != expected:
            raise ConfigError(FIELD, self.url, "the bucket does not give back what it took", fix="allow reading it")
        if self._get({empty: memoryview(back)}) != [False]:
            raise ConfigError(
                FIELD,
                self.url,
                "the store says that it has read bytes of an empty object",
                fix="use s3:// with this store",
            )
        self._names = Names(bucket.prefix, self._records([self._names.of_epoch])[0])

    def _lengths(self, keys: Sequence[str]) -> list[int]:
        """0 for what is not there, has been removed, or is known to be of no use."""
        lengths = self._records([self._names.record(key) for key in keys])
        return [0 if key in self._bad else length for key, length in zip(keys, lengths, strict=True)]

    def _read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        names = self._names
        records = [bytearray(_RECORD.size) for _ in keys]
        moved = self._opened().transfer(
            "READ",
            [
                *self._items([names.record(key) for key in keys], [memoryview(record) for record in records]),
                *self._items([names.data(*at) for at in zip(keys, map(len, buffers), strict=True)], buffers),
            ],
        )
        recorded, whole = moved[: len(keys)], moved[len(keys) :]
        found = []
        for at, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            length = _length_in(records[at]) if recorded[at] else 0
            found.append(whole[at] and length == len(buffer) and key not in self._bad)
        if not any(found):
            self._opened().there([names.record(keys[0])])  # raises if it is the store that has failed
        for key, ok, record, here in zip(keys, recorded, records, found, strict=True):
            if ok and _length_in(record) and not here:
                self._bad.add(key)
        return found

    def _write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        names = self._names
        outcomes = [Stored.PRESENT] * len(keys)
        lengths = self._lengths(keys)
        absent = [at for at, buffer in enumerate(buffers) if lengths[at] != len(buffer)]
        put = self._put({names.data(keys[at], len(buffers[at])): buffers[at] for at in absent})
        done = dict(zip((names.data(keys[at], len(buffers[at])) for at in absent), put, strict=False))
        whole = [at for at in absent if done[names.data(keys[at], len(buffers[at]))]]
        recorded = self._record({keys[at]: len(buffers[at]) for at in whole})
        for at in absent:
            outcomes[at] = Stored.WRITTEN if keys[at] in recorded else Stored.FAILED
        self._bad -= recorded
        return outcomes

    def _delete(self, keys: Sequence[str]) -> int:
        there = {key: length for key, length in zip(keys, self._lengths(keys), strict=True) if length}
        removed = self._record(dict.fromkeys(there, 0))
        self._put({self._names.data(key, there[key]): memoryview(b"") for key in removed})  # its bytes are free again
        if there and not removed:
            raise BackendError(f"{self.url}: delete: the store takes no record")
        return len(removed)

    def _clear(self) -> None:
        names = Names(self.bucket.prefix, self._records([self._names.of_epoch])[0] + 1)
        if self._put({names.of_epoch: _record(names.epoch)}) != [True]:
            raise BackendError(f"{self.url}: clear: the store takes no record")
        self._names = names
        self._bad.clear()

    def _record(self, lengths: Mapping[str, int]) -> set[str]:
        """-> the keys whose records are there."""
        done = self._put({self._names.record(key): _record(length) for key, length in lengths.items()})
        return {key for key, ok in zip(lengths, done, strict=True) if ok}

    def _records(self, names: Sequence[str]) -> list[int]:
        """What they say, 0 for those that are not there; BackendError if the store does not answer."""
        here = [name for name, there in zip(names, self._opened().there(names), strict=True) if there]
        records = {name: bytearray(_RECORD.size) for name in here}
        got = self._get({name: memoryview(record) for name, record in records.items()})
        said = {name: _length_in(records[name]) for name, ok in zip(records, got, strict=True) if ok}
        return [said.get(name, 0) for name in names]

    def _put(self, objects: Mapping[str, memoryview]) -> list[bool]:
        return self._opened().transfer("WRITE", self._items(list(objects), list(objects.values())))

    def _get(self, objects: Mapping[str, memoryview]) -> list[bool]:
        return self._opened().transfer("READ", self._items(list(objects), list(objects.values())))

    def _items(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[Item]:
        agent = self._opened()
        return [Item(buffer, agent.number(), name) for name, buffer in zip(names, buffers, strict=True)]

    def _opened(self) -> Agent:
        if self._agent is None:
            raise BackendError(f"{self.url}: closed", retryable=False)
        return self._agent


def _record(number: int) -> memoryview:
    return memoryview(_RECORD.pack(_MAGIC, number))


def _length_in(record: bytearray) -> int:
    magic, number = _RECORD.unpack(record)
    return int(number) if magic == _MAGIC else 0
