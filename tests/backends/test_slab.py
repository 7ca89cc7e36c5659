"""``slab://``, ``mmap://`` and ``shm://``: the contract, limits, and several processes at one store."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_actors.backends import Backend, Stored
from hicache_actors.backends.slab import SlabBackend, SlabOptions
from hicache_actors.backends.slab.doorkeeper import Doorkeeper
from hicache_actors.backends.slab.entries import ENTRY_BYTES, WRITING
from hicache_actors.backends.slab.store_file import ALIGN, NAME, Geometry, StoreFile
from hicache_actors.cuda_ext.native import slab
from hicache_actors.cuda_ext.native import slots as native
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import BackendContract, content, room

pytestmark = pytest.mark.anyio

_names = (f"test-{os.getpid()}-{n}" for n in itertools.count())


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("slab", 8)
    yield workers
    assert workers.close(20.0) == ()


async def file_of(backend: SlabBackend) -> StoreFile | None:
    store = await backend._found()
    return None if store is None else store.file


class _Contract(BackendContract):
    persistent = True

    @pytest.fixture(autouse=True)
    def _medium(self, workers: Workers, tmp_path: Path) -> Iterator[None]:
        self.workers = workers
        self.url = self.url_of(tmp_path)
        yield
        shutil.rmtree(SlabOptions.parse(self.url).folder, ignore_errors=True)

    def url_of(self, folder: Path) -> str:
        raise NotImplementedError

    async def make(self) -> Backend:
        return SlabBackend(self.url, self.workers)

    async def other(self) -> SlabBackend:
        """As another process would: nothing but the file is shared."""
        backend = SlabBackend(self.url, self.workers)
        await backend.open()
        return backend

    async def medium_put(self, key: str, data: bytes) -> None:
        backend = await self.other()
        await backend.delete([key])
        assert list(await backend.write([key], [memoryview(data)])) == [Stored.WRITTEN]
        await backend.close()

    async def medium_get(self, key: str) -> bytes | None:
        backend = await self.other()
        file = await file_of(backend)
        found = None if file is None else file.table.find(key)
        await backend.close()
        if file is None or found is None:
            return None
        at = file.geometry.data_at + found.slot * file.geometry.slot_bytes
        with open(file.path, "rb") as medium:  # noqa: ASYNC230
            medium.seek(at)
            return medium.read(found.length)


class TestSlab(_Contract):
    def url_of(self, folder: Path) -> str:
        return f"slab://{folder}/store?gb=0.008"


class TestSlabInPython(TestSlab):
    """Without the native library."""

    @pytest.fixture(autouse=True)
    def _python(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "slots", lambda: None)
        monkeypatch.setattr(slab, "slab_table", lambda entries, index: None)


class TestSlabByThreads(TestSlab):
    """Where io_uring is refused."""

    def url_of(self, folder: Path) -> str:
        return f"slab://{folder}/store?gb=0.008&io=threads"


class TestSlabBuffered(TestSlab):
    def url_of(self, folder: Path) -> str:
        return f"slab://{folder}/store?gb=0.008&direct=off"


class TestMmap(_Contract):
    def url_of(self, folder: Path) -> str:
        return f"mmap://{folder}/store?gb=0.008"


class TestMmapInPython(TestMmap):
    @pytest.fixture(autouse=True)
    def _python(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "slots", lambda: None)
        monkeypatch.setattr(slab, "slab_table", lambda entries, index: None)


class TestShm(_Contract):
    def url_of(self, folder: Path) -> str:
        return f"shm://{next(_names)}?gb=0.008"


def objects(n: int, n_bytes: int = 5000, prefix: str = "k") -> tuple[list[str], list[memoryview]]:
    keys = [f"{prefix}{at}" for at in range(n)]
    return keys, [memoryview(content(key, n_bytes)) for key in keys]


def test_each_way_of_moving_bytes_is_tried_where_there_is_a_compiler() -> None:
    assert native.slots() is not None or shutil.which("g++") is None


@pytest.fixture(params=["slab", "mmap"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}://{tmp_path}/store?gb=0.002"


async def test_the_file_has_its_length_from_the_start_and_never_another(
    url: str, tmp_path: Path, workers: Workers
) -> None:
    backend = SlabBackend(url, workers)
    await backend.open()
    assert not (tmp_path / "store").exists(), "the length of its slots is not known yet"
    keys, data = objects(1000)
    await backend.write(keys[:1], data[:1])
    file = tmp_path / "store" / NAME
    status = file.stat()
    assert status.st_size == Geometry.for_objects(5000, 2_000_000).file_bytes <= 2_000_000
    assert status.st_blocks * 512 >= status.st_size, "allocated, so that a full disk cannot come in between"
    assert status.st_mode & 0o777 == 0o600
    assert list(await backend.write(keys, data)).count(Stored.FAILED) == 0
    assert file.stat().st_size == status.st_size
    slots = backend.stats()["slots"]
    all_keys = backend.keys()
    listed = [key async for key in all_keys]
    assert len(listed) == slots
    back = room(1000, 5000)
    found = await backend.read(keys, back)
    assert {key for key, here in zip(keys, found, strict=True) if here} == set(listed)
    assert all(buffer == expected for buffer, expected, here in zip(back, data, found, strict=True) if here)
    await backend.close()


async def test_what_is_read_stays_and_what_is_unused_goes(
    url: str, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1)
    monkeypatch.setattr("hicache_actors.backends.slab.backend._now_ms", lambda: next(clock))
    backend = SlabBackend(url, workers)
    await backend.open()
    keys, data = objects(32, prefix="old")
    await backend.write(keys, data)
    for at in range(1500):
        [[key], [buffer]] = objects(1, prefix=f"new{at}-")
        await backend.write([key], [buffer])
        if at % 8 == 0:
            await backend.read(keys[:16], room(16, 5000))
    assert await backend.exists(keys[:16]) == 16
    still_there = [await backend.exists([key]) for key in keys[16:]]
    assert sum(still_there) == 0
    await backend.close()


async def test_all_slots_are_used_before_the_first_object_is_pushed_out(workers: Workers, tmp_path: Path) -> None:
    backend = SlabBackend(f"mmap://{tmp_path}/store?gb=0.02", workers)
    await backend.open()
    keys, data = objects(1, 100)
    await backend.write(keys, data)
    slots = int(backend.stats()["slots"])
    many = [f"many{at}" for at in range(slots - 1)]
    await backend.write(many, data * len(many))
    assert await backend.exists(keys + many) == slots
    await backend.write(["one more"], data)
    assert await backend.exists(keys) == 0, "what was unused for longest"
    assert await backend.exists([*many, "one more"]) == slots
    await backend.close()


def runs(slots: list[int]) -> int:
    """How many requests a batch takes: one for each run of neighbours."""
    return 1 + sum(after != before + 1 for before, after in itertools.pairwise(sorted(slots)))


async def slots_of(backend: SlabBackend, keys: list[str]) -> list[int]:
    file = await file_of(backend)
    assert file is not None
    found = [one for one in file.table.find_many(keys) if one is not None]
    assert len(found) == len(keys)
    return [one.slot for one in found]


async def test_objects_of_a_batch_are_neighbours_in_a_full_store_too(workers: Workers, tmp_path: Path) -> None:
    """What is used now and then is spared, and lies together as it was stored."""
    backend = SlabBackend(f"slab://{tmp_path}/store?gb=0.01", workers)
    await backend.open()
    batches = []
    for number in range(60):
        keys, data = objects(64, prefix=f"{number}-")
        assert list(await backend.write(keys, data)) == [Stored.WRITTEN] * 64
        batches.append(runs(await slots_of(backend, keys)))
        if number % 4 == 0:
            kept = keys[:16]
        await backend.read(kept, room(16, 5000))
    assert int(backend.stats()["slots"]) < 60 * 64 // 3, "nobody had to make room"
    assert max(batches[:15]) <= 2
    assert sum(batches) <= 3 * len(batches)
    await backend.close()


async def test_all_in_use_makes_room_in_the_order_of_the_file(workers: Workers, tmp_path: Path) -> None:
    backend = SlabBackend(f"mmap://{tmp_path}/store?gb=0.01", workers)
    await backend.open()
    for number in range(100):
        keys, data = objects(64, prefix=f"{number}-")
        await backend.write(keys, data)
        assert await backend.read(keys, room(64, 5000)) == [True] * 64, "what has just been stored was pushed out"
        assert runs(await slots_of(backend, keys)) <= 2
    await backend.close()


async def test_looking_after_objects_is_no_use_of_them(workers: Workers, tmp_path: Path) -> None:
    backend = SlabBackend(f"mmap://{tmp_path}/store?gb=0.002", workers)
    await backend.open()
    keys, data = objects(8)
    await backend.write(keys, data)
    await backend.read(keys[:4], room(4, 5000))
    await backend.peek(keys[4:], room(4, 5000))
    await backend.write(*objects(int(backend.stats()["slots"]), prefix="more"))
    assert await backend.exists(keys[:4]) == 4
    assert await backend.exists(keys[4:]) == 0
    await backend.close()


async def test_an_index_without_room_forgets_what_was_unused_for_longest(
    url: str, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1)
    monkeypatch.setattr("hicache_actors.backends.slab.backend._now_ms", lambda: next(clock))
    monkeypatch.setattr("hicache_actors.backends.slab.store_file.index_bytes", lambda slots: 6 * 64)
    backend = SlabBackend(url, workers)
    await backend.open()
    for number in range(120):
        [[key], [buffer]] = objects(1, prefix=f"{number}-")
        assert list(await backend.write([key], [buffer])) == [Stored.WRITTEN]
        assert await backend.exists([key]) == 1
    listed = backend.keys()
    keys = [key async for key in listed]
    assert len(keys) < 60
    assert await backend.exists(keys) == len(keys)
    assert await backend.delete(keys) == len(keys)
    await backend.close()


async def test_a_hint_that_a_dead_writer_left_is_overwritten(url: str, workers: Workers) -> None:
    backend = SlabBackend(url, workers)
    await backend.open()
    keys, data = objects(40)
    await backend.write(keys, data)
    file = await file_of(backend)
    assert file is not None
    hints = file.table._index._hints
    before = hints.copy()
    file.table._states[:] = 0  # as if each had died between its two stores
    assert await backend.exists(keys) == 0
    hints[hints == 0] = (1 << 63) + 9  # no bucket has room, and none of it means anything
    assert list(await backend.write(keys, data)) == [Stored.WRITTEN] * 40
    assert await backend.exists(keys) == 40
    assert (hints != before).any()
    hints[:] = (1 << 64) - 1  # slots that the file has not got
    assert await backend.exists(keys) == 0
    assert list(await backend.write(keys, data)) == [Stored.WRITTEN] * 40
    back = room(40, 5000)
    assert await backend.read(keys, back) == [True] * 40
    assert back == data
    await backend.close()


async def test_the_same_key_twice_in_a_batch_is_stored_once(url: str, workers: Workers) -> None:
    backend = SlabBackend(url, workers)
    await backend.open()
    [[key], [buffer]] = objects(1)
    assert list(await backend.write([key, key], [buffer, buffer])) == [Stored.WRITTEN, Stored.PRESENT]
    listed = backend.keys()
    assert [one async for one in listed] == [key]
    await backend.close()


async def test_where_the_kernel_refuses_io_uring_threads_do_it_and_the_reason_is_shown(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(rings: native.Rings) -> int:
        raise PermissionError(errno.EPERM, "planted")

    monkeypatch.setattr(native.Rings, "_open", refuse)
    backend = SlabBackend(f"slab://{tmp_path}/store?gb=0.002", workers)
    await backend.open()
    keys, data = objects(64)
    assert list(await backend.write(keys, data)) == [Stored.WRITTEN] * 64
    stats = backend.stats()
    assert stats["requests"] == "threads"
    if native.slots() is not None and stats["io"] == "direct":
        assert stats["why_no_io_uring"] == os.strerror(errno.EPERM)
    await backend.close()
    strict = SlabBackend(f"slab://{tmp_path}/store?gb=0.002&io=uring", workers)
    with pytest.raises(ConfigError, match="io=uring"):
        await strict.open()


async def test_direct_io_that_must_be_had_is_refused_where_it_cannot_be(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def open_(path: str, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "planted")
        return real_open(path, flags, *args)

    monkeypatch.setattr(os, "open", open_)
    for choice, way in (("off", "buffered"), ("auto", "buffered")):
        backend = SlabBackend(f"slab://{tmp_path}/{choice}?gb=0.002&direct={choice}", workers)
        await backend.open()
        assert list(await backend.write(*objects(1))) == [Stored.WRITTEN]
        assert backend.stats()["io"] == way
        assert backend.stats()["why_buffered"] == ("direct=off" if choice == "off" else os.strerror(errno.EINVAL))
        await backend.close()
    for option, words in (("direct=on", "direct=on"), ("io=uring", "io=uring"), ("direct=off&io=uring", "io=uring")):
        backend = SlabBackend(f"slab://{tmp_path}/on?gb=0.002&{option}", workers)
        with pytest.raises(ConfigError, match=words):  # though there is no store yet
            await backend.open()
        await backend.close()
    assert sorted(os.listdir(tmp_path)) == ["auto", "off"], "the trial has left something"
    backend = SlabBackend(f"slab://{tmp_path}/auto?gb=0.002&direct=on", workers)
    with pytest.raises(ConfigError, match="direct=on"):
        await backend.open()
    await backend.close()


async def test_a_call_that_outlives_its_backend_keeps_the_descriptor(url: str, workers: Workers) -> None:
    backend = SlabBackend(url, workers)
    await backend.open()
    await backend.write(*objects(1))
    file = await file_of(backend)
    assert file is not None
    fd = file.fd
    await backend.close()
    assert os.fstat(fd).st_size == file.geometry.file_bytes, "its number may be given to another file now"
    del file
    assert workers.close(20.0) == ()  # its threads have let go of the call as well
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


async def test_two_backends_at_one_store_see_each_other_at_once(url: str, workers: Workers) -> None:
    first, second = SlabBackend(url, workers), SlabBackend(url, workers)
    await first.open()
    await second.open()
    keys, data = objects(20)
    assert list(await first.write(keys, data)) == [Stored.WRITTEN] * 20
    assert await second.exists(keys) == 20
    assert list(await second.write(keys, data)) == [Stored.PRESENT] * 20
    assert await second.delete(keys[:5]) == 5
    assert await first.exists(keys) == 0
    assert await first.exists(keys[5:]) == 15
    await first.close()
    await second.close()


async def test_an_object_that_is_larger_than_the_slots_is_refused(url: str, workers: Workers) -> None:
    backend = SlabBackend(url, workers)
    await backend.open()
    await backend.write(*objects(1, 5000))
    keys, data = objects(1, 9000, "large")
    assert list(await backend.write(keys, data)) == [Stored.FAILED]
    assert backend.stats()["too_large"] == 1
    assert list(await backend.write(*objects(1, 100, "small"))) == [Stored.WRITTEN]
    await backend.close()


async def test_a_slot_whose_writer_has_died_is_used_again(url: str, workers: Workers) -> None:
    backend = SlabBackend(url, workers)
    await backend.open()
    keys, data = objects(1)
    await backend.write(keys, data)
    file = await file_of(backend)
    assert file is not None
    table_at = file.geometry.table_at
    dead = struct.pack("<II", WRITING, 12345)
    for slot in range(file.table.slots):
        file.mapping[table_at + slot * ENTRY_BYTES : table_at + slot * ENTRY_BYTES + 8] = dead
    assert await backend.exists(keys) == 0
    assert list(await backend.write(keys, data)) == [Stored.WRITTEN]
    alive = struct.pack("<II", WRITING, file.table._owner)
    for slot in range(file.table.slots):
        file.mapping[table_at + slot * ENTRY_BYTES : table_at + slot * ENTRY_BYTES + 8] = alive
    assert list(await backend.write(keys, data)) == [Stored.FAILED], "a slot that is being written was taken"
    assert backend.stats()["all_busy"] == 1
    await backend.close()


async def test_an_entry_that_is_damaged_is_no_object(url: str, workers: Workers) -> None:
    backend = SlabBackend(url, workers)
    await backend.open()
    keys, data = objects(1)
    file = None
    for bit in range(0, 60 * 8, 7):
        await backend.write(keys, data)
        file = await file_of(backend)
        assert file is not None
        found = file.table.find("k0")
        assert found is not None
        at = file.geometry.table_at + found.slot * ENTRY_BYTES + bit // 8
        if 16 <= bit // 8 < 24 or bit // 8 >= 51:
            continue  # when it was last used; what lies behind a key of two bytes
        file.mapping[at] ^= 1 << bit % 8
        back = room(1, 5000)
        answer = await backend.read(keys, back)
        assert answer == [False] or back == data
        await backend.clear()
    await backend.close()


async def test_only_what_was_asked_for_before_is_taken_in(url: str, workers: Workers) -> None:
    backend = SlabBackend(url + "&admit=second", workers)
    await backend.open()
    keys, data = objects(4)
    assert await backend.exists(keys) == 0
    for _ in range(3):  # a write that is tried again is still the first time
        assert list(await backend.write(keys, data)) == [Stored.FAILED] * 4
    assert backend.stats()["not_admitted"] == 12
    assert await backend.exists(keys) == 0
    assert list(await backend.write(keys, data)) == [Stored.WRITTEN] * 4
    assert await backend.exists(keys) == 4
    await backend.close()


async def test_what_may_be_written_in_a_day_is_counted_over_all_processes(
    url: str, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = 20_000 * 86_400.0
    monkeypatch.setattr("hicache_actors.backends.slab.store_file.time.time", lambda: today)
    first, second = (SlabBackend(url + "&write_gb_per_day=0.00005", workers) for _ in range(2))
    await first.open()
    await second.open()
    keys, data = objects(12)
    assert list(await first.write(keys[:6], data[:6])) == [Stored.WRITTEN] * 6
    assert list(await second.write(keys[:6], data[:6])) == [Stored.PRESENT] * 6, "what is there costs nothing"
    assert list(await second.write(keys[6:], data[6:])).count(Stored.WRITTEN) == 4
    assert second.stats()["over_daily_limit"] == 2
    today += 86_400.0
    assert list(await first.write(keys, data)).count(Stored.FAILED) == 0
    await first.close()
    await second.close()


async def test_a_disk_without_room_is_an_error_and_leaves_nothing(tmp_path: Path, workers: Workers) -> None:
    backend = SlabBackend(f"slab://{tmp_path}/store?gb=100000", workers)
    await backend.open()
    with pytest.raises(BackendError, match="bytes are free"):
        await backend.write(*objects(1))
    assert not (tmp_path / "store" / NAME).exists()
    backend = SlabBackend(f"slab://{tmp_path}/store?gb=0.001&min_free_gb=100000", workers)
    await backend.open()
    with pytest.raises(BackendError, match="are to be left"):
        await backend.write(*objects(1))


async def test_a_file_that_is_something_else_is_refused_and_left_alone(tmp_path: Path, workers: Workers) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / NAME).write_bytes(b"somebody's notes" * 1000)
    with pytest.raises(ConfigError, match="no store that this version can read"):
        await SlabBackend(f"slab://{folder}?gb=0.001", workers).open()
    assert (folder / NAME).read_bytes() == b"somebody's notes" * 1000


async def test_a_smaller_cap_than_the_store_is_refused(tmp_path: Path, workers: Workers) -> None:
    backend = SlabBackend(f"slab://{tmp_path}?gb=0.002", workers)
    await backend.open()
    await backend.write(*objects(1))
    await backend.close()
    with pytest.raises(ConfigError, match="raise gb"):
        await SlabBackend(f"slab://{tmp_path}?gb=0.001", workers).open()


async def test_a_file_of_which_a_piece_is_missing_is_a_counted_error(tmp_path: Path, workers: Workers) -> None:
    backend = SlabBackend(f"slab://{tmp_path}/store?gb=0.002", workers)
    await backend.open()
    keys, data = objects(64)
    await backend.write(keys, data)
    file = await file_of(backend)
    assert file is not None
    os.truncate(tmp_path / "store" / NAME, file.geometry.data_at)
    with pytest.raises(BackendError, match="read"):
        await backend.read(keys, room(64, 5000))
    assert backend.stats()["failed"] == 1
    await backend.close()


def test_a_file_has_as_many_slots_as_the_cap_has_room_for() -> None:
    for cap_bytes in (100_000, 1_000_000, 50_000_000, 200_000_000_000):
        geometry = Geometry.for_objects(5000, cap_bytes)
        assert geometry.file_bytes <= cap_bytes
        assert cap_bytes - geometry.file_bytes < geometry.slot_bytes + ENTRY_BYTES + 3 * ALIGN
    assert Geometry.for_objects(5000, 5000).slots == 0


def test_a_doorkeeper_forgets_the_oldest() -> None:
    door = Doorkeeper(max_keys=4)
    door.ask(["a", "b"])
    door.ask(["a", "b"])
    assert door.admits("a")
    door.ask(["c", "d", "e", "f"])
    assert not door.admits("a")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("slab://", "names no folder"),
        ("slab:///folder", "how large"),
        ("slab:///folder?gb=0", "leaves no room"),
        ("slab:///folder?gb=x", "gb='x'"),
        ("slab:///folder?gb=1&admit=third", "admit"),
        ("slab://host/folder?gb=1", "names a host"),
        ("shm://?gb=1", "no name"),
        ("shm://..?gb=1", "no name"),
        ("shm://a/b?gb=1", "path"),
        ("mmap:///f?gb=1&direct=off", "unknown option"),
        ("slab:///f?gb=1&direct=0", "direct='0'"),
        ("slab:///f?gb=1&io=aio", "io='aio'"),
    ],
)
def test_urls_that_cannot_be_honoured(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SlabOptions.parse(url)
