"""The flat folder that SGLang's file store keeps: the contract, and files written by hand as SGLang writes them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.registry import open_backend
from hicache_actors.backends.sglang_file import SGLangFileBackend
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import BackendContract, content, room


class TestSGLangFile(BackendContract):
    persistent = True

    @pytest.fixture(autouse=True)
    def _medium(self, tmp_path: Path) -> Iterator[None]:
        self.root = tmp_path / "kv"
        self.workers = Workers("contract", 4)
        yield
        assert self.workers.close(10.0) == ()

    async def make(self) -> Backend:
        return SGLangFileBackend(f"sglang-file://{self.root}", self.workers)

    async def medium_put(self, key: str, data: bytes) -> None:
        (self.root / f"{key}.bin").write_bytes(data)

    async def medium_get(self, key: str) -> bytes | None:
        file = self.root / f"{key}.bin"
        return file.read_bytes() if file.exists() else None


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("raw", 2)
    yield workers
    assert workers.close(10.0) == ()


async def test_the_scheme_is_known_and_says_who_shares(tmp_path: Path, workers: Workers) -> None:
    backend = open_backend(f"sglang-file://{tmp_path}/kv", workers)
    assert isinstance(backend, SGLangFileBackend)
    assert backend.scope == "host"


async def test_lengths_are_those_of_the_files(tmp_path: Path, workers: Workers) -> None:
    backend = SGLangFileBackend(f"sglang-file://{tmp_path}/kv", workers)
    await backend.open()
    await backend.write(["a"], [memoryview(bytes(300))])
    (tmp_path / "kv" / "empty.bin").touch()
    assert await backend.lengths(["a", "empty", "absent"]) == [300, None, None]


@pytest.mark.parametrize(
    "url", ["sglang-file:///", "sglang-file://host/kv", "sglang-file:///kv?max_gb=1", "sglang-file:///kv?min_free_gb=x"]
)
def test_urls_that_cannot_be_honoured_are_refused(url: str, workers: Workers) -> None:
    with pytest.raises(ConfigError) as caught:
        SGLangFileBackend(url, workers)
    assert caught.value.field == "storage.url"


async def test_a_folder_that_is_none_is_refused(tmp_path: Path, workers: Workers) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used as a folder"):
        await SGLangFileBackend(f"sglang-file://{tmp_path}/file", workers).open()


async def test_what_is_not_ours_is_left_alone_and_old_pieces_of_dead_writers_go(
    tmp_path: Path, workers: Workers
) -> None:
    old, fresh = (tmp_path / f"page.bin.{digit * 32}.tmp" for digit in "ab")
    for file in (old, fresh, tmp_path / "notes.txt", tmp_path / "a b.bin"):
        file.write_bytes(b"x" * 10)
    (tmp_path / "folder.bin").mkdir()
    os.utime(old, (0, 0))
    backend = SGLangFileBackend(f"sglang-file://{tmp_path}", workers)
    await backend.open()
    assert not old.exists()
    assert fresh.exists()
    assert await backend.exists(["folder"]) == 0
    assert await backend.read(["folder"], room(1, 10)) == [False]
    keys = backend.keys()
    assert [key async for key in keys] == []
    assert backend.stats()["orphans_removed"] == 1
    assert (tmp_path / "notes.txt").exists()


async def test_a_key_that_leads_elsewhere_is_no_key(tmp_path: Path, workers: Workers) -> None:
    backend = SGLangFileBackend(f"sglang-file://{tmp_path}/kv", workers)
    await backend.open()
    for key in ("../x", "/etc/x", "a/b", ""):
        with pytest.raises(BackendError, match="no file name"):
            await backend.write([key], [memoryview(b"x")])
    assert os.listdir(tmp_path) == ["kv"]


async def test_the_floor_of_free_space_holds(tmp_path: Path, workers: Workers) -> None:
    floor_gb = shutil.disk_usage(tmp_path).free / 1e9 + 1000
    backend = SGLangFileBackend(f"sglang-file://{tmp_path}?min_free_gb={floor_gb}", workers)
    await backend.open()
    data = memoryview(content("a", 100))
    assert await backend.write(["a"], [data]) == [Stored.FAILED]
    assert os.listdir(tmp_path) == []
    assert backend.stats()["failed"] == 1


async def test_a_page_that_is_used_again_is_touched(tmp_path: Path, workers: Workers) -> None:
    backend = SGLangFileBackend(f"sglang-file://{tmp_path}", workers)
    await backend.open()
    data = memoryview(content("a", 100))
    assert await backend.write(["a"], [data]) == [Stored.WRITTEN]
    os.utime(tmp_path / "a.bin", (0, 0))
    assert await backend.write(["a"], [data]) == [Stored.PRESENT]
    assert (tmp_path / "a.bin").stat().st_mtime > 0
