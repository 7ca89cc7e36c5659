"""What every storage backend must do, as tests to inherit.  Needs pytest and anyio's plugin, which comes with anyio.

::

    class TestMyBackend(BackendContract):
        persistent = True

        async def make(self) -> Backend:             # a backend on the medium of this test, not yet opened
            return MyBackend(...)

        async def medium_put(self, key, data): ...   # reach the medium WITHOUT the backend
        async def medium_get(self, key): ...

Each test has an instance of the class, and so a medium, of its own.  The two hooks matter: a backend that only ever meets
its own bookkeeping may be wrong about what it has stored.
"""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Mapping, Sequence

import anyio
import pytest

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.objects import HEADER_BYTES, Verdict, seal_many, verify_many
from hicache_actors.keys import Namespace, Prompt, Rank, SuffixKeys


def content(key: str, n_bytes: int) -> bytes:
    """Bytes that no other key has."""
    return random.Random(key).randbytes(n_bytes)


def room(n_objects: int, n_bytes: int) -> list[memoryview]:
    """Buffers as the cache gives them: slices of one memory, filled with a pattern."""
    memory = memoryview(bytearray(b"\xa5" * (n_objects * n_bytes)))
    return [memory[i * n_bytes : (i + 1) * n_bytes] for i in range(n_objects)]


class BackendContract:
    """Subclass as ``Test...`` and write `make`, `medium_put` and `medium_get`."""

    pytestmark = pytest.mark.anyio

    persistent = False
    """True when a second backend on the same medium finds what the first one wrote."""

    lists_keys = True
    """False for a store that cannot list its keys: then `keys` names none."""

    replaces = True
    """False for a store that keeps for good what lies under a key: what is bad there is a miss and is not written anew."""

    object_bytes = 5000
    """Length of most objects; no round number, so that nothing fits by accident."""

    async def make(self) -> Backend:
        raise NotImplementedError

    async def medium_put(self, key: str, data: bytes) -> None:
        """Make the medium hold ``data`` under ``key``, whatever it held before."""
        raise NotImplementedError

    async def medium_get(self, key: str) -> bytes | None:
        raise NotImplementedError

    @pytest.fixture
    async def backend(self) -> AsyncIterator[Backend]:
        backend = await self.make()
        await backend.open()
        yield backend
        await backend.close()

    async def store(self, backend: Backend, keys: Sequence[str]) -> Sequence[Stored]:
        return await backend.write(keys, [memoryview(content(key, self.object_bytes)) for key in keys])

    async def fetch(self, backend: Backend, keys: Sequence[str]) -> list[bytes | None]:
        buffers = room(len(keys), self.object_bytes)
        found = await backend.read(keys, buffers)
        assert len(found) == len(keys)
        return [bytes(buffer) if ok else None for ok, buffer in zip(found, buffers, strict=True)]

    async def listed(self, backend: Backend) -> list[str]:
        keys = backend.keys()
        return sorted([key async for key in keys])

    def contents(self, keys: Sequence[str]) -> list[bytes]:
        return [content(key, self.object_bytes) for key in keys]

    # -- an empty store -----------------------------------------------------------------------------------------------

    async def test_nothing_is_there_at_first(self, backend: Backend) -> None:
        assert await backend.exists(["a", "b"]) == 0
        assert await self.fetch(backend, ["a", "b"]) == [None, None]
        assert await backend.delete(["a", "b"]) == 0
        assert not await backend.quarantine("a")
        assert await self.listed(backend) == []
        await backend.clear()

    async def test_empty_batches_are_fine(self, backend: Backend) -> None:
        assert await backend.exists([]) == 0
        assert list(await backend.read([], [])) == []
        assert list(await backend.write([], [])) == []
        assert await backend.delete([]) == 0

    # -- exists -------------------------------------------------------------------------------------------------------

    async def test_exists_is_the_length_of_the_leading_run(self, backend: Backend) -> None:
        await self.store(backend, ["a", "b", "d"])
        assert await backend.exists(["a", "b", "c", "d"]) == 2
        assert await backend.exists(["d", "a", "b"]) == 3
        assert await backend.exists(["c", "a"]) == 0
        assert await backend.exists(["a", "a", "b"]) == 3

    async def test_exists_sees_the_medium(self, backend: Backend) -> None:
        await self.medium_put("a", content("a", self.object_bytes))
        await self.store(backend, ["b"])
        assert await backend.exists(["a", "b", "c"]) == 2

    async def test_exists_agrees_with_read(self, backend: Backend) -> None:
        present = [f"p{i}" for i in range(10)]
        absent = [f"q{i}" for i in range(5)]
        await self.store(backend, present)
        for key in present + absent:
            assert await backend.exists([key]) == (key in present)
        assert await backend.exists(present + absent) == 10
        assert await self.fetch(backend, present + absent) == [*self.contents(present), *[None] * 5]

    # -- read and write -----------------------------------------------------------------------------------------------

    async def test_what_was_written_is_read_back(self, backend: Backend) -> None:
        keys = ["x", "y", "z"]
        assert list(await self.store(backend, keys)) == [Stored.WRITTEN] * 3
        assert await self.fetch(backend, keys[::-1]) == self.contents(keys[::-1])

    async def test_the_medium_holds_what_was_written(self, backend: Backend) -> None:
        await self.store(backend, ["x", "y"])
        assert await self.medium_get("x") == content("x", self.object_bytes)
        assert await self.medium_get("y") == content("y", self.object_bytes)
        assert await self.medium_get("z") is None

    async def test_what_the_medium_holds_is_read(self, backend: Backend) -> None:
        await self.medium_put("x", content("x", self.object_bytes))
        assert await self.fetch(backend, ["x"]) == self.contents(["x"])

    async def test_a_missing_object_does_not_spoil_its_batch(self, backend: Backend) -> None:
        await self.store(backend, ["a", "c"])
        a, b, c = await self.fetch(backend, ["a", "b", "c"])
        assert (a, b, c) == (content("a", self.object_bytes), None, content("c", self.object_bytes))

    async def test_only_the_buffers_are_filled(self, backend: Backend) -> None:
        n_bytes = self.object_bytes
        await self.store(backend, ["a"])
        memory = bytearray(b"\x5a" * (3 * n_bytes))
        assert list(await backend.read(["a"], [memoryview(memory)[n_bytes : 2 * n_bytes]])) == [True]
        assert bytes(memory) == b"\x5a" * n_bytes + content("a", n_bytes) + b"\x5a" * n_bytes

    async def test_a_buffer_may_change_once_the_write_has_ended(self, backend: Backend) -> None:
        buffer = bytearray(content("a", self.object_bytes))
        await backend.write(["a"], [memoryview(buffer)])
        buffer[:] = bytes(len(buffer))
        assert await self.fetch(backend, ["a"]) == self.contents(["a"])

    async def test_an_object_that_is_there_is_kept(self, backend: Backend) -> None:
        await self.store(backend, ["a"])
        other = [memoryview(content(key, self.object_bytes)) for key in ("other", "b")]
        assert list(await backend.write(["a", "b"], other)) == [Stored.PRESENT, Stored.WRITTEN]
        assert await self.fetch(backend, ["a", "b"]) == self.contents(["a", "b"])

    @pytest.mark.parametrize("n_bytes", [1, 4096, 100_003, 2**20 + 1])
    async def test_lengths(self, backend: Backend, n_bytes: int) -> None:
        data = content("length", n_bytes)
        assert list(await backend.write(["a"], [memoryview(data)])) == [Stored.WRITTEN]
        [buffer] = room(1, n_bytes)
        assert list(await backend.read(["a"], [buffer])) == [True]
        assert buffer == data

    async def test_a_large_batch(self, backend: Backend) -> None:
        keys = [f"k{i}" for i in range(200)]
        assert list(await self.store(backend, keys)) == [Stored.WRITTEN] * 200
        assert await backend.exists(keys) == 200
        assert await self.fetch(backend, keys) == self.contents(keys)

    async def test_keys_are_told_apart(self, backend: Backend) -> None:
        keys = ["key", "KEY", "Key", "key_", "key-", "key.1", "ke", "k" * 200]
        await self.store(backend, keys)
        assert await self.fetch(backend, keys) == self.contents(keys)

    # -- bad objects --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("change", ["shorter", "longer", "empty"])
    async def test_an_object_of_another_length_is_a_miss(self, backend: Backend, change: str) -> None:
        """... and it may be written anew: a truncated object must not block its key for ever."""
        whole = content("b", self.object_bytes)
        await self.store(backend, ["a", "b", "c"])
        await self.medium_put("b", {"shorter": whole[:-1], "longer": whole + b"x", "empty": b""}[change])
        assert await self.fetch(backend, ["a", "b", "c"]) == [
            content("a", self.object_bytes), None, content("c", self.object_bytes),
        ]  # fmt: skip
        await self._written_anew(backend, "b")

    async def test_a_quarantined_object_is_gone_and_may_be_written_anew(self, backend: Backend) -> None:
        await self.medium_put("a", bytes(self.object_bytes))
        await self.store(backend, ["b"])
        assert await backend.quarantine("a")
        assert await backend.exists(["a"]) == 0
        assert await self.fetch(backend, ["a", "b"]) == [None, content("b", self.object_bytes)]
        assert not await backend.quarantine("a")
        await self._written_anew(backend, "a")

    async def _written_anew(self, backend: Backend, key: str) -> None:
        assert list(await self.store(backend, [key])) == [Stored.WRITTEN if self.replaces else Stored.FAILED]
        assert await self.fetch(backend, [key]) == (self.contents([key]) if self.replaces else [None])

    async def test_sealed_objects_come_back_sealed(self, backend: Backend) -> None:
        facts = {"model_id": "org/model", "weights": "epoch-1", "dtype": "bfloat16", "layout": "page_first"}
        scheme = SuffixKeys(
            Namespace(**facts, page_size=4, total_kv_heads=8, head_group=4, layer_partition=2, replicated=False),
            Rank(tp_rank=1, tp_size=2),
        )
        hashes = Prompt(range(12)).page_hashes(4, 3)
        objects = room(3, HEADER_BYTES + 1000)
        seal_many(objects, scheme.namespace_digest, hashes, scheme.chunks)
        keys = scheme.keys(hashes)
        await backend.write(keys, objects)
        back = room(3, HEADER_BYTES + 1000)
        assert await backend.exists(keys) == 3
        assert list(await backend.read(keys, back)) == [True] * 3
        assert verify_many(back, scheme.namespace_digest, hashes, scheme.chunks) == [Verdict.OK] * 3

    async def test_lengths_of_what_is_there(self, backend: Backend) -> None:
        assert list(await backend.lengths([])) == []
        await backend.write(["a", "b"], [memoryview(content("a", 5000)), memoryview(content("b", 4999))])
        assert list(await backend.lengths(["a", "absent", "b"])) in ([5000, None, 4999], [None] * 3)

    # -- removal ------------------------------------------------------------------------------------------------------

    async def test_delete(self, backend: Backend) -> None:
        await self.store(backend, ["a", "b", "c"])
        assert await backend.delete(["a", "x", "c"]) == 2
        assert await self.fetch(backend, ["a", "b", "c"]) == [None, content("b", self.object_bytes), None]
        if self.replaces:
            assert await self.medium_get("a") is None
        assert list(await self.store(backend, ["a"])) == [Stored.WRITTEN]

    async def test_keys_and_clear(self, backend: Backend) -> None:
        await self.store(backend, ["a", "b"])
        await self.medium_put("c", content("c", self.object_bytes))
        assert await self.listed(backend) == (["a", "b", "c"] if self.lists_keys else [])
        await backend.clear()
        assert await self.listed(backend) == []
        assert await backend.exists(["a"]) == 0
        assert await self.fetch(backend, ["a", "b", "c"]) == [None] * 3

    # -- many at once -------------------------------------------------------------------------------------------------

    async def test_calls_run_concurrently(self, backend: Backend) -> None:
        batches = [[f"{batch}-{i}" for i in range(8)] for batch in range(12)]
        fetched: dict[int, list[bytes | None]] = {}

        async def round_trip(batch: int) -> None:
            await self.store(backend, batches[batch])
            fetched[batch] = await self.fetch(backend, batches[batch])

        async with anyio.create_task_group() as group:
            for batch in range(12):
                group.start_soon(round_trip, batch)
        assert [fetched[batch] for batch in range(12)] == [self.contents(keys) for keys in batches]

    async def test_writers_of_one_key_and_its_readers(self, backend: Backend) -> None:
        """A reader finds no object or a whole one, and no writer fails."""
        outcomes: list[Stored] = []
        seen: list[bytes | None] = []

        async def write() -> None:
            outcomes.extend(await self.store(backend, ["a"]))

        async def read() -> None:
            seen.extend(await self.fetch(backend, ["a"]))

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(write)
                group.start_soon(read)
        assert Stored.FAILED not in outcomes
        assert Stored.WRITTEN in outcomes
        assert set(seen) <= {None, content("a", self.object_bytes)}
        assert await self.fetch(backend, ["a"]) == self.contents(["a"])

    async def test_removal_races_with_reads(self, backend: Backend) -> None:
        keys = [f"k{i}" for i in range(16)]
        await self.store(backend, keys)
        seen: list[bytes | None] = []

        async def read() -> None:
            seen.extend(await self.fetch(backend, keys))

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(read)
            group.start_soon(backend.delete, keys[:8])
            group.start_soon(backend.delete, keys[4:12])
        assert set(seen) <= {None, *self.contents(keys)}
        assert await self.fetch(backend, keys) == [*[None] * 12, *self.contents(keys[12:])]

    # -- life ---------------------------------------------------------------------------------------------------------

    async def test_stats_are_scalars_for_any_thread(self, backend: Backend) -> None:
        await self.store(backend, ["a"])
        await self.fetch(backend, ["a", "b"])
        answers: list[Mapping[str, int | float | str]] = []
        thread = threading.Thread(target=lambda: answers.append(backend.stats()))
        thread.start()
        thread.join()
        assert all(isinstance(value, int | float | str) for value in answers[0].values())

    async def test_close_twice(self) -> None:
        backend = await self.make()
        await backend.open()
        await self.store(backend, ["a"])
        await backend.close()
        await backend.close()
        other = await self.make()
        await other.open()
        assert await other.exists(["b"]) == 0
        await other.close()

    async def test_a_second_life(self) -> None:
        if not self.persistent:
            pytest.skip("this medium ends with its backend")
        keys = [f"k{i}" for i in range(20)]
        first = await self.make()
        await first.open()
        await self.store(first, keys)
        await first.close()
        second = await self.make()
        await second.open()
        assert await second.exists([*keys, "absent"]) == 20
        assert await self.listed(second) == (sorted(keys) if self.lists_keys else [])
        assert await self.fetch(second, keys) == self.contents(keys)
        assert list(await self.store(second, keys)) == [Stored.PRESENT] * 20
        await second.close()
