"""Staging slots: bounded, one call's from its turn until it has really ended, and the same objects as without them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.objects import HEADER_BYTES, MAGIC
from hicache_actors.backends.wrappers import Faulty, Hanging, Slow, Wrapper
from hicache_actors.core.pool import SlotError
from hicache_actors.core.words import unpack_slots
from hicache_actors.errors import BackendError
from hicache_actors.memory.host import MAGIC_BYTES, HostMemory
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.testing.kv_samples import as_bytes, fill
from hicache_actors.testing.lives import run_checked
from hicache_actors.testing.loop import run_virtual
from hicache_actors.testing.small import SHAPE
from hicache_actors.tiers.storage.staging import StagingPool
from hicache_actors.tiers.storage.words import StagingSnapshot

from .kit import OBJECT_BYTES, PAGES, Lone, hashes, slots

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2])


def page(memory: HostMemory, slot: int) -> bytes:
    """The bytes of a page, layer by layer, whatever the layout."""
    return b"".join(as_bytes(tensor[slot]) for layer in range(SHAPE.layers) for tensor in memory.layer(layer))


def scribble(memory: HostMemory, first: int, pages: int, seed: int) -> None:
    for slot in range(first, first + pages):
        for layer in range(SHAPE.layers):
            for kind, tensor in enumerate(memory.layer(layer)):
                fill(tensor[slot], seed=((seed * PAGES + slot) * SHAPE.layers + layer) * 2 + kind)


# -- the pool ----------------------------------------------------------------------------------------------------------


def pool(pages: int) -> StagingPool:
    return StagingPool("read", HostMemory(SlotLayout(SHAPE), pages))


def nothing() -> None:
    raise AssertionError("nobody waits")


def test_slots_are_handed_out_once_and_with_cleared_headers() -> None:
    at = pool(4)
    first, second = at.take(3, nothing), at.take(1, nothing)
    assert first is not None
    assert second is not None
    assert sorted(unpack_slots(first) + unpack_slots(second)) == [0, 1, 2, 3]
    for slot in unpack_slots(first):
        at.memory.header(slot)[:MAGIC_BYTES] = MAGIC
    at.give(first)
    assert at.snapshot() == StagingSnapshot(total_pages=4, held_pages=1, hung_pages=0)
    with pytest.raises(SlotError):
        at.give(first)
    again = at.take(2, nothing)
    assert again is not None
    assert all(bytes(at.memory.header(slot)[:MAGIC_BYTES]) == bytes(MAGIC_BYTES) for slot in unpack_slots(again))


def test_who_gets_none_is_told_once_when_some_have_come_back() -> None:
    at = pool(4)
    told: list[str] = []
    first, second = at.take(2, nothing), at.take(2, nothing)
    assert first is not None
    assert second is not None
    tell: Callable[[], None] = lambda: told.append("again")  # noqa: E731  the same one twice
    assert at.take(1, tell) is None
    assert at.take(2, tell) is None
    at.give(first)
    assert told == ["again"]
    at.give(second)
    assert told == ["again"]


def test_what_hung_calls_hold_counts_as_gone_until_it_is_given_back() -> None:
    at = pool(4)
    told: list[str] = []
    held = at.take(3, nothing)
    assert held is not None
    assert at.take(2, lambda: told.append("again")) is None
    assert at.could_take(4)
    at.hang(held)
    assert told == ["again"]  # who waits may be one that it is of no use for
    assert (at.could_take(1), at.could_take(2)) == (True, False)
    assert at.snapshot() == StagingSnapshot(total_pages=4, held_pages=3, hung_pages=3)
    at.give(held)
    assert at.could_take(4)
    assert at.snapshot() == StagingSnapshot(total_pages=4, held_pages=0, hung_pages=0)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anyio_backend", ["virtual:1", "asyncio"], indirect=True)
async def test_what_is_stored_is_what_a_host_of_whole_pages_would_have_stored(anyio_backend: object) -> None:
    staged, plain = MemoryBackend(), MemoryBackend()
    at, other = Lone(staged, layout="layer_first"), Lone(plain)
    for each in (at, other):
        scribble(each.memory, 0, 10, seed=1)
        await each.save(0, 10)
    keys = at.store.keys.keys(hashes(0, 10))
    assert keys == other.store.keys.keys(hashes(0, 10))
    found = [[memoryview(bytearray(OBJECT_BYTES)) for _ in keys] for _ in range(2)]
    for store, buffers in zip((staged, plain), found, strict=True):
        assert list(await store.read(keys, buffers)) == [True] * 10
    assert [bytes(buffer) for buffer in found[0]] == [bytes(buffer) for buffer in found[1]]
    assert at.empty()
    for each in (at, other):
        await each.close()


@pytest.mark.parametrize("writer", ["page_first_direct", "page_first", "page_head", "layer_first"])
@pytest.mark.parametrize("reader", ["page_first_direct", "page_first", "page_head", "layer_first"])
async def test_a_page_comes_back_as_it_was_or_not_at_all(writer: Any, reader: Any) -> None:
    store = MemoryBackend()
    first, second = Lone(store, layout=writer), Lone(store, layout=reader)
    scribble(first.memory, 0, 8, seed=1)
    await first.save(0, 8)
    wanted = [page(first.memory, slot) for slot in range(8)]
    scribble(second.memory, 8, 8, seed=2)
    before = [page(second.memory, slot) for slot in range(PAGES)]
    hit = await second.query(0, 8).answer()
    got = await second.store.read(hashes(0, 8), slots(8, 8), lambda: True).answer()
    same = writer == reader or {writer, reader} == {"page_first_direct", "layer_first"}
    assert (hit, got) == ((8, 8) if same else (0, 0))
    if same:
        assert [page(second.memory, slot) for slot in range(8, 16)] == wanted
        assert [page(second.memory, slot) for slot in range(16, PAGES)] == before[16:]
    else:
        assert [page(second.memory, slot) for slot in range(PAGES)] == before
    assert first.empty()
    assert second.empty()
    for each in (first, second):
        await each.close()


@given(st.integers(0, 7), st.sampled_from(["payload", "header", "magic", "length"]))
def test_a_page_that_is_not_right_never_reaches_the_host(bad: int, how: str) -> None:
    class Lying(Wrapper):
        async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
            found = list(await super().read(keys, buffers))
            at = {"payload": HEADER_BYTES + 5, "header": 20, "magic": 0, "length": 72}[how]
            buffers[bad][at] ^= 1
            return found

    async def main() -> None:
        store = MemoryBackend()
        at = Lone(store, layout="layer_first")
        scribble(at.memory, 0, 8, seed=1)
        await at.save(0, 8)
        wanted = [page(at.memory, slot) for slot in range(bad)]
        scribble(at.memory, 8, 8, seed=2)
        before = [page(at.memory, slot) for slot in range(8 + bad, 16)]
        at.store.backend = Lying(store)
        assert await at.store.read(hashes(0, 8), slots(8, 8), lambda: True).answer() == bad
        assert [page(at.memory, slot) for slot in range(8, 8 + bad)] == wanted
        assert [page(at.memory, slot) for slot in range(8 + bad, 16)] == before
        await at.settled()
        assert at.pages["corrupt_pages"] == 1
        assert at.empty()
        await at.close()

    run_virtual(main)


async def test_old_bytes_in_a_staging_slot_pass_for_no_page() -> None:
    """A store that says it has read, and has written nothing."""

    class Idle(Wrapper):
        async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
            return [True] * len(keys)

    store = MemoryBackend()
    at = Lone(store, layout="layer_first", staged_pages=4)
    scribble(at.memory, 0, 4, seed=1)
    await at.save(0, 4)
    assert await at.read(0, 4).answer() == 4
    at.store.backend = Idle(store)
    assert await at.read(0, 4).answer() == 0
    await at.settled()
    await at.close()


# -- calls -------------------------------------------------------------------------------------------------------------


@SEEDS
def test_a_hung_read_keeps_its_slots_and_the_next_ones_get_others(seed: int | None) -> None:
    async def main() -> None:
        backend = Hanging(MemoryBackend())
        backend.release()
        at = Lone(backend, layout="layer_first", staged_pages=8, read_timeout_s=1.0, breaker_failures=1000)
        scribble(at.memory, 0, 8, seed=1)
        await at.save(0, 8)
        before = [page(at.memory, slot) for slot in range(16)]
        backend.hang_again()
        hung = at.store.read(hashes(0, 4), slots(8, 4), lambda: True)
        assert await hung.answer() == 0
        held = set(unpack_slots(hung.staged))
        assert at.staging is not None
        assert at.staging.snapshot()["read"] == StagingSnapshot(total_pages=8, held_pages=4, hung_pages=4)
        backend.verbs = frozenset()
        for _ in range(20):
            call = at.read(4, 4)
            assert await call.answer() == 4
            assert not held & set(unpack_slots(call.staged))
        assert [page(at.memory, slot) for slot in range(16)] == before
        backend.release()
        await at.settled()
        assert [page(at.memory, slot) for slot in range(16)] == before  # it came too late, and went nowhere
        assert at.empty()
        await at.close()

    run_checked(main, seed)


@SEEDS
def test_who_needs_what_hung_calls_hold_is_refused_and_who_needs_less_is_served(seed: int | None) -> None:
    async def main() -> None:
        backend = Hanging(MemoryBackend())
        backend.release()
        at = Lone(
            backend, layout="layer_first", staged_pages=8, read_concurrency=4, read_timeout_s=1.0, breaker_failures=1000
        )
        await at.save(0, 8)
        backend.hang_again()
        hung = at.read(0, 6)
        waiting = [at.read(0, 4), at.read(0, 2), at.read(0, 3)]
        await asyncio.sleep(0.5)
        assert [call.state for call in (hung, *waiting)] == ["running", "waiting", "waiting", "waiting"]  # in turn
        assert await hung.answer() == 0
        assert await waiting[0].answer() == 0
        assert await waiting[2].answer() == 0
        assert at.refused == {("read", "hung"): 2}
        assert waiting[1].state == "running"
        assert await at.read(0, 3).answer() == 0  # at once
        assert at.refused == {("read", "hung"): 3}
        assert at.lane("read").hung_calls == 1
        assert await at.query(0, 8).answer() == 8
        backend.release()
        await at.settled()
        assert await at.read(0, 8).answer() == 8
        assert at.empty()
        await at.close()

    run_checked(main, seed)


@SEEDS
def test_hung_writes_hold_no_slot_of_reads(seed: int | None) -> None:
    async def main() -> None:
        store = MemoryBackend()
        backend = Hanging(store, ["write"])
        backend.release()
        at = Lone(backend, layout="layer_first", staged_pages=4, write_timeout_s=1.0, max_hung_calls=9)
        await at.save(0, 4)
        backend.hang_again()
        writes = [at.write(page, 2) for page in range(10, 30, 2)]
        for _ in range(5):
            assert await at.read(0, 4).answer() == 4
            await asyncio.sleep(0.5)
        for write in writes:
            assert not any(await write.answer())
        assert backend.hung == 2  # as many as there are slots for
        assert await at.read(0, 4).answer() == 4
        backend.release()
        await at.settled()
        assert at.empty()
        await at.close()

    run_checked(main, seed)


def test_two_stores_share_the_slots_and_one_waits_for_what_the_other_gives_back() -> None:
    """A detached store whose calls run on, and the one that has taken its place."""

    async def main() -> None:
        at = Lone(Slow(MemoryBackend(), latency_s=1.0), layout="layer_first", staged_pages=4)
        await at.save(0, 4)
        other = Lone(MemoryBackend(), layout="layer_first", staging=at.staging)
        await other.save(0, 4)
        first, second = at.read(0, 4), other.read(0, 4)
        await asyncio.sleep(0.5)
        assert second.state == "waiting"
        assert await first.answer() == 4
        assert await second.answer() == 4
        assert at.empty()
        assert other.empty()
        await other.close()
        await at.close()

    run_checked(main, None)


@pytest.mark.parametrize("seed", range(12))
def test_a_storm_leaves_every_slot_where_it_belongs(seed: int) -> None:
    """Calls that hang, fail and are left at random, with slots for a few of them: what comes back is right, nothing is kept."""

    async def main() -> None:
        rng = random.Random(seed)
        store = MemoryBackend()
        hanging = Hanging(Slow(store, latency_s=0.01, jitter_s=0.9, seed=seed), ["read", "write"])
        hanging.release()
        backend: Backend = Faulty(hanging, lambda access: BackendError("planted") if rng.random() < 0.05 else None)
        at = Lone(
            store,
            layout="layer_first",
            staged_pages=7,
            read_timeout_s=1.2,
            write_timeout_s=1.3,
            breaker_failures=1000,
            max_hung_calls=3,
        )
        scribble(at.memory, 0, PAGES // 2, seed=seed)
        for first in range(0, PAGES // 4, 4):
            await at.save(first, 4)
        at.store.backend = backend
        wanted = [page(at.memory, slot) for slot in range(PAGES // 2)]
        ends: list[int] = []
        good = 0

        async def one(number: int) -> None:
            nonlocal good
            first, pages = rng.randrange(PAGES // 2 - 4), rng.randrange(1, 5)
            if rng.random() < 0.5:
                write = at.write(first, pages)
                write.add_callback(lambda: ends.append(number))
                with anyio.move_on_after(rng.choice([0.3, 60.0])):
                    assert len(await write.answer()) in (0, pages)
                return
            target = targets.pop()
            read = at.store.read(hashes(first, pages), slots(target, pages), lambda: True)

            def ended() -> None:
                ends.append(number)
                targets.insert(0, target)

            read.add_callback(ended)
            with anyio.move_on_after(rng.choice([0.3, 60.0])):
                got = await read.answer()
                good += got
                for at_page in range(got):
                    assert page(at.memory, target + at_page) == wanted[first + at_page]

        targets = list(range(PAGES // 2, PAGES - 4, 4))
        async with anyio.create_task_group() as group:
            for number in range(200):
                while not targets:
                    hanging.release()
                    await asyncio.sleep(0.1)
                group.start_soon(one, number)
                await asyncio.sleep(rng.random() * 0.2)
                assert at.staging is not None
                assert all(0 <= each.hung_pages <= each.held_pages <= 7 for each in at.staging.snapshot().values())
                if number % 40 == 20:
                    hanging.hang_again()
                elif number % 40 == 33:
                    hanging.release()
        hanging.release()
        await at.settled()
        assert sorted(ends) == list(range(200))
        assert good > 20
        assert at.empty()
        await at.close()

    run_checked(main, seed)


def test_stored_outcomes_are_told_apart_as_without_staging() -> None:
    async def main() -> None:
        at = Lone(MemoryBackend(), layout="layer_first", staged_pages=4)
        assert await at.write(0, 2).answer() == [Stored.WRITTEN] * 2
        assert await at.write(0, 4).answer() == [Stored.PRESENT] * 2 + [Stored.WRITTEN] * 2
        first, second = at.write(10, 3), at.write(11, 3)  # the second leaves two pages to the first
        assert await first.answer() == [Stored.WRITTEN] * 3
        assert await second.answer() == [Stored.WRITTEN] * 3
        assert at.pages["joined_pages"] == 2
        assert await at.read(10, 4).answer() == 4
        assert at.empty()
        await at.close()

    run_checked(main, None)
