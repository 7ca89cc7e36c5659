"""``redis://`` and ``valkey://`` against a real server: the contract, and everything that a server can do to us."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from hicache_actors.backends import Backend, Stored
from hicache_actors.backends.redis import RedisBackend
from hicache_actors.backends.redis.connection import Connection, ServerError, command
from hicache_actors.backends.redis.options import RedisOptions
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.testing.backend_contract import BackendContract, content, room
from hicache_actors.testing.servers import Server, valkey

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


@pytest.fixture(scope="module", params=["tcp", "unix"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with valkey(tmp_path_factory.mktemp("valkey"), unix=request.param == "unix") as server:
        yield server


async def direct(server: Server, *words: str | bytes) -> object:
    """One command, past the backend."""
    connection = Connection(RedisOptions.parse(server.url))
    await connection.open()
    try:
        await connection.send(command(*words))
        return await connection.reply()
    finally:
        connection.close()


class TestContract(BackendContract):
    persistent = True

    @pytest.fixture(autouse=True)
    async def _server(self, server: Server) -> None:
        self.server = server
        assert await direct(server, "FLUSHALL") == b"OK"

    async def make(self) -> Backend:
        return RedisBackend(self.server.url)

    async def medium_put(self, key: str, data: bytes) -> None:
        assert await direct(self.server, "SET", f"hicache:{key}", data) == b"OK"

    async def medium_get(self, key: str) -> bytes | None:
        answer = await direct(self.server, "GET", f"hicache:{key}")
        assert answer is None or isinstance(answer, bytes)
        return answer


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    """A server that a test may harm."""
    with valkey(tmp_path / "own") as server:
        yield server


def objects(n: int, n_bytes: int = 100_000) -> tuple[list[str], list[memoryview]]:
    keys = [f"k{at}" for at in range(n)]
    return keys, [memoryview(content(key, n_bytes)) for key in keys]


async def test_what_is_not_ours_is_left_alone(own: Server) -> None:
    await direct(own, "SET", "theirs", b"value")
    backend = RedisBackend(own.url + "?prefix=kv:")
    await backend.open()
    keys, data = objects(3)
    await backend.write(keys, data)
    assert await direct(own, "EXISTS", "kv:k0", "kv:k1", "kv:k2") == 3
    await backend.clear()
    assert await direct(own, "KEYS", "*") == [b"theirs"]
    await backend.close()


async def test_objects_may_expire(own: Server) -> None:
    backend = RedisBackend(own.url + "?expire_s=1000")
    await backend.open()
    await backend.write(*objects(1))
    left_s = await direct(own, "TTL", "hicache:k0")
    assert isinstance(left_s, int)
    assert 900 < left_s <= 1000
    await backend.close()


async def test_a_server_that_was_killed_is_an_error_at_once_and_found_again_when_it_is_back(own: Server) -> None:
    backend = RedisBackend(own.url)
    await backend.open()
    keys, data = objects(8)
    assert await backend.write(keys, data) == [Stored.WRITTEN] * 8
    own.kill()
    for call in (backend.exists(keys), backend.read(keys, room(8, 100_000)), backend.write(keys, data)):
        with pytest.raises(BackendError, match=r"127\.0\.0\.1"):
            await call
    own.start()
    assert await backend.exists(keys) == 0, "what it held is gone"
    assert await backend.write(keys, data) == [Stored.WRITTEN] * 8
    back = room(8, 100_000)
    assert await backend.read(keys, back) == [True] * 8
    assert back == data
    await backend.close()


async def test_an_idle_connection_that_the_server_has_closed_costs_no_miss(own: Server) -> None:
    backend = RedisBackend(own.url)
    await backend.open()
    keys, data = objects(8)
    await backend.write(keys, data)
    await direct(own, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    back = room(8, 100_000)
    assert await backend.read(keys, back) == [True] * 8
    assert backend.stats()["reconnects"] != 0
    await backend.close()


async def test_a_frozen_server_costs_the_time_limit_and_nothing_writes_into_the_slots_afterwards(own: Server) -> None:
    backend = RedisBackend(own.url + "?timeout_s=0.3&connections=2")
    await backend.open()
    keys, data = objects(8)
    await backend.write(keys, data)
    own.freeze()
    back = room(8, 100_000)
    with pytest.raises(BackendError, match="no progress"):
        await backend.read(keys, back)
    for buffer in back:
        buffer[:] = bytes(len(buffer))  # the slot has been given to somebody else
    own.thaw()
    again = room(8, 100_000)
    assert await backend.read(keys, again) == [True] * 8
    assert all(not any(buffer) for buffer in back), "a late answer came into a slot of somebody else"
    await backend.close()


async def test_a_full_server_refuses_object_by_object_and_reads_go_on(tmp_path: Path) -> None:
    with valkey(tmp_path / "full", max_bytes=4 << 20, evict=False) as server:
        backend = RedisBackend(server.url)
        await backend.open()
        keys, data = objects(64)
        outcomes = await backend.write(keys, data)
        kept = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Stored.WRITTEN]
        assert 0 < len(kept) < 64
        assert backend.stats()["full"] == 64 - len(kept)
        back = room(64, 100_000)
        found = await backend.read(keys, back)
        assert [key for key, here in zip(keys, found, strict=True) if here] == kept
        assert list(await backend.write(["another"], data[:1])) == [Stored.FAILED]
        await backend.close()


async def test_a_server_that_evicts_makes_misses(tmp_path: Path) -> None:
    with valkey(tmp_path / "small", max_bytes=4 << 20) as server:
        backend = RedisBackend(server.url)
        await backend.open()
        keys, data = objects(64)
        assert await backend.write(keys, data) == [Stored.WRITTEN] * 64
        back = room(64, 100_000)
        found = await backend.read(keys, back)
        assert 0 < sum(found) < 64
        assert all(buffer == expected for buffer, expected, here in zip(back, data, found, strict=True) if here)
        await backend.close()


async def test_a_read_only_server_takes_nothing_and_still_reads(own: Server) -> None:
    backend = RedisBackend(own.url)
    await backend.open()
    keys, data = objects(4)
    await backend.write(keys, data)
    await direct(own, "REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(BackendError, match="READONLY"):
        await backend.write(["new"], data[:1])
    assert await backend.exists(keys) == 4
    await backend.close()


async def test_a_password_is_asked_for_and_never_shown(own: Server) -> None:
    await direct(own, "CONFIG", "SET", "requirepass", "s3cret/?")
    address = own.url.removeprefix("redis://")
    with pytest.raises(ConfigError, match="NOAUTH"):
        await RedisBackend(own.url).open()
    with pytest.raises(ConfigError) as refused:
        await RedisBackend(f"redis://:wrong-one@{address}").open()
    assert "wrong-one" not in str(refused.value)
    backend = RedisBackend(f"redis://:s3cret%2F%3F@{address}")
    await backend.open()
    assert await backend.exists(["k"]) == 0
    assert "s3cret" not in backend.url
    await backend.close()


async def test_a_task_that_is_cancelled_spoils_no_connection(own: Server) -> None:
    backend = RedisBackend(own.url + "?connections=1")
    await backend.open()
    keys, data = objects(8)
    await backend.write(keys, data)
    for steps in range(12):
        task = asyncio.ensure_future(backend.read(keys, room(8, 100_000)))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        back = room(8, 100_000)
        assert await backend.read(keys, back) == [True] * 8
        assert back == data
    await backend.close()


async def test_nobody_is_there() -> None:
    with pytest.raises(BackendError, match="cannot be reached"):
        await RedisBackend("redis://127.0.0.1:1").open()


@pytest.mark.parametrize("answer", [b"+OK\r\n", b"$5\r\nshort", b"$-7x\r\n", b"garbage without end " * 100, b""])
async def test_a_server_that_talks_nonsense_is_an_error_and_no_hang(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        backend = RedisBackend(f"redis://127.0.0.1:{listener.getsockname()[1]}?timeout_s=5&connections=1")
        with anyio.fail_after(30), pytest.raises(BackendError):
            await backend.read(["k"], room(1, 10))
        await backend.close()
        thread.join()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://", "names no host"),
        ("redis+unix:///", "names no socket"),
        ("redis://h:99999", "port"),
        ("redis://h/x", "db='x'"),
        ("redis://h?connections=0", "connections"),
        ("redis://h?timeout_s=nan", "timeout_s"),
        ("redis://h?prefix={x}", "prefix"),
        ("redis://h?tls=1", "unknown option"),
    ],
)
def test_urls_that_cannot_be_honoured(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RedisOptions.parse(url)


def test_what_a_server_answers_is_named_by_its_first_word() -> None:
    assert ServerError("OOM command not allowed").code == "OOM"
