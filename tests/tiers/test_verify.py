"""How much of what is read is compared, and the scrubber that compares the rest in its own time."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec
import pytest

from hicache_actors.backends.backend import Stored
from hicache_actors.backends.file import FileBackend
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.objects import HEADER_BYTES, Verdict, verify_many
from hicache_actors.backends.wrappers import Access, Fault, Faulty, Wrapper
from hicache_actors.config import HostConfig, HostLayout, StorageConfig
from hicache_actors.keys import KeyScheme, Namespace, Shard, UnifiedKeys
from hicache_actors.runtime import Workers
from hicache_actors.testing.small import open_small, prompt, small_config
from hicache_actors.tiers.storage.pages import of_pages, sampling
from hicache_actors.tiers.storage.scrub import REST_S, Names, Scrubber
from hicache_actors.tiers.storage.words import Counted

from .kit import Lone, hashes

VIRTUAL = pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)


def flipping(access: Access) -> Fault | None:
    return Fault.FLIP if access.verb == "read" else None


# -- how much is compared -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verify", "good", "corrupt"), [("always", 0, 40), ("off", 40, 0)])
async def test_a_flipped_bit_in_the_payload_is_found_where_checksums_are_compared(
    verify: str, good: int, corrupt: int
) -> None:
    lone = Lone(Faulty(MemoryBackend(), flipping), verify=verify)
    await lone.save(0, 40)
    assert await lone.read(0, 40).answer() == good
    assert lone.pages["corrupt_pages"] == corrupt
    await lone.settled()
    await lone.close()


async def test_an_object_that_is_being_put_away_is_not_counted_again() -> None:
    class Slow(Faulty):
        async def quarantine(self, key: str) -> bool:
            await away.wait()
            return await super().quarantine(key)

    away = asyncio.Event()
    lone = Lone(Slow(MemoryBackend(), flipping))
    await lone.save(0, 2)
    for _ in range(3):
        assert await lone.read(0, 2).answer() == 0
    assert lone.pages["corrupt_pages"] == lone.begun["quarantine"] == 2
    away.set()
    await lone.settled()
    await lone.save(0, 2)  # and bad again
    assert await lone.read(0, 2).answer() == 0
    assert lone.pages["corrupt_pages"] == 4
    await lone.settled()
    await lone.close()


@pytest.mark.parametrize("verify", ["sampled", "off"])
async def test_what_is_stored_has_its_checksum_however_little_is_compared(verify: str, tmp_path: Path) -> None:
    """Others, and the scrubber, compare more."""
    workers = Workers("files", 2)
    lone = Lone(FileBackend(f"file://{tmp_path}", workers), verify=verify, verify_every=1000)
    await lone.store.open(10.0)
    await lone.save(0, 3)
    for name, page_hash in zip(lone.store.keys.keys(hashes(0, 3)), hashes(0, 3), strict=True):
        [file] = tmp_path.glob(f"objects/*/{name}.kv")  # noqa: ASYNC240
        whole = verify_many(
            [memoryview(file.read_bytes())], lone.store.keys.namespace_digest, [page_hash], lone.store.keys.chunks
        )
        assert whole == [Verdict.OK]
    await lone.close()
    assert workers.close(10.0) == ()


async def test_sampling_finds_a_share_of_what_is_bad() -> None:
    lone = Lone(Faulty(MemoryBackend(), flipping), verify="sampled", verify_every=4)
    await lone.save(0, 60)
    assert await lone.read(0, 60).answer() < 60, "the odds are one in 30 millions"
    assert 0 < lone.pages["corrupt_pages"] < 60
    await lone.settled()
    await lone.close()


@pytest.mark.parametrize("verify", ["sampled", "off"])
async def test_another_namespace_is_a_miss_however_little_is_compared(verify: str) -> None:
    backend = MemoryBackend()
    lone = Lone(backend, verify=verify, verify_every=1000)
    lone.store.keys = lone.store.keys.with_weights("v2")
    await lone.save(0, 3)
    theirs, ours = lone.store.keys.keys(hashes(0, 3)), lone.store.keys.with_weights("v1")
    await backend.write(ours.keys(hashes(0, 3)), [memoryview(backend._objects[key]) for key in theirs])
    lone.store.keys = ours
    assert await lone.read(0, 3).answer() == 0
    assert lone.pages["foreign_pages"] == 3
    await lone.close()


def test_how_often_checksums_are_asked_for() -> None:
    always, off = sampling(StorageConfig()), sampling(StorageConfig(verify="off"))
    assert all(always() for _ in range(100))
    assert not any(off() for _ in range(100))
    sampled = sampling(StorageConfig(verify="sampled", verify_every=8))
    assert 900 < sum(sampled() for _ in range(10_000)) < 1_600


def test_all_objects_of_a_page_are_compared_or_none() -> None:
    asked: list[bool] = []

    def every_other() -> bool:
        asked.append(len(asked) % 2 == 0)
        return asked[-1]

    empty = [memoryview(bytearray(HEADER_BYTES + 8)) for _ in range(12)]
    assert (
        verify_many(empty, b"n" * 16, [bytes([n]) * 32 for n in range(4)], (1, 2, 3), every_other)
        == [Verdict.EMPTY] * 12
    )
    assert len(asked) == 4


def test_what_becomes_of_a_page_follows_from_all_of_its_objects() -> None:
    failed, written, present = Stored.FAILED, Stored.WRITTEN, Stored.PRESENT
    answers = [present, present, written, present, written, failed, failed, failed, present]
    assert of_pages(answers, 2) == [present, written, failed, failed]
    assert of_pages(answers, 1) == answers


# -- the scrubber -------------------------------------------------------------------------------------------------------


class _Peeks(Wrapper):
    """Notes what is peeked at and when."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.peeks: list[tuple[float, int]] = []

    async def peek(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        self.peeks.append((anyio.current_time(), sum(map(len, buffers))))
        return await super().peek(keys, buffers)


def flip(backend: MemoryBackend, keys: Sequence[str]) -> None:
    for key in keys:
        data = bytearray(backend._objects[key])
        data[HEADER_BYTES + 5] ^= 1
        backend._objects[key] = bytes(data)


def other_names(keys: KeyScheme) -> list[str]:
    """Names that look like ours and are not."""
    [name] = keys.keys(hashes(0, 1))
    return ["x", "z" * 64 + name[64:], name[:-1], name + "0", keys.with_weights("v9").keys(hashes(0, 1))[0]]


@VIRTUAL
@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
async def test_bad_objects_are_put_away_before_they_are_asked_for(layout: HostLayout, anyio_backend: object) -> None:
    backend = MemoryBackend()
    config = msgspec.structs.replace(small_config(scrub_mb_s=1.0), host=HostConfig(pages=32, layout=layout))
    async with open_small(config=config, backend=backend) as small:
        await small.engine.answer(prompt(8))
        assert await small.cache.drain(10.0) == 0
        keys = small.store.keys
        names = keys.keys(prompt(8).page_hashes(4, 8))
        strangers = other_names(keys)
        await backend.write(strangers, [memoryview(b"strange")] * len(strangers))
        flip(backend, names[2:4])
        await anyio.sleep(REST_S + 1)
        snapshot = small.cache.snapshot().storage
        assert snapshot is not None
        assert (snapshot.scrubbed_objects, snapshot.scrubbed_bad_objects, snapshot.corrupt_pages) == (8, 2, 2)
        assert snapshot.scrubbed_bytes == 8 * small.store.chunk_bytes[0]
        assert await backend.exists(strangers) == len(strangers)
        assert set(names) & set(backend._objects) == {*names[:2], *names[4:]}
        await small.cache.reset()
        assert (await small.engine.answer(prompt(8))).account.storage == 2 * 4


@VIRTUAL
async def test_the_budget_holds_and_readers_come_first(anyio_backend: object) -> None:
    backend = _Peeks(MemoryBackend())
    lone = Lone(backend)
    await lone.save(0, 60)
    object_bytes = lone.store.chunk_bytes[0]
    counted: Counter[str] = Counter()

    def note(message: object) -> None:
        assert isinstance(message, Counted)
        counted[message.what] += message.pages

    scrubber = Scrubber(lambda: lone.store, 10.0 * object_bytes, lone.workers, note)
    begun_s = anyio.current_time()
    async with anyio.create_task_group() as group:
        group.start_soon(scrubber.run)
        await anyio.sleep(30.0)
        group.cancel_scope.cancel()
    assert counted["scrubbed_objects"] == 60
    first_s = backend.peeks[0][0]
    assert first_s - begun_s < 1.0
    assert sum(each for _, each in backend.peeks) == counted["scrubbed_bytes"] == 60 * object_bytes
    for (at_s, each), (next_s, _) in zip(backend.peeks, backend.peeks[1:], strict=False):
        assert next_s - at_s >= each / (10.0 * object_bytes)
    await lone.close()


async def test_scrubbing_files_is_no_use_of_them(tmp_path: Path) -> None:
    workers = Workers("scrub", 2)
    backend = FileBackend(f"file://{tmp_path}", workers)
    await backend.open()
    keys = [f"k{n}" for n in range(3)]
    await backend.write(keys, [memoryview(b"x" * 5000)] * 3)
    files = sorted(tmp_path.glob("objects/*/*.kv"))  # noqa: ASYNC240
    for file in files:
        os.utime(file, (1000, 1000))
    buffers = [memoryview(bytearray(5000)) for _ in keys]
    assert await backend.peek([*keys, "absent"], [*buffers, memoryview(bytearray(5000))]) == [True, True, True, False]
    assert all(bytes(buffer) == b"x" * 5000 for buffer in buffers)
    assert [file.stat().st_mtime for file in files] == [1000] * 3
    await backend.read(keys, buffers)
    assert all(file.stat().st_mtime > 1000 for file in files)
    await backend.close()
    assert workers.close(10.0) == ()


async def test_a_bad_file_goes_to_the_quarantine(tmp_path: Path) -> None:
    workers = Workers("scrub", 2)
    lone = Lone(FileBackend(f"file://{tmp_path}", workers))
    await lone.store.open(10.0)
    await lone.save(0, 6)
    [name] = lone.store.keys.keys(hashes(3, 1))
    [file] = tmp_path.glob(f"objects/*/{name}.kv")  # noqa: ASYNC240
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x80
    file.write_bytes(data)
    scrubber = Scrubber(lambda: lone.store, 1e9, lone.workers, lone._note)
    with anyio.move_on_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(scrubber.run)
            while file.exists() or lone.pages["scrubbed_objects"] < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            group.cancel_scope.cancel()
    assert not file.exists()
    assert lone.pages["scrubbed_bad_objects"] == 1
    await lone.settled()
    assert await lone.query(0, 6).answer() == 3
    await lone.close()
    assert workers.close(10.0) == ()


def test_names_are_recognised_whole() -> None:
    of = Namespace(
        model_id="m", weights="v1", dtype="bfloat16", page_size=4, layout="page_unified", total_kv_heads=8, head_group=4,
        layer_partition=2, replicated=False,
    )  # fmt: skip
    keys = UnifiedKeys(of, Shard(0, 4, 8))
    names = Names(keys)
    page = hashes(4, 1)[0]
    assert [names.find(name) for name in keys.keys([page])] == [(page, number) for number in range(4)]
    theirs = UnifiedKeys(msgspec.structs.replace(of, weights="v2"), Shard(0, 4, 8)).keys([page])
    for name in (*theirs, "x", "g" * 64 + keys.keys([page])[0][64:], keys.keys([page])[0] + "x"):
        assert names.find(name) is None
