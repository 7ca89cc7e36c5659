"""``s3://`` against a real S3 server (SeaweedFS)."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hicache_actors.backends import Backend, Stored
from hicache_actors.backends.s3 import S3Backend, S3Options
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.testing.backend_contract import BackendContract, content, room
from hicache_actors.testing.servers import Server, seaweed
from hicache_actors.testing.servers.seaweed import KEYS

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

_prefixes = (f"test-{n}" for n in itertools.count())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def url_of(server: Server, prefix: str, more: str = "") -> str:
    return server.url.replace("/pages?", f"/{prefix}?") + more


def direct(url: str) -> tuple[Any, Any, str]:
    """The same bucket, past the backend: the client, its store, the prefix."""
    client, stores = import_module("obstore"), import_module("obstore.store")
    bucket = S3Options.parse(url).bucket
    assert bucket.endpoint is not None
    store = stores.S3Store(
        bucket.name, endpoint=bucket.endpoint, region="us-east-1", client_options={"allow_http": True}
    )
    return client, store, bucket.prefix


class TestContract(BackendContract):
    persistent = True

    @pytest.fixture(autouse=True)
    def _bucket(self, server: Server) -> None:
        self.url = url_of(server, next(_prefixes))

    async def make(self) -> Backend:
        return S3Backend(self.url)

    async def medium_put(self, key: str, data: bytes) -> None:
        client, store, prefix = direct(self.url)
        await client.put_async(store, prefix + key, data, use_multipart=False)

    async def medium_get(self, key: str) -> bytes | None:
        client, store, prefix = direct(self.url)
        try:
            answer = await client.get_async(store, prefix + key)
        except FileNotFoundError:
            return None
        return bytes(await answer.bytes_async())


def objects(n: int, n_bytes: int = 100_000) -> tuple[list[str], list[memoryview]]:
    keys = [f"k{at}" for at in range(n)]
    return keys, [memoryview(content(key, n_bytes)) for key in keys]


async def test_a_bucket_that_is_not_there_is_refused(server: Server) -> None:
    with pytest.raises(ConfigError, match="no such bucket"):
        await S3Backend(server.url.replace("s3://hicache/", "s3://nothing-here/")).open()


async def test_keys_that_are_wrong_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-one")
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID") as refused:
        await S3Backend(server.url).open()
    assert "wrong-one" not in str(refused.value)


async def test_a_prefix_is_a_store_of_its_own(server: Server) -> None:
    outer, inner = S3Backend(url_of(server, "outer")), S3Backend(url_of(server, "outer/inner"))
    for backend in (outer, inner):
        await backend.open()
        await backend.write(*objects(2))
    await outer.clear()
    assert await outer.exists(["k0"]) == 0
    assert await inner.exists(["k0", "k1"]) == 2


async def test_keys_that_are_not_set_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    backend = S3Backend("s3://hicache?endpoint=http://127.0.0.1:1&region=us-east-1&retries=0&timeout_s=0.5")
    with pytest.raises(BackendError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY not set"):
        await backend.open()


async def test_nobody_is_there() -> None:
    with pytest.raises(BackendError):
        await S3Backend("s3://hicache?endpoint=http://127.0.0.1:1&region=us-east-1&retries=0").open()


async def test_a_server_that_is_frozen_or_killed_costs_misses_and_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    with seaweed(tmp_path / "own") as server:
        patient, backend = S3Backend(server.url), S3Backend(server.url + "&timeout_s=0.5&retries=0")
        await patient.open()
        await backend.open()
        keys, data = objects(8)
        assert await patient.write(keys, data) == [Stored.WRITTEN] * 8
        server.freeze()
        back = room(8, 100_000)
        with pytest.raises(BackendError):
            await backend.read(keys, back)
        for buffer in back:
            buffer[:] = bytes(len(buffer))
        server.thaw()
        again = room(8, 100_000)
        assert await patient.read(keys, again) == [True] * 8
        assert all(not any(buffer) for buffer in back)
        server.kill()
        for call in (backend.exists(keys), backend.read(keys, back), backend.write(["new"], data[:1])):
            with pytest.raises(BackendError):
                await call
        server.start()
        again = room(8, 100_000)
        found: list[bool] = []
        for _ in range(200):  # its volumes register by and by
            try:
                found = await patient.read(keys, again)
            except BackendError:
                found = []
            if found == [True] * 8:
                break
            await asyncio.sleep(0.1)
        assert found == [True] * 8
        assert again == data


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "no name of a bucket"),
        ("s3://UPPER", "no name of a bucket"),
        ("s3://bucket/../x", "prefix"),
        ("s3://bucket?endpoint=here", "endpoint"),
        ("s3://bucket?addressing=x", "addressing"),
        ("s3://bucket?endpoint=http://h:x", "endpoint"),
        ("s3://bucket?requests=0", "requests"),
        ("s3://bucket?secret=x", "unknown option"),
    ],
)
def test_urls_that_cannot_be_honoured(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        S3Options.parse(url)


async def test_the_server_to_try_it_with_says_all_that_a_client_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    command = [sys.executable, "-m", "hicache_actors.testing.servers", "seaweed"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip().partition("storage.url = ")[2]
            for setting in process.stdout.readline().strip().partition("export ")[2].split():
                monkeypatch.setenv(*setting.split("="))
            backend = S3Backend(url)
            await backend.open()
            keys, data = objects(2)
            assert await backend.write(keys, data) == [Stored.WRITTEN] * 2
            await backend.close()
        finally:
            process.terminate()
    assert process.returncode == 0
