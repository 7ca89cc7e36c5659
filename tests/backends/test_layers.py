"""Several stores as one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hicache_actors.backends import Backend, Hanging, MemoryBackend, Stored, open_backend
from hicache_actors.backends.layers import LayeredBackend
from hicache_actors.backends.layers.layer import Layer
from hicache_actors.backends.objects import HEADER_BYTES, Expected, Verdict, seal, seal_many
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import BackendContract, content, room
from hicache_actors.testing.small import PAGE_SIZE, open_small, prompt

pytestmark = pytest.mark.anyio

_names = (f"layer-{n}" for n in itertools.count())


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("layers", 4)
    yield workers
    assert workers.close(10.0) == ()


class TestContract(BackendContract):
    """Memory in front of files."""

    persistent = True

    @pytest.fixture(autouse=True)
    def _medium(self, tmp_path: Path, workers: Workers) -> None:
        self.workers = workers
        self.near = f"memory://{next(_names)}"
        self.far = f"file://{tmp_path}/far"

    async def make(self) -> Backend:
        return open_backend(f"{self.near} {self.far}", self.workers)

    async def medium_put(self, key: str, data: bytes) -> None:
        for url in (self.near, self.far):
            store = open_backend(url, self.workers)
            await store.open()
            await store.delete([key])
            await store.write([key], [memoryview(data)])
            await store.close()

    async def medium_get(self, key: str) -> bytes | None:
        far = open_backend(self.far, self.workers)
        await far.open()
        buffer = room(1, self.object_bytes)
        [found] = await far.read([key], buffer)
        await far.close()
        return bytes(buffer[0]) if found else None


class Two:
    """A near and a far store in memory, and both as one."""

    def __init__(
        self, workers: Workers, options: str = "", *, near: Backend | None = None, far: Backend | None = None
    ) -> None:
        self.near, self.far = near or MemoryBackend(), far or MemoryBackend()
        stores = iter((self.near, self.far))
        self.both = LayeredBackend(
            f"layers://?{options} memory://near memory://far", workers, open_one=lambda url, workers: next(stores)
        )


def objects(n: int) -> tuple[list[str], list[memoryview]]:
    keys = [f"k{at}" for at in range(n)]
    return keys, [memoryview(content(key, 100)) for key in keys]


async def promoted(both: LayeredBackend) -> None:
    while both._promotions:
        await asyncio.wait(set(both._promotions))


async def test_what_is_far_is_found_and_comes_nearer(workers: Workers) -> None:
    two = Two(workers)
    keys, data = objects(8)
    await two.far.write(keys, data)
    await two.near.write(keys[2:4], data[2:4])
    assert await two.both.exists([*keys, "absent"]) == 8
    back = room(8, 100)
    assert await two.both.read(keys, back) == [True] * 8
    assert back == data
    for buffer in back:
        buffer[:] = bytes(100)  # the slots are somebody else's now
    await promoted(two.both)
    assert await two.near.exists(keys) == 8
    near = room(8, 100)
    assert await two.near.read(keys, near) == [True] * 8
    assert near == data
    assert two.both.stats()["promoted"] == 6
    assert two.both.stats()["promoting_bytes"] == 0


async def test_what_is_promoted_at_once_is_bounded(workers: Workers) -> None:
    near = Hanging(MemoryBackend(), ("write",))
    two = Two(workers, "promote_mb=0.00045", near=near)
    keys, data = objects(8)
    await two.far.write(keys, data)
    await two.both.read(keys[:4], room(4, 100))
    await two.both.read(keys[4:], room(4, 100))
    near.release()
    await promoted(two.both)
    assert await two.near.exists(keys) == 4
    assert two.both.stats()["not_promoted"] == 4


async def test_what_is_removed_does_not_come_back(workers: Workers) -> None:
    near = Hanging(MemoryBackend(), ("write",))
    two = Two(workers, near=near)
    keys, data = objects(2)
    await two.far.write(keys, data)
    assert await two.both.read(keys, room(2, 100)) == [True] * 2
    removal = asyncio.ensure_future(two.both.quarantine("k0"))
    await checkpoint()
    near.release()
    assert await removal
    await promoted(two.both)
    assert (await two.near.exists(["k0"]), await two.far.exists(["k0"])) == (0, 0)
    assert await two.near.exists(["k1"]) == 1


@pytest.mark.parametrize(("write", "near", "far"), [("all", 3, 3), ("nearest", 3, 0), ("farthest", 0, 3)])
async def test_writes_go_where_they_shall(workers: Workers, write: str, near: int, far: int) -> None:
    two = Two(workers, f"write={write}&promote=no")
    keys, data = objects(3)
    assert await two.both.write(keys, data) == [Stored.WRITTEN] * 3
    assert (await two.near.exists(keys), await two.far.exists(keys)) == (near, far)
    await two.both.read(keys, room(3, 100))
    assert await two.near.exists(keys) == near, "nothing is promoted"
    assert await two.both.write(keys, data) == [Stored.PRESENT] * 3


EXPECTED = Expected(b"n" * 16, [bytes([page + 1]) * 32 for page in range(3)], (7, 8))
"""Of six objects: two of each page."""


def sealed() -> tuple[list[str], list[memoryview]]:
    keys = [f"k{at}" for at in range(6)]
    data = [memoryview(bytearray(HEADER_BYTES) + content(key, 500)) for key in keys]
    seal_many(data, *EXPECTED[:3])
    return keys, data


def spoilt(data: memoryview) -> memoryview:
    bad = bytearray(data)
    bad[-1] ^= 1
    return memoryview(bad)


@pytest.mark.parametrize("near_checks", [False, True])
async def test_a_bad_copy_that_is_near_is_put_away_and_the_good_one_is_read_and_takes_its_place(
    workers: Workers, near_checks: bool, tmp_path: Path
) -> None:
    near = open_backend(f"file://{tmp_path}", workers) if near_checks else MemoryBackend()
    two = Two(workers, near=near)
    await near.open()
    keys, data = sealed()
    await two.far.write(keys, data)
    await near.write(keys[:4], [data[0], spoilt(data[1]), data[2], spoilt(data[3])])
    await two.far.delete(["k3"])
    back = room(6, len(data[0]))
    verdicts = await two.both.read_checked(keys, back, EXPECTED)
    assert verdicts == [Verdict.OK, Verdict.OK, Verdict.OK, Verdict.CORRUPT, Verdict.OK, Verdict.OK]
    assert [back[at] for at in (0, 1, 2, 4, 5)] == [data[at] for at in (0, 1, 2, 4, 5)]
    await promoted(two.both)
    again = room(6, len(data[0]))
    assert await near.read(keys, again) == [True, True, True, False, True, True]
    assert again[1] == data[1]
    assert two.both.stats()["0:memory.bad"] == 2
    await near.close()


async def test_one_of_another_version_is_no_reason_to_remove_it(workers: Workers) -> None:
    two = Two(workers)
    keys, data = sealed()
    other = [memoryview(bytearray(each)) for each in data]
    seal_many(other, b"o" * 16, *EXPECTED[1:3])
    await two.near.write(keys, other)
    await two.far.write(keys[:5], data[:5])
    assert await two.both.read_checked(keys, room(6, len(data[0])), EXPECTED) == [Verdict.OK] * 5 + [Verdict.FOREIGN]
    await promoted(two.both)
    back = room(6, len(data[0]))
    assert await two.near.read(keys, back) == [True] * 6
    assert back == other


@pytest.mark.parametrize("write", ["all", "farthest"])
async def test_what_is_written_unsealed_is_sealed_once_for_all(workers: Workers, write: str, tmp_path: Path) -> None:
    far = open_backend(f"file://{tmp_path}", workers)
    two = Two(workers, f"write={write}", far=far)
    await far.open()
    keys, right = sealed()
    data = [memoryview(bytearray(HEADER_BYTES) + bytes(each[HEADER_BYTES:])) for each in right]
    assert await two.both.write_sealed(keys, data, EXPECTED) == [Stored.WRITTEN] * 6
    for store in (two.near, far)[write == "farthest" :]:
        back = room(6, len(right[0]))
        assert await store.read(keys, back) == [True] * 6
        assert back == right
    await far.close()


async def test_looking_after_objects_promotes_nothing(workers: Workers) -> None:
    two = Two(workers)
    keys, data = objects(3)
    await two.far.write(keys, data)
    await two.near.write(keys[1:2], data[1:2])
    back = room(4, 100)
    assert await two.both.peek([*keys, "absent"], back) == [True] * 3 + [False]
    assert back[:3] == data
    await promoted(two.both)
    assert await two.near.exists(["k0"]) == 0


async def test_one_store_that_fails_does_not_keep_the_others_from_removing(workers: Workers) -> None:
    class Stuck(MemoryBackend):
        async def delete(self, keys: object) -> NoReturn:
            raise BackendError("planted")

    two = Two(workers, near=Stuck())
    keys, data = objects(2)
    await two.far.write(keys, data)
    for remove in (two.both.delete(["k0"]), two.both.quarantine("k1")):
        with pytest.raises(BackendError, match="planted"):
            await remove
    assert await two.far.exists(["k1"]) == await two.far.exists(["k0"]) == 0


async def test_what_is_bad_goes_from_all(workers: Workers) -> None:
    two = Two(workers)
    keys, data = objects(2)
    await two.both.write(keys, data)
    assert await two.both.quarantine("k0")
    assert (await two.near.exists(["k0"]), await two.far.exists(["k0"])) == (0, 0)
    assert await two.both.exists(["k1"]) == 1


@pytest.mark.parametrize("near_is_bad", [True, False])
async def test_what_is_put_away_from_outside_is_the_bad_copy(workers: Workers, near_is_bad: bool) -> None:
    """The scrubber and ``hicache store verify --quarantine`` look at one copy: the good one stays."""
    two = Two(workers)
    page_hash = bytes(range(32))
    key = f"{page_hash.hex()}_ns"
    good, bad = (memoryview(bytearray(HEADER_BYTES + 100)) for _ in range(2))
    for data in (good, bad):
        seal(data, b"n" * 16, page_hash)
    bad[-1] ^= 1
    await two.near.write([key], [bad if near_is_bad else good])
    await two.far.write([key], [good if near_is_bad else bad])
    assert await two.both.quarantine(key)
    kept = two.far if near_is_bad else two.near
    assert (await two.near.exists([key])) + (await two.far.exists([key])) == 1
    back = room(1, HEADER_BYTES + 100)
    assert await kept.read([key], back) == [True]
    assert back[0] == good
    assert await two.both.quarantine(key), "all copies are whole, and the caller knows better"
    assert await two.both.exists([key]) == 0


async def test_a_whole_object_under_the_name_of_another_page_is_bad(workers: Workers) -> None:
    two = Two(workers)
    key = f"{bytes(32).hex()}_ns"
    right, misfiled = (memoryview(bytearray(HEADER_BYTES + 100)) for _ in range(2))
    seal(right, b"n" * 16, bytes(32))
    seal(misfiled, b"n" * 16, bytes(range(32)))
    await two.near.write([key], [misfiled])
    await two.far.write([key], [right])
    assert await two.both.quarantine(key)
    assert (await two.near.exists([key]), await two.far.exists([key])) == (0, 1)


class Broken(MemoryBackend):
    """Fails whatever it is asked, and counts how often that is."""

    asked = 0

    async def exists(self, keys: object) -> NoReturn:
        self._fail()

    async def read(self, keys: object, buffers: object) -> NoReturn:
        self._fail()

    async def write(self, keys: object, buffers: object) -> NoReturn:
        self._fail()

    def _fail(self) -> NoReturn:
        self.asked += 1
        raise BackendError("planted")


@pytest.mark.parametrize("which", ["near", "far"])
async def test_a_store_that_fails_costs_what_only_it_has_and_is_left_alone(workers: Workers, which: str) -> None:
    broken = Broken()
    two = Two(workers, **{which: broken})  # type: ignore[arg-type]
    keys, data = objects(4)
    for _ in range(5):
        assert set(await two.both.write(keys, data)) <= {Stored.WRITTEN, Stored.PRESENT}
        assert await two.both.exists([*keys, "absent"]) == 4
        back = room(5, 100)
        assert await two.both.read([*keys, "absent"], back) == [True] * 4 + [False]
        assert back[:4] == data
    assert broken.asked == 2
    name = {"near": "0:memory", "far": "1:memory"}[which]
    assert two.both.stats()[f"{name}.breaker"] == "open"
    assert two.both.stats()[f"{name}.spared"] != 0


async def test_when_all_fail_it_is_an_error(workers: Workers) -> None:
    two = Two(workers, near=Broken(), far=Broken())
    keys, data = objects(2)
    for call in (two.both.exists(keys), two.both.read(keys, room(2, 100)), two.both.write(keys, data)):
        with pytest.raises(BackendError, match="none of the stores"):
            await call


async def test_a_far_store_that_hangs_is_left_alone_by_later_calls(workers: Workers) -> None:
    far = Hanging(MemoryBackend(), ("exists", "read", "write"))
    two = Two(workers, "patience_s=0.02", far=far)
    keys, data = objects(2)
    await two.near.write(keys, data)
    hung = [asyncio.ensure_future(two.both.exists(["absent"])) for _ in range(2)]
    with anyio.fail_after(30):
        while two.both._layers[1].state != "open":
            await checkpoint()
    assert not any(task.done() for task in hung)
    assert await two.both.exists([*keys, "absent"]) == 2
    assert await two.both.read([*keys, "absent"], room(3, 100)) == [True, True, False]
    for task in hung:
        task.cancel()
    await asyncio.wait(hung)


async def test_one_that_does_not_open_closes_the_others(workers: Workers) -> None:
    closed = []

    class Watched(MemoryBackend):
        async def close(self) -> None:
            closed.append(self)

    class Shut(MemoryBackend):
        async def open(self) -> None:
            raise BackendError("shut")

    two = Two(workers, near=Watched(), far=Shut())
    with pytest.raises(BackendError, match="shut"):
        await two.both.open()
    assert closed == [two.near]


async def test_closing_ends_promotions(workers: Workers) -> None:
    two = Two(workers, near=Hanging(MemoryBackend(), ("write",)))
    keys, data = objects(2)
    await two.far.write(keys, data)
    assert await two.both.read(keys, room(2, 100)) == [True] * 2
    assert len(two.both._promotions) == 1
    with anyio.fail_after(30):
        await two.both.close()
    assert not two.both._promotions
    assert two.both.stats()["promoting_bytes"] == 0


async def test_who_is_back_is_asked_again() -> None:
    layer = Layer("0:x", MemoryBackend(), 1.0)

    async def fail() -> int:
        raise BackendError("planted")

    async def work() -> int:
        return 7

    assert [await layer.ask("x", fail) for _ in range(3)] == [None] * 3
    assert layer.counts == {"failed": 2, "spared": 1, "breaker_open": 1}
    assert await layer.ask("x", work) is None
    assert layer._breaker is not None
    layer._breaker._since_s -= 10.0  # time passes
    assert await layer.ask("x", work) == 7
    assert layer.state == "closed"


async def test_a_cache_has_all_pages_back_although_copies_that_are_near_are_bad(tmp_path: Path) -> None:
    near, url = tmp_path / "near", f"file://{tmp_path}/near file://{tmp_path}/far"
    async with open_small(url=url) as small:
        await small.engine.answer(prompt(6))
        assert await small.cache.drain(10.0) == 0
    files = sorted(near.glob("objects/*/*.kv"))
    right = {file.name: file.read_bytes() for file in files}
    for file in files[:3]:
        file.write_bytes(spoilt(memoryview(right[file.name])))
    async with open_small(url=url) as small:  # the model looks at every byte
        assert (await small.engine.answer(prompt(6))).account.storage == 6 * PAGE_SIZE
        storage = small.cache.snapshot().storage
        assert storage is not None
        assert (storage.backend["0:file.bad"], storage.corrupt_pages) == (3, 0)
        with anyio.fail_after(30):
            while small.cache.snapshot().storage.backend["promoting_bytes"]:  # type: ignore[union-attr]  # noqa: ASYNC110
                await anyio.sleep(0.01)
    assert {file.name: file.read_bytes() for file in near.glob("objects/*/*.kv")} == right


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("layers://", "names 0 stores"),
        ("layers:// memory://a", "names 1 stores"),
        ("memory://a memory://a", "one store twice"),
        ("layers://?write=some memory://a memory://b", "write"),
        ("layers://?promote=maybe memory://a memory://b", "promote"),
        ("layers://?patience_s=0 memory://a memory://b", "patience_s"),
        ("memory://a nothing", "not a URL"),
    ],
)
def test_urls_that_cannot_be_honoured(url: str, words: str, workers: Workers) -> None:
    with pytest.raises(ConfigError, match=words):
        open_backend(url, workers)
