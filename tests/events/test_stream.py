"""Subscribers of an open cache: what they hear, when they are slow, come late, come back, or are there at the end."""

from __future__ import annotations

import threading
from itertools import pairwise

import anyio
import msgspec
import pytest

from hicache_actors import HiCache, StoppedError, TransferError, UsageError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.events import Directory, EventBatch, PagesStored, Subscription, TiersCleared
from hicache_actors.events import stream as stream_module
from hicache_actors.keys.scope import Scope
from hicache_actors.testing.small import PAGE_SIZE, Small, evict_device, open_small, prompt
from tests.events.kit import really

LOOPS = pytest.mark.parametrize("anyio_backend", ["virtual:1", "asyncio", "uvloop"], indirect=True)


async def read(subscription: Subscription) -> EventBatch:
    with anyio.fail_after(20):
        return await anext(subscription)


async def follow(subscription: Subscription, directory: Directory, cache: HiCache) -> None:
    """Hear until the directory says what is so."""
    with anyio.fail_after(20):
        while directory.pages != really(cache.core):
            directory.apply(await anext(subscription))


@LOOPS
async def test_an_index_by_events_alone_is_right_through_all_tiers(anyio_backend: object) -> None:
    async with open_small(device_pages=12, host_pages=24, backend=MemoryBackend()) as small:
        cache, directory = small.cache, Directory()
        events = cache.events()
        asked, tenant = prompt(8), prompt(3, scope=Scope(lora="adapter", salt="tenant"))
        await small.engine.answer(asked)
        await small.engine.answer(tenant)
        await cache.drain(5.0)
        await follow(events, directory, cache)
        hashes = asked.page_hashes(PAGE_SIZE, 8)
        assert directory.leading(hashes, "device") == directory.leading(hashes, "storage") == 8
        assert directory.leading(tenant.page_hashes(PAGE_SIZE, 3), "host") == 3
        await evict_device(small)
        await follow(events, directory, cache)
        assert directory.leading(hashes, "device") == 0
        assert directory.leading(hashes, "host") == 8
        await cache.reset()
        await small.engine.answer(prompt(2, family=7))
        with anyio.fail_after(20):
            while directory.pages["device"] != really(cache.core)["device"] or directory.pages["host"] & set(hashes):
                directory.apply(await anext(events))
        assert directory.leading(hashes) == 8, "the store keeps what device and host have forgotten"


async def test_what_is_told_says_tokens_and_parents() -> None:
    async with open_small() as small:
        events = small.cache.events()
        snapshot = await read(events)
        assert snapshot.events == (TiersCleared(("device", "host", "storage"), "snapshot"),)
        asked = prompt(3, scope=Scope(salt="tenant"))
        await small.engine.answer(asked)
        await small.engine.answer(prompt(5, scope=Scope(salt="tenant")))
        first, second = [
            event
            for event in [*(await read(events)).events, *(await read(events)).events, *(await read(events)).events]
            if isinstance(event, PagesStored) and event.tier == "device"
        ][:2]
        assert first.hashes == tuple(asked.page_hashes(PAGE_SIZE, 3))
        assert (first.parent, first.page_size, first.scope) == (None, PAGE_SIZE, Scope(salt="tenant"))
        assert first.tokens == bytes(asked.packed[: 8 * 3 * PAGE_SIZE])
        assert second.parent == first.hashes[-1]


async def test_batches_are_encoded_as_they_are() -> None:
    async with open_small() as small:
        await small.engine.answer(prompt(3))
        batch = await read(small.cache.events())
        data = msgspec.msgpack.encode(batch)
        assert msgspec.msgpack.decode(data, type=EventBatch) == batch


@LOOPS
async def test_a_slow_subscriber_loses_batches_and_is_told_how_many(anyio_backend: object) -> None:
    async with open_small(device_pages=40) as small:
        slow, quick = small.cache.events(queue_batches=2), small.cache.events()
        await read(slow)
        heard = [await read(quick)]
        for family in range(1, 7):
            await small.engine.answer(prompt(2, family=family))
        await small.cache.drain(5.0)
        told = Directory()
        told.apply(heard[0])
        with anyio.fail_after(20):
            while told.pages != really(small.cache.core):
                heard.append(await anext(quick))
                told.apply(heard[-1])
        assert all(before.id == batch.after for before, batch in pairwise(heard))
        snapshot = await read(slow)
        first = snapshot.events[0]
        assert isinstance(first, TiersCleared)
        assert first.cause == "lost"
        assert snapshot.lost == small.cache.snapshot().events.lost_batches == len(heard) - 1 > 2
        directory = Directory()
        directory.apply(snapshot)
        assert directory.pages == told.pages
        await small.engine.answer(prompt(2, family=8))
        await follow(slow, directory, small.cache)


@LOOPS
async def test_a_connection_that_broke_goes_on_where_it_was(anyio_backend: object) -> None:
    async with open_small(device_pages=40) as small:
        first, directory = small.cache.events(), Directory()
        directory.apply(await read(first))
        await small.engine.answer(prompt(2, family=1))
        directory.apply(await read(first))
        first.close()
        with pytest.raises(StopAsyncIteration):
            await anext(first)
        await small.engine.answer(prompt(2, family=2))
        again = small.cache.events(after=directory.seen)
        await follow(again, directory, small.cache)
        assert small.cache.snapshot().events.snapshots == 1
        late = small.cache.events(after=10**9)
        directory.apply(await read(late))
        await follow(late, directory, small.cache)  # a write-back may end meanwhile
        assert small.cache.snapshot().events.snapshots == 2


async def test_a_batch_that_is_missing_is_noticed() -> None:
    async with open_small(device_pages=40) as small:
        events, directory = small.cache.events(), Directory()
        directory.apply(await read(events))
        await small.engine.answer(prompt(2, family=1))
        await read(events)
        with pytest.raises(ValueError, match="was the last one here"):
            directory.apply(await read(events))


async def test_core_writes_nothing_while_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "HISTORY_BATCHES", 3)
    async with open_small(device_pages=40) as small:
        await small.engine.answer(prompt(2, family=1))
        assert small.cache.core.state.residents.changes is None
        events = small.cache.events()
        await read(events)
        assert small.cache.core.state.residents.changes is not None
        events.close()
        for family in range(2, 9):
            await small.engine.answer(prompt(2, family=family))
        await small.cache.drain(5.0)
        with anyio.fail_after(20):
            while small.cache.core.state.residents.changes is not None:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        directory = Directory()
        directory.apply(await read(small.cache.events()))
        assert directory.pages == really(small.cache.core)


async def test_too_much_at_once_is_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_BACKLOG_RECORDS", 20)
    monkeypatch.setattr(stream_module, "TELL_NODES", 2)
    async with open_small(device_pages=40) as small:
        events, directory = small.cache.events(), Directory()
        directory.apply(await read(events))
        with small.cache.driver.together():  # one section of many records
            for family in range(1, 13):
                asked = prompt(2, family=family)
                lease = small.cache.lease(asked, f"r{family}")
                lease.allocate(len(asked))
                lease.commit(len(asked))
                lease.release()
        await follow(events, directory, small.cache)
        told = small.cache.snapshot().events
        assert told.restarts
        assert told.snapshots >= 2


async def test_subscribers_hear_that_the_cache_has_degraded_and_the_end() -> None:
    small: Small
    async with open_small(check_pools=False) as small:
        events, directory = small.cache.events(), Directory()
        await small.engine.answer(prompt(3))
        await follow(events, directory, small.cache)
        small.cache.driver.fail(TransferError("the device was pulled out"))
        with anyio.fail_after(20):
            while directory.pages["device"] | directory.pages["host"]:
                directory.apply(batch := await anext(events))
        assert batch.events[-1] == TiersCleared(("device", "host"), "degraded")
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    with pytest.raises(StoppedError):
        small.cache.events()


async def test_another_store_begins_empty() -> None:
    async with open_small(backend=MemoryBackend()) as small:
        events, directory = small.cache.events(), Directory()
        await small.engine.answer(prompt(3))
        await small.cache.drain(5.0)
        await follow(events, directory, small.cache)
        assert directory.pages["storage"]
        await small.cache.detach_storage(5.0)
        await follow(events, directory, small.cache)
        assert not directory.pages["storage"]
        assert directory.pages["host"]


async def test_an_emptied_store_holds_what_is_stored_again() -> None:
    backend = MemoryBackend()
    async with open_small(backend=backend) as small:
        events, directory = small.cache.events(), Directory()
        await small.engine.answer(prompt(3))
        await small.cache.drain(5.0)
        await follow(events, directory, small.cache)
        await small.cache.reset()
        assert await small.cache.clear_storage(5.0) == 3
        await follow(events, directory, small.cache)
        assert not directory.pages["storage"]
        await small.engine.answer(prompt(2, family=1))
        await small.cache.drain(5.0)
        await follow(events, directory, small.cache)
        assert len(directory.pages["storage"]) == len(backend._objects) == 2


async def test_an_engine_thread_is_heard_on_the_loop() -> None:
    async with open_small(driver="step") as small:
        cache, directory = small.cache, Directory()
        events = cache.events()

        def engine() -> None:
            for family in range(3):
                cache.begin_step()
                asked = prompt(2, family=family)
                lease = cache.lease(asked, f"r{family}")
                lease.allocate(len(asked))
                lease.commit(len(asked))
                lease.release()
                cache.end_step()
            while cache.needs_step:
                cache.begin_step()
                cache.end_step()

        thread = threading.Thread(target=engine)
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
        await follow(events, directory, cache)
        assert len(directory.pages["device"]) == 6


async def test_hashing_that_nobody_waits_for_any_more_ends_no_subscription() -> None:
    """Fetches that miss their deadline while they are hashed leave that behind, in the threads that make the events too."""
    ended = threading.Event()
    async with open_small() as small:
        cache, directory = small.cache, Directory()
        events = cache.events()
        await follow(events, directory, cache)
        for _ in range(8):
            with anyio.move_on_after(0.01):
                await cache._parts.workers.run(ended.wait)
        await small.engine.answer(prompt(4))
        ended.set()
        await follow(events, directory, cache)
        assert directory.leading(prompt(4).page_hashes(PAGE_SIZE, 4), "device") == 4


async def test_a_queue_has_room() -> None:
    async with open_small() as small:
        with pytest.raises(UsageError):
            small.cache.events(queue_batches=0)
