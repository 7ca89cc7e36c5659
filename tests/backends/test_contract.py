"""The contract suite on memory, on files, and on files behind each wrapper."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from hicache_actors.backends import Backend, Faulty, FileBackend, Hanging, Logging, MemoryBackend, Slow, Stored
from hicache_actors.backends.memory import _named_stores
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import BackendContract

ContractTest: TypeAlias = Callable[[BackendContract, Backend], Awaitable[None]]

_names = (f"contract-{n}" for n in itertools.count())


class TestMemory(BackendContract):
    persistent = True

    @pytest.fixture(autouse=True)
    def _medium(self) -> Iterator[None]:
        self.name = next(_names)
        self.objects = _named_stores.setdefault(self.name, {})
        yield
        del _named_stores[self.name]

    async def make(self) -> Backend:
        return MemoryBackend(f"memory://{self.name}")

    async def medium_put(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    async def medium_get(self, key: str) -> bytes | None:
        return self.objects.get(key)


@pytest.mark.usefixtures("both_ways")
class TestFile(BackendContract):
    persistent = True

    @pytest.fixture(autouse=True)
    def _medium(self, tmp_path: Path) -> Iterator[None]:
        self.root = tmp_path / "store"
        self.workers = Workers("contract", 4)
        yield
        assert self.workers.close(10.0) == ()

    def file(self, key: str) -> Path | None:
        """The file of ``key``, found by its name alone."""
        return next(self.root.glob(f"objects/*/{key}.kv"), None)

    async def make(self) -> Backend:
        return FileBackend(f"file://{self.root}", self.workers)

    async def medium_put(self, key: str, data: bytes) -> None:
        file = self.file(key)
        if file is None:  # where it belongs is seen from a file that the backend makes
            scout = await self.make()
            await scout.open()
            await scout.write([key], [memoryview(b"scout")])
            await scout.close()
            file = self.file(key)
            assert file is not None
        file.write_bytes(data)

    async def medium_get(self, key: str) -> bytes | None:
        file = self.file(key)
        return None if file is None else file.read_bytes()


class TestSlowFile(TestFile):
    async def make(self) -> Backend:
        return Slow(await super().make(), 0.001, object_s=1e-6, bytes_per_s=1e9, jitter_s=0.001, seed=1)


class TestHealthyFaultyFile(TestFile):
    async def make(self) -> Backend:
        return Faulty(await super().make(), lambda access: None)


class TestReleasedHangingFile(TestFile):
    async def make(self) -> Backend:
        hanging = Hanging(await super().make(), ("exists", "read", "write"))
        hanging.release()
        return hanging


class TestLoggedFile(TestFile):
    async def make(self) -> Backend:
        return Logging(await super().make())


def on(anyio_backend: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("anyio_backend", [anyio_backend], indirect=True, scope="module")


@on("uvloop")
class TestFileOnUvloop(TestFile):
    pass


@on("virtual:3")
class TestFileInVirtualTime(TestFile):
    """Workers run their calls on the loop there, so that a whole cache with files can be tested in virtual time."""


@on("virtual:4")
class TestMemoryInVirtualTime(TestMemory):
    pass


class CountingBackend(MemoryBackend):
    """Answers `exists` with a count, as many stores do, where the leading run is asked for."""

    async def exists(self, keys: Sequence[str]) -> int:
        return sum([await MemoryBackend.exists(self, [key]) for key in keys])


class CachingBackend(MemoryBackend):
    """Keeps the caller's buffer instead of its bytes."""

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        outcomes = await super().write(keys, buffers)
        self._objects.update(zip(keys, buffers, strict=True))  # type: ignore[arg-type]
        return outcomes


class ReplacingBackend(MemoryBackend):
    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        await self.delete(keys)
        return await super().write(keys, buffers)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (CountingBackend, BackendContract.test_exists_is_the_length_of_the_leading_run),
        (CachingBackend, BackendContract.test_a_buffer_may_change_once_the_write_has_ended),
        (ReplacingBackend, BackendContract.test_an_object_that_is_there_is_kept),
    ],
)
async def test_the_suite_finds_a_broken_backend(broken: type[MemoryBackend], test: ContractTest) -> None:
    await test(BackendContract(), MemoryBackend())
    with pytest.raises(AssertionError):
        await test(BackendContract(), broken())
