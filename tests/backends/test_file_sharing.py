"""One folder, several stores: one cap, the oldest go first, one evictor, and nobody is lied to."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import pytest

from hicache_actors.backends import FileBackend, Stored
from hicache_actors.backends.ledger import disk_bytes
from hicache_actors.backends.objects import HEADER_BYTES, Verdict, seal_many, verify_many
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import content, room

N_BYTES = 5000
BLOCKS = 8192  # what an object of N_BYTES takes on the disk
KEYS = [f"page{i}" for i in range(10)]

Open: TypeAlias = Callable[..., Coroutine[Any, Any, FileBackend]]


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("test", 4)
    yield workers
    assert workers.close(10.0) == ()


@pytest.fixture
async def opened(tmp_path: Path, workers: Workers) -> AsyncIterator[Open]:
    """Stores on the folder of this test, with a cap in objects of N_BYTES."""
    backends: list[FileBackend] = []

    async def open_store(cap: float | None = None, options: str = "") -> FileBackend:
        query = [options] if options else []
        if cap is not None:
            query.append(f"max_gb={cap * BLOCKS / 1e9!r}")
        backend = FileBackend(f"file://{tmp_path}/store?{'&'.join(query)}", workers)
        await backend.open()
        backends.append(backend)
        return backend

    yield open_store
    for backend in backends:
        await backend.close()


async def store(backend: FileBackend, keys: Sequence[str]) -> list[Stored]:
    return await backend.write(keys, [memoryview(content(key, N_BYTES)) for key in keys])


async def fetch(backend: FileBackend, keys: Sequence[str]) -> list[bool]:
    buffers = room(len(keys), N_BYTES)
    found = await backend.read(keys, buffers)
    for key, buffer, ok in zip(keys, buffers, found, strict=True):
        assert not ok or buffer == content(key, N_BYTES)
    return found


def file_of(tmp_path: Path, key: str) -> Path:
    [file] = (tmp_path / "store").glob(f"objects/*/{key}.kv")
    return file


def stored(tmp_path: Path) -> set[str]:
    return {path.stem for path in (tmp_path / "store").glob("objects/*/*.kv")}


def on_disk(tmp_path: Path) -> int:
    total = 0
    for path in (tmp_path / "store").glob("objects/*/*"):
        with contextlib.suppress(FileNotFoundError):
            total += disk_bytes(path.stat().st_size)
    return total


async def age(tmp_path: Path, backend: FileBackend, seconds: dict[str, float]) -> None:
    """Let objects have been used so long ago."""
    for key, since_s in seconds.items():
        then = time.time() - since_s
        os.utime(file_of(tmp_path, key), (then, then))
    assert await backend.reconcile()


def start(program: str, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *args]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def check_count(backend: FileBackend, tmp_path: Path) -> None:
    assert backend.stats()["bytes"] == on_disk(tmp_path)
    assert backend.stats()["objects"] == len(stored(tmp_path))


# -- cap and order ----------------------------------------------------------------------------------------------------


async def test_the_oldest_go_and_not_the_new_ones(tmp_path: Path, opened: Open) -> None:
    """Field report B083: ten entries, all used in the past, and a full disk; three come."""
    backend = await opened(10)
    await store(backend, KEYS)
    order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    await age(tmp_path, backend, {KEYS[i]: 10_000 - rank for rank, i in enumerate(order)})
    assert await store(backend, ["new0", "new1", "new2"]) == [Stored.WRITTEN] * 3
    assert stored(tmp_path) == {*(KEYS[i] for i in order[3:]), "new0", "new1", "new2"}
    assert backend.stats()["evicted"] == 3
    check_count(backend, tmp_path)


async def test_what_is_used_becomes_young(tmp_path: Path, opened: Open) -> None:
    """By a read, and by a write that finds it there."""
    backend = await opened(10)
    await store(backend, KEYS)
    await age(tmp_path, backend, {key: 10_000 - i for i, key in enumerate(KEYS)})
    assert await fetch(backend, KEYS[:2]) == [True] * 2
    assert await store(backend, KEYS[2:4]) == [Stored.PRESENT] * 2
    await store(backend, ["new0", "new1", "new2"])
    assert stored(tmp_path) == {*KEYS[:4], *KEYS[7:], "new0", "new1", "new2"}


async def test_a_hot_object_is_not_touched_all_the_time(tmp_path: Path, opened: Open) -> None:
    backend = await opened()
    await store(backend, KEYS[:1])
    await age(tmp_path, backend, {KEYS[0]: 5})
    before = file_of(tmp_path, KEYS[0]).stat().st_mtime_ns
    await fetch(backend, KEYS[:1])
    assert file_of(tmp_path, KEYS[0]).stat().st_mtime_ns == before


async def test_order_over_many_objects(tmp_path: Path, opened: Open) -> None:
    """Large shards give up their share at once, so the order is nearly that of use: nothing young goes, nothing old stays."""
    backend = await opened(1000)
    keys = [f"k{i}" for i in range(1000)]
    await store(backend, keys)
    await age(tmp_path, backend, {key: 100_000 - i for i, key in enumerate(keys)})
    await store(backend, [f"new{i}" for i in range(250)])
    assert backend.stats()["evicted"] == 250
    left = stored(tmp_path)
    assert {f"new{i}" for i in range(250)} <= left
    assert left.isdisjoint(keys[:120])
    assert left.issuperset(keys[500:])
    check_count(backend, tmp_path)


async def test_a_cap_holds_for_an_earlier_run_too(tmp_path: Path, opened: Open) -> None:
    """Field report B074: what an earlier run has left counts, and is what goes first."""
    earlier = await opened()
    await store(earlier, [f"old{i}" for i in range(40)])
    await age(tmp_path, earlier, {f"old{i}": 1000 for i in range(40)})
    backend = await opened(20)
    for i in range(0, 60, 4):
        assert Stored.FAILED not in await store(backend, [f"k{j}" for j in range(i, i + 4)])
        assert on_disk(tmp_path) <= 20 * BLOCKS
    assert {f"k{i}" for i in range(50, 60)} <= stored(tmp_path) <= {f"k{i}" for i in range(60)}
    check_count(backend, tmp_path)


async def test_files_removed_from_outside(tmp_path: Path, opened: Open) -> None:
    """Field report B086: eviction meets files that are gone already, and the count is put right."""
    backend = await opened(20)
    await store(backend, [f"k{i}" for i in range(20)])
    await age(tmp_path, backend, {f"k{i}": 1000 - i for i in range(20)})
    for i in range(0, 20, 2):
        file_of(tmp_path, f"k{i}").unlink()
    assert await store(backend, [f"new{i}" for i in range(5)]) == [Stored.WRITTEN] * 5
    assert await backend.reconcile()
    check_count(backend, tmp_path)
    assert await store(backend, [f"more{i}" for i in range(5)]) == [Stored.WRITTEN] * 5
    assert {*(f"new{i}" for i in range(5)), *(f"more{i}" for i in range(5))} <= stored(tmp_path)
    assert len(stored(tmp_path)) > 15


async def test_more_than_the_cap_in_one_batch(tmp_path: Path, opened: Open) -> None:
    """The prefix is kept: a batch does not evict its own first pages."""
    backend = await opened(6.5)
    await store(backend, ["old0", "old1"])
    await age(tmp_path, backend, {"old0": 1000, "old1": 1000})
    assert await store(backend, KEYS) == [Stored.WRITTEN] * 6 + [Stored.FAILED] * 4
    assert stored(tmp_path) == set(KEYS[:6])
    assert backend.stats()["refused"] == 4
    assert await backend.write(["huge"], [memoryview(bytes(7 * BLOCKS))]) == [Stored.FAILED]
    assert stored(tmp_path) == set(KEYS[:6])
    check_count(backend, tmp_path)


async def test_files_that_are_not_ours_survive_eviction_and_clear(tmp_path: Path, opened: Open) -> None:
    backend = await opened(10)
    await store(backend, KEYS)
    shard = file_of(tmp_path, KEYS[0]).parent
    foreign = [shard / "notes.txt", shard / "elsewhere.kv", tmp_path / "store" / "quarantine" / "x.txt"]
    for path in foreign:
        path.write_bytes(bytes(50_000))
        os.utime(path, (0, 0))
    for i in range(5):
        await store(backend, [f"more{i}-{j}" for j in range(8)])
    assert await backend.reconcile()
    assert backend.stats()["bytes"] == 10 * BLOCKS
    await backend.clear()
    assert [path.stat().st_size for path in foreign] == [50_000] * 3
    assert stored(tmp_path) == {"elsewhere"}
    assert (backend.stats()["bytes"], backend.stats()["objects"]) == (0, 0)


@pytest.mark.parametrize("anyio_backend", ["virtual"], indirect=True, scope="module")
async def test_the_rolling_check_finds_what_others_did(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the time of some 65 seconds of writing, also in a folder that is too large to be counted at start."""
    first = await opened()
    await store(first, [f"k{i}" for i in range(30)])
    await first.close()
    for i in range(10):
        file_of(tmp_path, f"k{i}").unlink()
    monkeypatch.setattr("hicache_actors.backends.file._COUNT_AT_OPEN", 0)
    backend = await opened()
    assert backend.stats()["objects"] == 30
    for i in range(67):
        await anyio.sleep(1.01)
        await store(backend, [f"new{i % 3}"])
    await backend.delete(["absent"])
    check_count(backend, tmp_path)


# -- several stores ---------------------------------------------------------------------------------------------------


async def test_two_stores_evict_each_others_objects(tmp_path: Path, opened: Open) -> None:
    one, other = await opened(10), await opened(10)
    await store(one, KEYS)
    await age(tmp_path, one, dict.fromkeys(KEYS, 1000))
    assert await store(other, ["new0", "new1"]) == [Stored.WRITTEN] * 2
    assert await one.exists(["new0", "new1"]) == 2
    assert len(stored(tmp_path)) == 10
    assert len(set(KEYS) - stored(tmp_path)) == 2
    assert await one.reconcile()
    assert one.stats()["bytes"] == other.stats()["bytes"] == on_disk(tmp_path)


async def test_writers_of_the_same_keys_are_counted_once(tmp_path: Path, opened: Open) -> None:
    backends = [await opened(100) for _ in range(4)]
    outcomes: list[Stored] = []

    async def write(backend: FileBackend) -> None:
        outcomes.extend(await store(backend, KEYS))

    async with anyio.create_task_group() as group:
        for backend in backends * 2:
            group.start_soon(write, backend)
    assert outcomes.count(Stored.WRITTEN) == 10
    assert outcomes.count(Stored.PRESENT) == 70
    await backends[0].delete(["absent"])
    check_count(backends[0], tmp_path)


WRITER = """
import asyncio, sys
from hicache_actors.backends import FileBackend
from hicache_actors.runtime.workers import Workers

async def main(url, name):
    backend = FileBackend(url, Workers("writer", 4))
    await backend.open()
    failed = 0
    for batch in range(40):
        keys = [f"{name}-{batch}-{i}" for i in range(4)]
        outcomes = await backend.write(keys, [memoryview(bytes(5000))] * 4)
        failed += outcomes.count(0)
    await backend.close()
    print(failed)

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


async def test_processes_share_one_cap(tmp_path: Path, opened: Open) -> None:
    """Field report B074: the folder never holds more than the cap, whoever writes."""
    cap = 64
    url = f"file://{tmp_path}/store?max_gb={cap * BLOCKS / 1e9!r}"
    writers = [start(WRITER, url, name) for name in "abc"]
    most = 0
    while any(writer.poll() is None for writer in writers):
        most = max(most, on_disk(tmp_path))
        await anyio.sleep(0.002)
    assert [(writer.communicate()[0].splitlines()[-1], writer.returncode) for writer in writers] == [("0", 0)] * 3
    assert (
        cap // 2 < most // BLOCKS <= cap + 3 * 4
    )  # a look takes its time: what comes and goes meanwhile is seen twice
    backend = await opened(cap)
    check_count(backend, tmp_path)
    batches = {(key.split("-")[0], int(key.split("-")[1])) for key in stored(tmp_path)}
    assert max(batch for _, batch in batches) == 39
    assert len(stored(tmp_path)) > cap - 8


HOLDER = """
import sys
from hicache_actors.backends.evictor import Evictor
from hicache_actors.backends.folder import Folder

evictor = Evictor(Folder(sys.argv[1]))
print(evictor.elect(), flush=True)
sys.stdin.read()
"""


async def test_when_the_evictor_dies_the_next_one_takes_over(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_actors.backends.room._ELECTION_S", 0.05)
    backend = await opened(10)
    await store(backend, KEYS)
    holder = start(HOLDER, f"{tmp_path}/store")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    assert await store(backend, ["a", "b"]) == [Stored.FAILED] * 2  # it does nothing, and we do not wait for ever
    assert stored(tmp_path) == set(KEYS)
    assert await fetch(backend, KEYS) == [True] * 10
    holder.kill()
    holder.communicate()
    assert await store(backend, ["a", "b"]) == [Stored.WRITTEN] * 2
    check_count(backend, tmp_path)


# -- quarantine -------------------------------------------------------------------------------------------------------


async def test_a_good_object_in_the_place_of_a_bad_one_stays(tmp_path: Path, opened: Open) -> None:
    one, other = await opened(), await opened()
    namespace, hashes = b"n" * 16, [b"h" * 32]
    good = room(1, HEADER_BYTES + 1000)
    seal_many(good, namespace, hashes)
    await one.write(["k"], good)
    file_of(tmp_path, "k").write_bytes(bytes(HEADER_BYTES + 1000))
    back = room(1, HEADER_BYTES + 1000)
    assert await one.read(["k"], back) == await other.read(["k"], back) == [True]
    assert await other.quarantine("k")
    assert await other.write(["k"], good) == [Stored.WRITTEN]
    assert not await one.quarantine("k")  # what it has read is gone already
    assert await one.read(["k"], back) == [True]
    assert verify_many(back, namespace, hashes) == [Verdict.OK]
    assert one.stats().get("quarantined", 0) == 0
    check_count(one, tmp_path)


async def test_a_good_object_that_comes_at_the_last_instant_stays(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = await opened()
    await backend.write(["k"], [memoryview(b"bad!!")])
    await backend.read(["k"], room(1, 5))
    file = file_of(tmp_path, "k")
    rename = os.rename

    def exchange_and_rename(source: bytes, target: bytes) -> None:
        (tmp_path / "good").write_bytes(b"good!")
        rename(tmp_path / "good", file)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("hicache_actors.backends.folder.os.rename", exchange_and_rename)
        assert not await backend.quarantine("k")
    assert file.read_bytes() == b"good!"
    assert list((tmp_path / "store" / "quarantine").iterdir()) == []
    assert await backend.reconcile()
    check_count(backend, tmp_path)


# -- what is known ----------------------------------------------------------------------------------------------------


async def test_without_a_cache_the_disk_is_asked(tmp_path: Path, opened: Open) -> None:
    backend = await opened()
    await store(backend, KEYS)
    file_of(tmp_path, KEYS[4]).unlink()
    assert await backend.exists(KEYS) == 4


@pytest.mark.parametrize("anyio_backend", ["virtual"], indirect=True, scope="module")
@pytest.mark.parametrize("ttl", ["5", "never"])
async def test_a_stale_answer_is_a_hint_and_never_a_lie(tmp_path: Path, opened: Open, ttl: str) -> None:
    one, other = await opened(options=f"metadata_ttl_s={ttl}"), await opened()
    await store(one, KEYS)
    await other.delete(KEYS[5:])
    assert await one.exists(KEYS) == 10  # stale ...
    assert await store(one, KEYS[5:7]) == [Stored.WRITTEN] * 2  # ... but a write looks at the disk
    assert await fetch(other, KEYS[5:7]) == [True] * 2
    assert await fetch(one, KEYS) == [True] * 7 + [False] * 3
    assert await one.exists(KEYS) == 7  # the misses have put it right
    await store(other, KEYS[7:])
    assert await one.exists(KEYS) == 10  # what others store is seen at once
    await other.delete(KEYS[9:])
    await anyio.sleep(4.9)
    assert await one.exists(KEYS) == 10
    await anyio.sleep(0.2)
    assert await one.exists(KEYS) == (10 if ttl == "never" else 9)


@pytest.mark.parametrize("forget", ["delete", "quarantine", "clear"])
async def test_what_we_removed_ourselves_is_not_known(opened: Open, forget: str) -> None:
    backend = await opened(options="metadata_ttl_s=never")
    await store(backend, KEYS)
    if forget == "delete":
        await backend.delete(KEYS[3:])
    elif forget == "quarantine":
        await backend.quarantine(KEYS[3])
    else:
        await backend.clear()
    assert await backend.exists(KEYS) == (0 if forget == "clear" else 3)


async def test_what_is_known_is_bounded(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_actors.backends.known.MAX_KEYS", 6)
    monkeypatch.setattr("hicache_actors.backends.file._KEEP_IDENTITIES", 6)
    backend = await opened(options="metadata_ttl_s=never")
    await store(backend, KEYS)
    await fetch(backend, KEYS[:4])
    await fetch(backend, KEYS[4:])
    assert len(backend._known) == 6
    assert [key for batch in backend._read_as for key in batch] == KEYS[4:]
    assert await backend.exists(KEYS) == 10
