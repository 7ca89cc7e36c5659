"""``mooncake://`` against a real master and real owners of memory, over TCP."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from hicache_actors.backends import Backend, Stored
from hicache_actors.backends.mooncake import MooncakeBackend, MooncakeOptions
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import BackendContract, content, room
from hicache_actors.testing.servers import Server, mooncake_master, mooncake_owner
from hicache_actors.testing.servers.mooncake import only_loopback

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

_prefixes = (f"test-{n}:" for n in itertools.count())


@pytest.fixture(scope="module", autouse=True)
def _alone() -> None:
    assert only_loopback(), "Mooncake's clients listen on all interfaces: run these tests by `make test-engines`"


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("mooncake", 4)
    yield workers
    assert workers.close(20.0) == ()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A master and an owner: all objects live in another process."""
    folder = tmp_path_factory.mktemp("mooncake")
    with mooncake_master(folder) as master, mooncake_owner(folder, master):
        yield master


class TestContract(BackendContract):
    persistent = True
    lists_keys = False

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: Server, workers: Workers) -> None:
        self.workers = workers
        self.prefix = next(_prefixes)
        self.url = f"{cluster.url}?prefix={self.prefix}&buffer_gb=0.02"

    async def make(self) -> Backend:
        return MooncakeBackend(self.url, self.workers)

    async def direct(self) -> MooncakeBackend:
        backend = MooncakeBackend(self.url, self.workers)
        await backend.open()
        return backend

    async def medium_put(self, key: str, data: bytes) -> None:
        backend = await self.direct()
        client = backend._client()
        client.remove(self.prefix + key, True)
        assert not data or client.put(self.prefix + key, data) == 0
        await backend.close()

    async def medium_get(self, key: str) -> bytes | None:
        backend = await self.direct()
        data: bytes = backend._client().get(self.prefix + key)
        await backend.close()
        return data or None


def objects(n: int, n_bytes: int = 100_000) -> tuple[list[str], list[memoryview]]:
    keys = [f"k{at}" for at in range(n)]
    return keys, [memoryview(content(key, n_bytes)) for key in keys]


async def until_written(backend: Backend, key: str, data: memoryview) -> None:
    with anyio.fail_after(60):
        for pause_s in itertools.chain([0.0], itertools.repeat(0.05)):
            await anyio.sleep(pause_s)
            with contextlib.suppress(BackendError):
                if await backend.write([key], [data]) != [Stored.FAILED]:
                    return


async def test_memory_that_was_registered_once_is_used_by_address(cluster: Server, workers: Workers) -> None:
    backend = MooncakeBackend(f"{cluster.url}?prefix={next(_prefixes)}", workers)
    await backend.open()
    memory = memoryview(bytearray(32 * 4096))
    await backend.register_memory(memory)
    slots = [memory[at * 4096 : (at + 1) * 4096] for at in range(32)]
    for at, slot in enumerate(slots[:16]):
        slot[:] = content(f"k{at}", 4096)
    keys = [f"k{at}" for at in range(16)]
    assert await backend.write(keys, slots[:16]) == [Stored.WRITTEN] * 16
    assert await backend.read(keys, slots[16:]) == [True] * 16
    assert slots[:16] == slots[16:]
    assert backend.stats()["registered_bytes"] == len(memory)
    await backend.close()


async def test_a_master_that_is_killed_is_an_error_and_a_new_one_is_found(tmp_path: Path, workers: Workers) -> None:
    with mooncake_master(tmp_path) as master, mooncake_owner(tmp_path, master):
        backend = MooncakeBackend(master.url, workers)
        await backend.open()
        keys, data = objects(4)
        assert await backend.write(keys, data) == [Stored.WRITTEN] * 4
        master.kill()
        for _ in range(2):
            with pytest.raises(BackendError):
                await backend.read(keys, room(4, 100_000))
        with pytest.raises(BackendError):
            await backend.write(["new"], data[:1])
        master.start()
        await until_written(backend, "again", data[0])  # owners register again by themselves
        assert await backend.exists(keys) == 0, "the new one knows nothing of what there was"
        await backend.close()


async def test_an_owner_that_is_killed_makes_misses(tmp_path: Path, workers: Workers) -> None:
    with mooncake_master(tmp_path) as master, mooncake_owner(tmp_path, master) as owner:
        backend = MooncakeBackend(master.url, workers)
        await backend.open()
        keys, data = objects(4)
        assert await backend.write(keys, data) == [Stored.WRITTEN] * 4
        owner.kill()
        assert await backend.read(keys, room(4, 100_000)) == [False] * 4
        await backend.close()


async def test_a_second_replica_outlives_an_owner(tmp_path: Path, workers: Workers) -> None:
    with (
        mooncake_master(tmp_path) as master,
        mooncake_owner(tmp_path / "a", master, segment_bytes=64 << 20) as first,
        mooncake_owner(tmp_path / "b", master, segment_bytes=64 << 20),
    ):
        backend = MooncakeBackend(f"{master.url}?replicas=2", workers)
        await backend.open()
        keys, data = objects(8)
        assert await backend.write(keys, data) == [Stored.WRITTEN] * 8
        first.kill()
        back = room(8, 100_000)
        found: list[bool] = []
        until_s = time.monotonic() + 60.0
        while found != [True] * 8 and time.monotonic() < until_s:  # the master learns of it by and by
            found = await backend.read(keys, back)
        assert found == [True] * 8
        assert back == data
        await backend.close()


async def test_a_cluster_without_room_refuses_and_says_so(tmp_path: Path, workers: Workers) -> None:
    with mooncake_master(tmp_path) as master, mooncake_owner(tmp_path, master, segment_bytes=16 << 20):
        backend = MooncakeBackend(master.url, workers)
        await backend.open()
        keys, data = objects(64, 1 << 20)
        outcomes = await backend.write(keys, data)
        assert 0 < outcomes.count(Stored.WRITTEN) < 64
        back = room(64, 1 << 20)
        found = await backend.read(keys, back)
        assert all(buffer == expected for buffer, expected, here in zip(back, data, found, strict=True) if here)
        await backend.close()


async def test_lent_memory_overflows_to_a_disk(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "ssd"
    disk.mkdir()
    for name, value in {
        "FILE_STORAGE_PATH": str(disk), "HEARTBEAT_INTERVAL_SECONDS": "1", "LOCAL_BUFFER_SIZE_BYTES": str(64 << 20),
        "BUCKET_SIZE_LIMIT_BYTES": str(16 << 20), "TOTAL_SIZE_LIMIT_BYTES": str(1 << 30), "BUCKET_MAX_TOTAL_SIZE": str(1 << 30),
    }.items():  # fmt: skip
        monkeypatch.setenv(f"MOONCAKE_OFFLOAD_{name}", value)
    with mooncake_master(tmp_path / "master", offload=True) as master:
        backend = MooncakeBackend(f"{master.url}?segment_gb=0.067&ssd={disk}", workers)
        await backend.open()
        keys, data = objects(128, 1 << 20)
        for key, buffer in zip(keys, data, strict=True):
            await until_written(backend, key, buffer)  # the offloader has to catch up
        back = room(128, 1 << 20)
        found = await backend.read(keys, back)
        assert all(buffer == expected for buffer, expected, here in zip(back, data, found, strict=True) if here)
        assert sum(found) > 64, "more than the memory holds"
        assert sum(file.stat().st_size for file in disk.rglob("*") if file.is_file()) > 32 << 20
        await backend.close()


async def test_no_master_is_an_error(workers: Workers) -> None:
    with pytest.raises(BackendError, match="no master answers"):
        await MooncakeBackend("mooncake://127.0.0.1:1", workers).open()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mooncake://", "no address"),
        ("mooncake://host", "no address"),
        ("mooncake://h:1?protocol=ib", "protocol"),
        ("mooncake://h:1?ssd=/x", "segment_gb"),
        ("mooncake://h:1?replicas=0", "replicas"),
        ("mooncake://h:1?prefix=a/b", "prefix"),
        ("mooncake://h:1/path", "path"),
    ],
)
def test_urls_that_cannot_be_honoured(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MooncakeOptions.parse(url)
