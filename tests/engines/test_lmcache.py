"""``lmcache://`` against a real ``lmcache_server``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hicache_actors.backends import Backend, Stored
from hicache_actors.backends.lmcache import LMCacheBackend, LMCacheConnection
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.testing.backend_contract import BackendContract, content, room
from hicache_actors.testing.servers import Server, lmcache

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with lmcache(tmp_path_factory.mktemp("lmcache")) as server:
        yield server


async def connect(server: Server) -> LMCacheConnection:
    host, _, port = server.url.removeprefix("lmcache://").partition(":")
    connection = LMCacheConnection(host, int(port), 10.0)
    await connection.open()
    return connection


class TestContract(BackendContract):
    persistent = True
    lists_keys = False

    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server
        self.names: set[str] = set()

    async def make(self) -> Backend:
        return Renamed(self.server.url, f"{id(self)}:", self.names)

    async def medium_put(self, key: str, data: bytes) -> None:
        self.names.add(key)
        connection = await connect(self.server)
        await connection.put(f"{id(self)}:{key}", memoryview(data))
        await connection.exists(key)
        connection.close()

    async def medium_get(self, key: str) -> bytes | None:
        connection = await connect(self.server)
        name = f"{id(self)}:{key}"
        length = await connection.get_into(name, memoryview(b""))
        buffer = bytearray(max(0, length))
        await connection.get_into(name, memoryview(buffer))
        connection.close()
        return None if length < 0 or buffer == b"\0" else bytes(buffer)


class Renamed(LMCacheBackend):
    """The server cannot be emptied: each test has keys of its own, and clears those that it has named."""

    def __init__(self, url: str, prefix: str, names: set[str]) -> None:
        super().__init__(url)
        self._prefix, self._names = prefix, names

    def _own(self, keys: Sequence[str]) -> list[str]:
        self._names.update(keys)
        return [self._prefix + key for key in keys]

    async def exists(self, keys: Sequence[str]) -> int:
        return await super().exists(self._own(keys))

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        return await super().read(self._own(keys), buffers)

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        return await super().write(self._own(keys), buffers)

    async def delete(self, keys: Sequence[str]) -> int:
        return await super().delete(self._own(keys))

    async def clear(self) -> None:
        await self.delete(sorted(self._names))


def objects(n: int, n_bytes: int = 100_000) -> tuple[list[str], list[memoryview]]:
    keys = [f"k{at}" for at in range(n)]
    return keys, [memoryview(content(key, n_bytes)) for key in keys]


async def test_a_server_that_is_frozen_or_killed_costs_misses(tmp_path: Path) -> None:
    with lmcache(tmp_path) as own:
        backend = LMCacheBackend(f"{own.url}?timeout_s=0.5")
        await backend.open()
        keys, data = objects(8)
        assert await backend.write(keys, data) == [Stored.WRITTEN] * 8
        own.freeze()
        back = room(8, 100_000)
        with pytest.raises(BackendError, match="no progress"):
            await backend.read(keys, back)
        for buffer in back:
            buffer[:] = bytes(len(buffer))
        own.thaw()
        patient = LMCacheBackend(own.url)
        again = room(8, 100_000)
        assert await patient.read(keys, again) == [True] * 8
        assert again == data
        assert all(not any(buffer) for buffer in back), "a late answer came into a slot of somebody else"
        own.kill()
        for call in (patient.exists(keys), patient.read(keys, again), patient.write(["new"], data[:1])):
            with pytest.raises(BackendError):
                await call
        await backend.close()
        await patient.close()


async def test_what_is_bad_is_missed_by_all_readers(server: Server) -> None:
    ours, theirs = LMCacheBackend(server.url), LMCacheBackend(server.url)
    await ours.open()
    await theirs.open()
    await ours.write(["bad-one"], [memoryview(content("x", 5000))])
    assert await ours.quarantine("bad-one")
    assert await ours.exists(["bad-one"]) == 0
    assert await theirs.read(["bad-one"], room(1, 5000)) == [False]
    assert await theirs.write(["bad-one"], [memoryview(content("y", 5000))]) == [Stored.WRITTEN]
    [back] = room(1, 5000)
    assert await ours.read(["bad-one"], [back]) == [True]
    assert back == content("y", 5000)
    await ours.close()
    await theirs.close()


async def test_nobody_is_there() -> None:
    with pytest.raises(BackendError, match="cannot be reached"):
        await LMCacheBackend("lmcache://127.0.0.1:1").open()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("lmcache://", "no address"),
        ("lmcache://h", "no address"),
        ("lmcache://h:1?connections=0", "connections"),
        ("lmcache://h:1/x", "path"),
    ],
)
def test_urls_that_cannot_be_honoured(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LMCacheBackend(url)
