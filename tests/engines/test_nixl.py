"""``nixl://``: files through the POSIX plugin, by each of its queues, and a bucket of a real S3 server through the OBJ plugin."""

from __future__ import annotations

import itertools
import mmap
import os
import resource
import shutil
import struct
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import pytest

from hicache_actors.backends import Backend, Stored, open_backend
from hicache_actors.backends.file_options import FileOptions
from hicache_actors.backends.ledger import Limits, disk_bytes
from hicache_actors.backends.nixl import FilesOptions, NixlBucket, NixlFiles, bucket_options
from hicache_actors.backends.nixl.bucket import Names
from hicache_actors.backends.objects import HEADER_BYTES, Expected, Verdict
from hicache_actors.backends.shards import SHARDS, row_of
from hicache_actors.errors import BackendError, ConfigError, MissingExtraError
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import BackendContract, content, room
from hicache_actors.testing.servers import Server, seaweed
from hicache_actors.testing.servers.seaweed import KEYS

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

_prefixes = (f"test-{n}" for n in itertools.count())
_ENDS_S = 180.0  # NIXL gives a store that is frozen a minute and a half


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("nixl", 4)
    yield workers
    assert workers.close(_ENDS_S) == ()


def objects(n: int, n_bytes: int = 100_000) -> tuple[list[str], list[memoryview]]:
    keys = [f"k{at}" for at in range(n)]
    return keys, [memoryview(content(key, n_bytes)) for key in keys]


# -- files ----------------------------------------------------------------------------------------------------------------


def file_of(root: Path, key: str) -> Path:
    return root / "objects" / SHARDS[row_of(key.encode())] / f"{key}.kv"


class FilesContract(BackendContract):
    persistent = True
    options = ""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, workers: Workers) -> None:
        self.root, self.workers = tmp_path / "kv", workers

    async def make(self) -> Backend:
        return NixlFiles(f"nixl://{self.root}{self.options}", self.workers)

    async def medium_put(self, key: str, data: bytes) -> None:
        file_of(self.root, key).write_bytes(data)

    async def medium_get(self, key: str) -> bytes | None:
        file = file_of(self.root, key)
        return file.read_bytes() if file.exists() else None


class TestUring(FilesContract):
    options = "?io=uring"


class TestPosixAio(FilesContract):
    options = "?io=posix_aio"


class TestAioDirect(FilesContract):
    options = "?io=aio&direct=1"


def everything_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


async def opened(workers: Workers, root: Path, more: str = "") -> NixlFiles:
    backend = NixlFiles(f"nixl://{root}{more}", workers)
    await backend.open()
    return backend


@pytest.mark.parametrize("more", ["", "?direct=1", "?io=aio&direct=1"])
async def test_memory_that_was_registered_once_is_used_by_address(tmp_path: Path, workers: Workers, more: str) -> None:
    backend = await opened(workers, tmp_path, more)
    memory = memoryview(mmap.mmap(-1, 32 * 4096))
    await backend.register_memory(memory)
    slots = [memory[at * 4096 : (at + 1) * 4096] for at in range(32)]
    for at, slot in enumerate(slots[:16]):
        slot[:] = content(f"k{at}", 4096)
    keys = [f"k{at}" for at in range(16)]
    assert await backend.write(keys, slots[:16]) == [Stored.WRITTEN] * 16
    assert await backend.read(keys, slots[16:]) == [True] * 16
    assert slots[:16] == slots[16:]
    stats = backend.stats()
    assert stats["registered_bytes"] == len(memory)
    assert "buffered" not in stats, "what is aligned goes past the page cache"
    await backend.close()


async def test_what_direct_io_cannot_take_goes_through_the_page_cache_and_is_counted(
    tmp_path: Path, workers: Workers
) -> None:
    backend = await opened(workers, tmp_path, "?direct=1")
    keys, data = objects(3)
    assert await backend.write(keys, data) == [Stored.WRITTEN] * 3
    back = room(3, 100_000)
    assert await backend.read(keys, back) == [True] * 3
    assert back == data
    assert backend.stats()["buffered"] == 6


async def test_files_and_folders_are_for_this_user_only(tmp_path: Path, workers: Workers) -> None:
    backend = await opened(workers, tmp_path / "new" / "kv")
    await backend.write(*objects(3))
    found = everything_in(tmp_path / "new")
    assert {path.is_dir(): path.stat().st_mode & 0o777 for path in found} == {True: 0o700, False: 0o600}
    assert sorted(path.name for path in found if path.suffix == ".kv") == ["k0.kv", "k1.kv", "k2.kv"]


async def test_a_folder_that_is_removed_costs_misses_and_is_made_again(tmp_path: Path, workers: Workers) -> None:
    backend = await opened(workers, tmp_path / "kv")
    keys, data = objects(8)
    await backend.write(keys, data)
    shutil.rmtree(tmp_path / "kv")
    assert await backend.exists(keys) == 0
    assert await backend.read(keys, room(8, 100_000)) == [False] * 8
    assert await backend.write(keys, data) == [Stored.WRITTEN] * 8
    back = room(8, 100_000)
    assert await backend.read(keys, back) == [True] * 8
    assert back == data


def spoil(path: Path, harm: str) -> None:
    if harm in ("cut", "emptied"):
        os.truncate(path, 50_000 if harm == "cut" else 0)
        return
    os.unlink(path)
    if harm == "a directory":
        os.mkdir(path)
    else:
        os.symlink("elsewhere", path)


@pytest.mark.parametrize("harm", ["cut", "emptied", "a directory", "a link"])
async def test_a_bad_file_is_a_miss_and_nothing_else(tmp_path: Path, workers: Workers, harm: str) -> None:
    backend = await opened(workers, tmp_path)
    keys, data = objects(5)
    await backend.write(keys, data)
    spoil(file_of(tmp_path, "k2"), harm)
    back = room(5, 100_000)
    assert await backend.read(keys, back) == [True, True, False, True, True]
    assert [back[at] for at in (0, 1, 3, 4)] == [data[at] for at in (0, 1, 3, 4)]
    assert await backend.write(["k2", "k5"], data[2:4]) == [
        Stored.FAILED if harm.startswith("a ") else Stored.WRITTEN,  # what is not ours stays
        Stored.WRITTEN,
    ]


async def test_what_the_disk_does_not_take_is_refused_object_by_object(tmp_path: Path, workers: Workers) -> None:
    backend = await opened(workers, tmp_path)
    keys, data = objects(4)
    mixed = [data[0][:1000], data[1], data[2][:1000], data[3]]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        outcomes = await backend.write(keys, mixed)
        with pytest.raises(BackendError):
            await backend.write(["k4"], [data[0]])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcomes == [Stored.WRITTEN, Stored.FAILED] * 2
    assert await backend.read(keys, [room(1, len(buffer))[0] for buffer in mixed]) == [True, False] * 2
    assert not [path for path in everything_in(tmp_path) if path.suffix == ".tmp"], "nothing half is left"
    assert await backend.write(keys, mixed) == [Stored.PRESENT, Stored.WRITTEN] * 2


async def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, workers: Workers) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be used"):
        await NixlFiles(f"nixl://{tmp_path / 'file'}", workers).open()


async def test_the_folder_has_a_cap_and_the_longest_unused_goes(tmp_path: Path, workers: Workers) -> None:
    backend = await opened(workers, tmp_path, "?max_gb=0.002")
    for at in range(60):
        assert await backend.write([f"k{at}"], objects(1)[1]) == [Stored.WRITTEN]
    kept = [at for at in range(60) if await backend.exists([f"k{at}"])]
    assert {*range(52, 60)} <= {*kept} <= {*range(30, 60)}  # some were written within one tick of the clock
    files = list(tmp_path.glob("objects/*/*.kv"))  # noqa: ASYNC240
    assert len(files) == len(kept) >= 15
    assert sum(disk_bytes(file.stat().st_size) for file in files) <= 2_000_000
    assert backend.stats()["evicted"] == 60 - len(kept)
    await backend.close()


async def test_a_file_store_may_use_the_same_folder(tmp_path: Path, workers: Workers) -> None:
    keys, data = objects(4)
    nixl, plain = await opened(workers, tmp_path), open_backend(f"file://{tmp_path}", workers)
    await plain.open()
    for writer, reader, some in ((nixl, plain, slice(0, 2)), (plain, nixl, slice(2, 4))):
        assert list(await writer.write(keys[some], data[some])) == [Stored.WRITTEN] * 2
        back = room(2, 100_000)
        assert list(await reader.read(keys[some], back)) == [True] * 2
        assert back == data[some]
    assert list(await plain.write(keys, data)) == [Stored.PRESENT] * 4
    await plain.close()
    assert (await opened(workers, tmp_path)).stats()["objects"] == 4


async def test_objects_are_sealed_and_judged_on_the_way(tmp_path: Path, workers: Workers) -> None:
    expected = Expected(b"n" * 16, [bytes([page + 1]) * 32 for page in range(4)])
    backend = await opened(workers, tmp_path)
    keys, data = objects(4, 3 * HEADER_BYTES)
    sealed = [memoryview(bytearray(each)) for each in data]
    assert await backend.write_sealed(keys, sealed, expected) == [Stored.WRITTEN] * 4
    back = room(4, 3 * HEADER_BYTES)
    assert await backend.read_checked(keys, back, expected) == [Verdict.OK] * 4
    assert back == sealed
    spoilt = bytearray(sealed[2])
    spoilt[-1] ^= 1
    file_of(tmp_path, "k2").write_bytes(spoilt)
    file_of(tmp_path, "k3").unlink()
    found = await backend.read_checked(keys, back, expected)
    assert found == [Verdict.OK, Verdict.OK, Verdict.CORRUPT, None]
    await backend.close()


# -- a bucket -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def url_of(server: Server, prefix: str) -> str:
    return server.url.replace("s3://", "nixl://").replace("/pages?", f"/{prefix}?")


class Direct:
    """The same bucket, past the backend."""

    def __init__(self, url: str) -> None:
        bucket = bucket_options(url)
        self.prefix = bucket.prefix
        self.client: Any = import_module("obstore")
        self.store: Any = import_module("obstore.store").S3Store(
            bucket.name, endpoint=bucket.endpoint, region="us-east-1", client_options={"allow_http": True}
        )

    async def get(self, name: str) -> bytes | None:
        try:
            return bytes(await (await self.client.get_async(self.store, name)).bytes_async())
        except FileNotFoundError:
            return None

    async def put(self, name: str, data: bytes) -> None:
        await self.client.put_async(self.store, name, data, use_multipart=False)

    async def names(self) -> Names:
        record = await self.get(f"{self.prefix}epoch")
        return Names(self.prefix, struct.unpack("<8sQ", record)[1] if record else 0)

    async def length(self, key: str) -> int:
        record = await self.get((await self.names()).record(key))
        return int(struct.unpack("<8sQ", record)[1]) if record else 0


class TestBucket(BackendContract):
    persistent = True
    lists_keys = False

    @pytest.fixture(autouse=True)
    def _bucket(self, server: Server, workers: Workers) -> None:
        self.url, self.workers = url_of(server, next(_prefixes)), workers

    async def make(self) -> Backend:
        return NixlBucket(self.url, self.workers)

    async def medium_put(self, key: str, data: bytes) -> None:
        direct = Direct(self.url)
        names = await direct.names()
        await direct.put(names.data(key, len(data)), data)
        await direct.put(names.record(key), struct.pack("<8sQ", b"hicnixl1", len(data)))

    async def medium_get(self, key: str) -> bytes | None:
        direct = Direct(self.url)
        length = await direct.length(key)
        return await direct.get((await direct.names()).data(key, length)) if length else None


async def bucket(server: Server, workers: Workers, prefix: str = "") -> NixlBucket:
    backend = NixlBucket(url_of(server, prefix or next(_prefixes)), workers)
    await backend.open()
    return backend


async def test_a_bucket_uses_memory_that_was_registered_once_by_address(server: Server, workers: Workers) -> None:
    backend = await bucket(server, workers)
    memory = memoryview(bytearray(content("memory", 8 * 100_000) + bytes(8 * 100_000)))
    await backend.register_memory(memory)
    slots = [memory[at * 100_000 : (at + 1) * 100_000] for at in range(16)]
    keys = [f"k{at}" for at in range(8)]
    assert await backend.write(keys, slots[:8]) == [Stored.WRITTEN] * 8
    assert await backend.read(keys, slots[8:]) == [True] * 8
    assert slots[:8] == slots[8:]
    assert backend.stats()["registered_bytes"] == len(memory)
    await backend.close()


async def test_what_is_removed_or_lost_is_missed_by_all_and_written_anew(server: Server, workers: Workers) -> None:
    prefix = next(_prefixes)
    ours, theirs = await bucket(server, workers, prefix), await bucket(server, workers, prefix)
    keys, data = objects(2)
    await ours.write(keys, data)
    assert await ours.quarantine("k0")
    direct = Direct(theirs.url)
    await direct.client.delete_async(
        direct.store, [(await direct.names()).data("k1", 100_000)]
    )  # a lifecycle rule, say
    assert await theirs.exists(["k0"]) == 0
    assert await theirs.read(keys, room(2, 100_000)) == [False, False]
    assert await theirs.write(keys, data) == [Stored.WRITTEN] * 2
    back = room(2, 100_000)
    assert await ours.read(keys, back) == [True] * 2
    assert back == data


async def test_a_bucket_that_is_cleared_is_empty_for_who_opens_it_next(server: Server, workers: Workers) -> None:
    prefix = next(_prefixes)
    ours, theirs = await bucket(server, workers, prefix), await bucket(server, workers, prefix)
    keys, data = objects(2)
    await ours.write(keys, data)
    await ours.clear()
    assert await ours.exists(keys) == 0
    assert await theirs.exists(keys) == 2, "who is open goes on with the old names"
    assert await (await bucket(server, workers, prefix)).exists(keys) == 0


async def test_keys_that_are_wrong_are_refused(
    server: Server, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-one")
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID") as refused:
        await NixlBucket(server.url.replace("s3://", "nixl://"), workers).open()
    assert "wrong-one" not in str(refused.value)


async def test_nobody_is_there(workers: Workers) -> None:
    with pytest.raises(BackendError, match="nobody answers"):
        await NixlBucket("nixl://hicache?endpoint=http://127.0.0.1:1", workers).open()


async def test_a_server_that_is_killed_or_frozen_costs_errors_and_keeps_what_it_acknowledged(
    tmp_path: Path, workers: Workers
) -> None:
    with seaweed(tmp_path / "own") as server:
        backend = await bucket(server, workers)
        keys, data = objects(4)
        assert await backend.write(keys, data) == [Stored.WRITTEN] * 4
        server.freeze()
        back = room(4, 100_000)
        with anyio.move_on_after(1.0) as gone:
            await backend.read(keys, back)
        assert gone.cancelled_caught, "NIXL waits for long: it is the tier that does not"
        assert workers.lost == 1
        server.thaw()
        with anyio.fail_after(_ENDS_S):
            while workers.lost:  # noqa: ASYNC110 - they end in threads
                await anyio.sleep(0.1)
        server.kill()
        for call in (backend.exists(keys), backend.read(keys, back), backend.write(["new"], data[:1])):
            with pytest.raises(BackendError, match="nobody answers"):
                await call
        server.start()
        again = room(4, 100_000)
        found: list[bool] = []
        with anyio.fail_after(_ENDS_S):
            while found != [True] * 4:  # its volumes register by and by
                try:
                    found = await (await bucket(server, workers, backend.bucket.prefix)).read(keys, again)
                except (BackendError, ConfigError):
                    await anyio.sleep(0.1)
        assert again == data


# -- both -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nixl://", "names no folder"),
        ("nixl:///", "names no folder"),
        ("nixl:///x?io=threads", "io='threads'"),
        ("nixl:///x?direct=yes", "direct='yes'"),
        ("nixl:///x?max_gb=0", "max_gb=0"),
        ("nixl:///x?endpoint=http://h", "unknown option"),
        ("nixl://UPPER", "no name of a bucket"),
        ("nixl://bucket/../x", "prefix"),
        ("nixl://bucket?endpoint=here", "endpoint"),
        ("nixl://bucket?endpoint=http://h:x", "endpoint"),
        ("nixl://bucket?addressing=x", "addressing"),
        ("nixl://bucket?io=uring", "unknown option"),
        ("nixl://bucket?secret_key=x", "unknown option"),
    ],
)
def test_urls_that_cannot_be_honoured(url: str, words: str, workers: Workers) -> None:
    with pytest.raises(ConfigError, match=words):
        open_backend(url, workers)


def test_urls_that_can() -> None:
    assert FilesOptions.parse("nixl:///nvme/kv/?max_gb=2") == (
        FileOptions("/nvme/kv", Limits(2 * 10**9), 0),
        "uring",
        False,
    )
    assert bucket_options("nixl://kv-pages") == ("kv-pages", "", None, None, False)
    given = bucket_options("nixl://kv-pages/a/b?endpoint=https://store&region=eu")
    assert given.address == ("store", 443)
    assert given == ("kv-pages", "a/b/", "https://store", "eu", True)


def test_without_nixl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, workers: Workers) -> None:
    missing: Any = None
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, f"{name}._api", missing)
    with pytest.raises(MissingExtraError, match=r"hicache-actors\[nixl\]"):
        open_backend("nixl:///x", workers)
