"""SGLang itself, in the environment that has it: its storage classes behind ``sglang://``, its hashes, its files."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, urlsplit

import boto3
import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.utils import get_storage_hash_str

from hicache_actors.backends import Backend, open_backend
from hicache_actors.config import Config, HostConfig, ModelFacts, StorageConfig
from hicache_actors.keys import Prompt, Scope
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import BackendContract
from hicache_actors.testing.servers import Server, seaweed
from hicache_actors.testing.servers.seaweed import KEYS
from hicache_actors.testing.small import PAGE_SIZE, Small, open_small, prompt, tokens

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

MODULE = "sglang.srt.mem_cache"
FILE = f"{MODULE}.hicache_storage/HiCacheFile"
SEAWEED = f"{MODULE}.storage.seaweedfs.seaweedfs_store/SeaweedFSStore"
HIDDEN = b"\0"  #: what lies where an object has been removed


def url_of(what: str, config: dict[str, Any], **options: str) -> str:
    more = "".join(f"&{name}={value}" for name, value in options.items())
    return f"sglang://{what}?config={quote(json.dumps(config))}{more}"


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("sglang", 4)
    yield workers
    assert workers.close(10.0) == ()


class _FileContract(BackendContract):
    """``<key>_<model>_<tp rank>_<tp size>.bin``"""

    persistent = True
    lists_keys = False
    replaces = False
    calls: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _medium(self, workers: Workers, tmp_path: Path) -> None:
        self.workers, self.folder = workers, tmp_path / "store"

    async def make(self) -> Backend:
        return open_backend(url_of(FILE, {"file_storage_path": str(self.folder)}, calls=self.calls), self.workers)

    async def medium_put(self, key: str, data: bytes) -> None:
        self._file(key).write_bytes(data)

    async def medium_get(self, key: str) -> bytes | None:
        file = self._file(key)
        return file.read_bytes() if file.exists() else None

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}_hicache_0_1.bin"

    @pytest.mark.parametrize("change", ["shorter", "empty"])  # of a longer file it reads the beginning
    async def test_an_object_of_another_length_is_a_miss(self, backend: Backend, change: str) -> None:
        await super().test_an_object_of_another_length_is_a_miss(backend, change)


class TestFileTensors(_FileContract):
    calls = "v0"


class TestFilePools(_FileContract):
    calls = "v2"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


class _SeaweedContract(BackendContract):
    """``<prefix>/<model>/tp0of1/<key>`` in a bucket of SeaweedFS."""

    persistent = True
    lists_keys = False
    calls: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _medium(self, workers: Workers, server: Server, tmp_path: Path) -> None:
        self.workers, self.prefix = workers, tmp_path.name
        self.endpoint = parse_qs(urlsplit(server.url).query)["endpoint"][0]
        self.s3: Any = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )

    async def make(self) -> Backend:
        config = {
            "endpoint": self.endpoint, "bucket": "of-sglang", "prefix": self.prefix,
            "access_key": KEYS["AWS_ACCESS_KEY_ID"], "secret_key": KEYS["AWS_SECRET_ACCESS_KEY"],
        }  # fmt: skip
        return open_backend(url_of(SEAWEED, config, calls=self.calls), self.workers)

    async def medium_put(self, key: str, data: bytes) -> None:
        self.s3.put_object(Bucket="of-sglang", Key=self._name(key), Body=data)

    async def medium_get(self, key: str) -> bytes | None:
        try:
            data: bytes = self.s3.get_object(Bucket="of-sglang", Key=self._name(key))["Body"].read()
        except self.s3.exceptions.NoSuchKey:
            return None
        return None if data == HIDDEN else data

    def _name(self, key: str) -> str:
        return f"{self.prefix}/hicache/tp0of1/{key}"


class TestSeaweedAddresses(_SeaweedContract):
    calls = "v1"


class TestSeaweedPools(_SeaweedContract):
    calls = "v2"


class Told(HiCacheFile):  # type: ignore[misc]
    """Writes down what stands before the keys of each call."""

    calls: ClassVar[list[tuple[str, list[str], list[str]]]] = []

    def __init__(self, config: HiCacheStorageConfig, _: dict[str, Any]) -> None:
        super().__init__(config)

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        self.calls.append(("exists", extra_info.prefix_keys, keys))
        return super().batch_exists_v2(keys, pool_transfers, extra_info)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        self.calls.append(("get", extra_info.prefix_keys, transfers[0].keys))
        return super().batch_get_v2(transfers, extra_info)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        self.calls.append(("set", extra_info.prefix_keys, transfers[0].keys))
        return super().batch_set_v2(transfers, extra_info)


async def stored_by(small: Small, pages: int) -> None:
    await small.engine.answer(prompt(pages))
    await small.cache.drain(10.0)


async def test_a_cache_on_its_file_store_says_what_stands_before(tmp_path: Path) -> None:
    Told.calls.clear()
    config = {"file_storage_path": str(tmp_path), "hicache_storage_pass_prefix_keys": True}
    url = url_of(f"{__name__}/Told", config)
    async with open_small(url=url) as small:
        await stored_by(small, 4)
        await stored_by(small, 9)
    async with open_small(url=url) as small:
        keys = small.store.keys.keys(prompt(9).page_hashes(PAGE_SIZE, 9))
        assert (await small.engine.answer(prompt(9))).account.storage == 9 * PAGE_SIZE
    assert {what for what, _, _ in Told.calls} == {"exists", "get", "set"}
    for what, before, asked in Told.calls:
        assert before + asked == keys[: len(before) + len(asked)], what
    assert any(before for what, before, _ in Told.calls if what == "set")


@pytest.mark.parametrize("scope", [Scope(), Scope(lora="a"), Scope(salt="s"), Scope(lora="a", salt="s")])
@pytest.mark.parametrize("highest", [2**17, 2**40])
def test_its_hashes_are_ours(scope: Scope, highest: int) -> None:
    class Key(array):  # type: ignore[type-arg]
        extra_key, cache_salt = scope.lora, scope.salt

    ids = np.random.default_rng(7).integers(0, highest, 64 * 5 + 3).tolist()
    theirs = get_storage_hash_str(Key("q", ids[: 64 * 5]), None, page_size=64)
    assert theirs == [page.hex() for page in Prompt(ids, scope).page_hashes(64, 5)]


def its_store(folder: Path, model: str) -> Any:
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name=model,
        extra_config={"file_storage_path": str(folder)},
    )  # fmt: skip
    return HiCacheFile(config)


async def test_each_reads_the_files_of_the_other(tmp_path: Path) -> None:
    """Our cache writes raw pages; SGLang's class finds and reads them, writes them elsewhere, and our cache serves those."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"

    def config(folder: Path) -> Config:
        return Config(
            page_size=PAGE_SIZE,
            host=HostConfig(pages=32, layout="page_first", header_bytes=0),
            model=ModelFacts(model_id="org/toy", weights="v1"),
            storage=StorageConfig(
                url=f"sglang-file://{folder}", keys="raw", verify="off", prefetch_threshold_tokens=PAGE_SIZE
            ),
        )

    async with open_small(config=config(ours)) as small:
        await stored_by(small, 6)
        page_bytes = small.cache.movers.host.memory.layout.object_bytes
    hashes = get_storage_hash_str(array("q", tokens(6, extra=0)), None, page_size=PAGE_SIZE)
    source, target = its_store(ours, "org/toy"), its_store(theirs, "org/toy")
    assert source.batch_exists(hashes) == 6
    for name in hashes:
        page = source.get(name, torch.empty(page_bytes, dtype=torch.uint8))
        assert page is not None
        assert target.set(name, page)
    async with open_small(config=config(theirs)) as small:
        # The toy model checks every byte that it reads.
        assert (await small.engine.answer(prompt(6))).account.storage == 6 * PAGE_SIZE
