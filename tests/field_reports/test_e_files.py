"""Field reports, section E: files that are damaged, a folder that is full or has been changed by others, answers for single pages.

A cache on a real folder; a page is an object of 4,864 bytes and takes two blocks of the disk.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import anyio
import msgspec
import pytest

from hicache_actors import Shortfall
from hicache_actors.backends import Backend, FileBackend, Stored
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.registry import open_backend
from hicache_actors.backends.wrappers import Access, Fault, Faulty, Wrapper
from hicache_actors.config import HostConfig, HostLayout, ModelFacts
from hicache_actors.cuda_ext.native import slots
from hicache_actors.errors import ConfigError, TransferError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import content, room
from hicache_actors.testing.shards import HASHES, PAGES, close, deployment, whole_model
from hicache_actors.testing.small import Small, prompt, small_config

from .kit import PAGE, compute, opened, quiet, scribble, store, take

DISK_BYTES = 8192  #: of a page


def url_of(folder: Path, cap_pages: int | None = None) -> str:
    return f"file://{folder}" + ("" if cap_pages is None else f"?max_gb={cap_pages * DISK_BYTES / 1e9!r}")


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("objects/*/*.kv"))


def on_disk(folder: Path) -> int:
    """Bytes that the objects take on the disk, those under way included."""
    total = 0
    for path in folder.glob("objects/*/*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def file_of(small: Small, folder: Path, asked: Prompt, page: int) -> Path:
    """Where page ``page`` (from 1) of ``asked`` is stored."""
    [key] = small.store.keys.keys([asked.page_hashes(PAGE, page)[page - 1]])
    [file] = folder.glob(f"objects/*/{key}.kv")
    return file


async def hit_tokens(small: Small, asked: Prompt) -> int:
    """What the store gives of ``asked`` to a cache that has nothing else."""
    await quiet(small)
    await small.cache.reset()
    async with small.cache.acquire(asked, deadline_s=10.0) as lease:
        return lease.account.storage


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _endless(file: Path) -> None:
    """Opening it fails, as it does for what may not be read."""
    file.unlink()
    file.symlink_to(file.name)


@pytest.mark.parametrize("damage", [_cut, _empty, _directory, _endless])
async def test_b072_a_bad_file_ends_the_hit_and_nothing_else(damage: Callable[[Path], None], tmp_path: Path) -> None:
    """Given 10 stored pages, of which file 6 is cut to half, empty, a directory, or cannot be opened.
    When the prefix is asked for, then others, and again after the file has been repaired.
    Then the hit is 5 pages, other fetches work, and the repaired file is read."""
    asked, other = prompt(10), prompt(4, family=1)
    async with opened(url=url_of(tmp_path)) as small:
        for each in (asked, other):
            await compute(small, each)
            assert await small.cache.drain(30.0) == 0
        file = file_of(small, tmp_path, asked, 6)
        good = file.read_bytes()
        damage(file)
        for _ in range(3):
            assert await hit_tokens(small, asked) == 5 * PAGE
            assert await hit_tokens(small, other) == 4 * PAGE
        assert small.cache.snapshot().state == "open"
        if file.is_dir():
            file.rmdir()
        file.unlink(missing_ok=True)
        file.write_bytes(good)
        assert await hit_tokens(small, asked) == 10 * PAGE


async def test_b072_a_failing_disk_ends_the_hit_and_nothing_else(tmp_path: Path) -> None:
    """Given 10 stored pages, and a disk that answers reads with an error.
    When the prefix is asked for, and again when the disk is well.
    Then the request is served without them, the error is counted, and later the hit is whole."""
    sick = True
    backend = MemoryBackend()
    asked = prompt(10)
    await store(backend, asked)

    def schedule(access: Access) -> Exception | None:
        return OSError(errno.EIO, "planted") if sick and access.verb == "read" else None

    async with opened(backend=Faulty(backend, schedule)) as small:
        assert await hit_tokens(small, asked) == 0
        snapshot = small.cache.snapshot().storage
        assert snapshot is not None
        assert snapshot.errors == {"read": 1}
        sick = False
        assert await hit_tokens(small, asked) == 10 * PAGE


def as_rank(url: str, rank: str) -> dict[str, object]:
    """Settings of a cache that shares a folder with others, but no keys."""
    config = small_config(url=url, host_pages=64)
    return {"config": msgspec.structs.replace(config, model=ModelFacts(model_id="toy", weights=rank))}


async def test_b074_a_folder_keeps_to_its_cap_whoever_writes(tmp_path: Path) -> None:
    """Given a cap of 64 pages for a folder in which an earlier run has left 32.
    When four caches with keys of their own store 256 more, all at the same time.
    Then the folder is never beyond the cap by more than what is being renamed, and what was stored last can be read."""
    cap = 64
    async with opened(device_pages=40, **as_rank(url_of(tmp_path), "earlier")) as small:
        for family in range(8):
            await compute(small, prompt(4, family=family))
        assert await small.cache.drain(30.0) == 0
    assert on_disk(tmp_path) == 32 * DISK_BYTES
    most, last_hits = 0, []

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, on_disk(tmp_path))
            await anyio.sleep(0.002)

    async def serve(rank: str) -> None:
        async with opened(device_pages=40, **as_rank(url_of(tmp_path, cap), rank)) as small:
            for family in range(16):
                await compute(small, prompt(4, family=family))
                assert (await small.cache.stored(prompt(4, family=family), 30.0)).tokens == 4 * PAGE
            last_hits.append(await hit_tokens(small, prompt(4, family=15)))

    async with anyio.create_task_group() as watching:
        watching.start_soon(watch)
        async with anyio.create_task_group() as group:
            for rank in "abcd":
                group.start_soon(serve, rank)
        watching.cancel_scope.cancel()
    assert on_disk(tmp_path) <= cap * DISK_BYTES
    # A look takes its time: a file that gets its name meanwhile is seen twice, at most a batch of 4 pages a rank.
    assert cap // 2 * DISK_BYTES < most <= (cap + 4 * 4) * DISK_BYTES
    assert last_hits == [4 * PAGE] * 4


@pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)
async def test_b074_a_full_disk_is_a_counted_miss(anyio_backend: object) -> None:
    """Given a store whose disk is full.
    When a prompt is computed, and again after room has been made.
    Then the first is served and counted as failed, and the second is stored."""
    full = True
    backend = MemoryBackend()

    def schedule(access: Access) -> Exception | None:
        return OSError(errno.ENOSPC, "planted") if full and access.verb == "write" else None

    async with opened(backend=Faulty(backend, schedule)) as small:
        await compute(small, prompt(4))
        await quiet(small)
        assert small.cache.core.counts["backup_failed_pages"] == 4
        snapshot = small.cache.snapshot().storage
        assert snapshot is not None
        assert snapshot.errors == {"write": 1}
        full = False
        assert (await small.cache.stored(prompt(4), 30.0)).tokens == 4 * PAGE


class _Answers(Wrapper):
    """Keeps what each write has answered."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.given: list[list[Stored]] = []

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        self.given.append(list(await super().write(keys, buffers)))
        return self.given[-1]


@pytest.mark.parametrize("layout", ["page_first_direct", "page_first", "page_head", "layer_first"])
@pytest.mark.parametrize("scheme", ["memory", "file"])
@pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)
async def test_b077_answers_are_one_per_page(
    anyio_backend: object, scheme: str, layout: HostLayout, tmp_path: Path
) -> None:
    """Given a store that refuses page 3 of 7; K and V of a page are one object.
    When the 7 pages are stored, and read by a later cache.
    Then there are 7 answers of which only the third is bad, and pages 1 and 2 come back right."""
    asked = prompt(7)
    workers = Workers("files", 4)
    inner = open_backend("memory://" if scheme == "memory" else url_of(tmp_path), workers)
    third = ""

    def schedule(access: Access) -> Fault | None:
        nonlocal third
        if access.verb == "write" and access.object == 3:
            third = access.key
        return Fault.FAIL if access.verb == "write" and access.key == third else None

    answers = _Answers(Faulty(inner, schedule))
    config = msgspec.structs.replace(small_config(), host=HostConfig(pages=32, layout=layout))
    async with opened(config=config, backend=answers) as small:
        first = await compute(small, asked)
        await quiet(small)
        assert answers.given[0] == [Stored.WRITTEN] * 2 + [Stored.FAILED] + [Stored.WRITTEN] * 4
        assert small.cache.core.usage().stored_pages == 2
        assert await hit_tokens(small, asked) == 2 * PAGE
        again = await small.engine.answer(asked)
        assert (again.account.computed, again.tokens) == (5 * PAGE + 1, first.tokens)
    assert workers.close(10.0) == ()


async def test_b077_a_page_of_several_objects_has_one_answer(tmp_path: Path) -> None:
    """Given 5 pages of 32 objects each, and a store that refuses one object of page 3.
    When they are stored, looked up and read.
    Then there is one answer a page, of which only the third is bad, the hit is 2 pages, and these are right."""
    [shard] = deployment(whole_model(), 1, (7,), tmp_path, tp_lcm_size=8)
    refused = shard.store.keys.keys([HASHES[2]])[13]
    shard.store.backend = Faulty(shard.store.backend, lambda access: Fault.FAIL if access.key == refused else None)
    stored = await shard.save()
    assert stored == [Stored.WRITTEN] * 2 + [Stored.FAILED] + [Stored.WRITTEN] * (PAGES - 3)
    assert await shard.hit() == 2
    assert await shard.load() == 2
    await close([shard])


@pytest.mark.parametrize("scheme", ["memory", "file"])
async def test_b079_what_is_said_to_be_there_can_be_read_and_the_other_way_round(scheme: str, tmp_path: Path) -> None:
    """Given 10 stored objects and 5 that are not, on each store.
    When each is asked for alone, in every leading part of a batch, and read; then all that again after a restart.
    Then lookups and reads agree on every key."""
    workers = Workers("files", 4)
    url = "memory://b079" if scheme == "memory" else url_of(tmp_path)
    present, absent = [f"p{n}" for n in range(10)], [f"q{n}" for n in range(5)]
    for turn in range(2):
        backend = open_backend(url, workers)
        await backend.open()
        if turn == 0:
            outcomes = await backend.write(present, [memoryview(content(key, 5000)) for key in present])
            assert list(outcomes) == [Stored.WRITTEN] * 10
        for key in present + absent:
            assert await backend.exists([key]) == (await backend.read([key], room(1, 5000)))[0] == (key in present)
        for end in range(1, 16):
            assert await backend.exists((present + absent)[:end]) == min(end, 10)
        assert list(await backend.read(present + absent, room(15, 5000))) == [True] * 10 + [False] * 5
        await backend.close()
    assert workers.close(10.0) == ()


async def test_b083_new_pages_are_not_the_first_to_go(tmp_path: Path) -> None:
    """Given a folder with room for 10 pages, in which 10 lie that were all used in the past, in some order.
    When 3 more are stored.
    Then the 3 that were used longest ago have gone, and the new ones are there."""
    old, new = [prompt(1, family=n) for n in range(10)], [prompt(1, family=100 + n) for n in range(3)]
    order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    async with opened(url=url_of(tmp_path)) as small:
        for asked in old:
            await compute(small, asked)
        assert await small.cache.drain(30.0) == 0
        for rank, number in enumerate(order):
            then_s = time.time() - 10_000 + rank
            os.utime(file_of(small, tmp_path, old[number], 1), (then_s, then_s))
    async with opened(url=url_of(tmp_path, 10)) as small:
        for asked in new:
            await compute(small, asked)
            assert (await small.cache.stored(asked, 30.0)).tokens == PAGE
        hits = [await hit_tokens(small, asked) for asked in old + new]
        gone = {number for number in range(10) if not hits[number]}
        assert gone == set(order[:3])
        assert hits[10:] == [PAGE] * 3


async def test_b084_a_load_that_always_fails_serves_nobodys_bytes() -> None:
    """Given a device whose loads all fail, and pages in which the KV of request A still stands.
    When request B should load its prefix into them.
    Then the load is refused layer by layer, B computes what it needs, and the failures are counted."""
    async with opened(device_pages=8, host_pages=32) as small:
        b = prompt(6, family=2)
        first = await compute(small, b)
        await quiet(small)
        taker = take(small, 8)
        scribble(small, taker)
        taker.release()
        small.device.fail_next(TransferError("planted"), works=10_000, stream="load")
        for turn in range(1, 4):
            async with small.cache.acquire(b) as lease:
                assert lease.loading is not None
                with pytest.raises(TransferError):
                    await lease.loading.ready(2)
                verdict = await lease.loading.verdict()
                assert (verdict.valid_tokens, verdict.failed) == (0, "load_failed")
            counts = small.cache.snapshot().counts
            assert (counts["loads_failed"], counts.get("bad_sources", 0)) == (turn, 0)
        await quiet(small)
        lease = small.cache.lease(b, "alone")  # what is left when loads are of no use
        assert lease.usable_tokens == 0
        assert not isinstance(lease.allocate(len(b)), Shortfall)
        assert small.model.forward(b, lease.pages, 0, len(b)) == first.tokens[0]
        lease.release()


async def test_b084_a_tier_that_cannot_work_is_refused_at_the_start(tmp_path: Path) -> None:
    """Given a folder that cannot be one: its path leads through a file.
    When a cache is opened on it.
    Then that is refused with the path in the message."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="file/store"):
        async with opened(url=f"file://{tmp_path}/file/store"):
            pass


async def test_b086_files_that_others_have_deleted_harm_no_eviction(tmp_path: Path) -> None:
    """Given a folder that is full to its cap, and half of whose files are deleted from outside.
    When more pages are stored.
    Then no call fails, and what is counted is what is on the disk."""
    async with opened(device_pages=64, host_pages=64, url=url_of(tmp_path, 20)) as small:
        for family in range(5):
            await compute(small, prompt(4, family=family))
        assert await small.cache.drain(30.0) == 0
        assert on_disk(tmp_path) == 20 * DISK_BYTES
        for path in files(tmp_path)[::2]:
            path.unlink()
        for family in range(5, 10):
            await compute(small, prompt(4, family=family))
            assert (await small.cache.stored(prompt(4, family=family), 30.0)).tokens == 4 * PAGE
        snapshot = small.cache.snapshot().storage
        assert snapshot is not None
        assert snapshot.errors == {}
        backend = small.store.backend
        assert isinstance(backend, FileBackend)
        assert await backend.reconcile()
        assert backend.stats()["bytes"] == on_disk(tmp_path) <= 20 * DISK_BYTES
        assert await hit_tokens(small, prompt(4, family=9)) == 4 * PAGE


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("files", 4)
    yield workers
    assert workers.close(10.0) == ()


async def test_b087_use_is_nothing_when_everything_has_gone(tmp_path: Path, workers: Workers) -> None:
    """Given a folder with a cap of 100 objects.
    When 100 are stored and go: cleared, deleted, put away as bad, evicted, deleted from outside, or never whole; 20 times.
    Then each time nothing is counted, and 100 more can be stored."""
    backend = FileBackend(url_of(tmp_path, 100), workers)
    await backend.open()
    for turn in range(20):
        keys = [f"t{turn}-{n}" for n in range(100)]
        outcomes = await backend.write(keys, [memoryview(content(key, 5000)) for key in keys])
        assert list(outcomes) == [Stored.WRITTEN] * 100
        assert backend.stats()["objects"] == 100
        way = turn % 6
        if way == 0:
            await backend.clear()
        elif way == 1:
            assert await backend.delete(keys) == 100
        elif way == 2:
            await backend.read(keys, room(100, 5000))
            for key in keys:
                assert await backend.quarantine(key)
        elif way == 3:
            fresh = [f"f{turn}-{n}" for n in range(100)]
            await backend.write(fresh, [memoryview(content(key, 5000)) for key in fresh])
            assert await backend.delete(fresh) > 0
            await backend.delete(keys)
        elif way == 4:
            for path in files(tmp_path):
                path.unlink()
            assert await backend.reconcile()
        else:
            assert list(await backend.write(["huge"], [memoryview(bytes(101 * DISK_BYTES))])) == [Stored.FAILED]
            assert list(await backend.read(keys, room(100, 4999))) == [False] * 100  # another length: put away
        assert (backend.stats()["bytes"], backend.stats()["objects"]) == (0, 0), way
    await backend.close()


KILLED = """
import asyncio, os, signal, sys
from hicache_actors.backends import folder
from hicache_actors.testing.small import open_small, prompt

publish, left = folder.Publisher.publish, [5]

def die(*args, **kwargs):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return publish(*args, **kwargs)

async def main():
    folder.Publisher.publish = die
    async with open_small(url=sys.argv[1]) as small:
        await small.engine.answer(prompt(8))
        await small.cache.drain(30.0)

asyncio.run(main())
"""


async def test_b095_what_a_killed_process_has_held_is_free_for_the_next(tmp_path: Path) -> None:
    """Given a process that is killed while it writes 8 pages into a shared folder.
    When another one opens the folder, with a cap, and is asked the same.
    Then it is served within 5 seconds, and nothing of the dead one is reserved, half written, or counted."""
    url = url_of(tmp_path, 10)
    here = {**os.environ, "HICACHE_NATIVE": "off"}  # it dies between two files, which native code writes in one call
    process = await anyio.run_process(
        [sys.executable, "-c", KILLED, url], check=False, stderr=subprocess.STDOUT, env=here
    )
    assert process.returncode == -9, process.stdout.decode()
    with anyio.fail_after(5.0):
        async with opened(url=url) as small:
            assert await hit_tokens(small, prompt(8)) <= 8 * PAGE
            await compute(small, prompt(8))
            assert (await small.cache.stored(prompt(8), 5.0)).tokens == 8 * PAGE
            backend = small.store.backend
            assert isinstance(backend, FileBackend)
            assert await backend.reconcile()
            assert (backend.stats()["bytes"], backend.stats()["objects"]) == (on_disk(tmp_path), 8)
            assert on_disk(tmp_path) == 8 * DISK_BYTES


# -- B076: direct I/O that is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", ["open", "write"])
async def test_b076_direct_io_that_is_refused_falls_back_and_says_so(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Given a file system that answers EINVAL to direct I/O, when the file is opened or when it is written.
    When 20 objects are stored and read, in buffers that are aligned and in some that are 512 bytes off.
    Then all are there, buffered; one warning names path and errno, and the store says that it does no direct I/O."""
    real_open, real_write = os.open, os.pwritev
    direct: set[int] = set()

    def open_(path: str, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(errno.EINVAL, "planted")
        fd = real_open(path, flags, *args)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "planted")
        return real_write(fd, buffers, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(slots, "slots", lambda: None)
    caplog.set_level(logging.WARNING, "hicache_actors")
    workers = Workers("b076", 4)
    backend = open_backend(f"slab://{tmp_path}/store?gb=0.002", workers)
    await backend.open()
    memory = mmap.mmap(-1, 64 * 8192)
    for shift in (0, 512):
        keys = [f"{shift}-{at}" for at in range(20)]
        views = [memoryview(memory)[at * 12288 + shift : at * 12288 + shift + 8192] for at in range(20)]
        for key, view in zip(keys, views, strict=True):
            view[:] = content(key, 8192)
        assert list(await backend.write(keys, views)) == [Stored.WRITTEN] * 20
        back = room(20, 8192)
        assert list(await backend.read(keys, back)) == [True] * 20
        assert back == [content(key, 8192) for key in keys]
    assert backend.stats()["io"] == "buffered"
    warnings = [record.getMessage() for record in caplog.records if "direct_io_refused" in record.getMessage()]
    assert len(warnings) == 1
    assert str(tmp_path) in warnings[0]
    assert str(errno.EINVAL) in warnings[0]
    await backend.close()
    assert workers.close(10.0) == ()
