"""Attaching, replacing and detaching the storage while requests run."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.folder import Folder
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Hanging, Slow, Verb, Wrapper
from hicache_actors.config import Deadlines, ModelFacts
from hicache_actors.errors import BackendError, ConfigError, StoppedError, TransferError
from hicache_actors.testing.lives import LIFE_PAGES, reference_token, request, run_checked
from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.small import Small, open_small, prompt, small_config

from .kit import stepping

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2, 3])
PAGES = LIFE_PAGES


class Seen(Wrapper):
    """Counts what is asked of it, and what after its close."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.asked = self.asked_late = 0
        self.opened = self.closed = False

    async def open(self) -> None:
        self.opened = True
        await super().open()

    async def close(self) -> None:
        self.closed = True
        await super().close()

    def _count(self) -> None:
        self.asked += 1
        self.asked_late += self.closed

    async def exists(self, keys: Sequence[str]) -> int:
        self._count()
        return await super().exists(keys)

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        self._count()
        return await super().read(keys, buffers)

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        self._count()
        return await super().write(keys, buffers)


def objects(backend: Backend) -> int:
    while isinstance(backend, Wrapper):
        backend = backend.inner
    assert isinstance(backend, MemoryBackend)
    return len(backend._objects)


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def found(small: Small, pages: int = PAGES, family: int = 0) -> int:
    """Pages of a prompt that the storage gives, once nothing is left on device and host."""
    await small.cache.drain(30.0)
    await small.cache.reset()
    async with small.cache.acquire(prompt(pages, family=family), deadline_s=5.0) as lease:
        return lease.account.storage // small.cache.page_size


# -- one after the other -----------------------------------------------------------------------------------------------


@SEEDS
def test_a_store_can_be_attached_later_and_gets_what_the_host_holds(seed: int | None) -> None:
    async def main() -> None:
        async with open_small() as small:
            assert small.cache.snapshot().storage is None
            for family in range(3):
                await request(small, prompt(4, family=family))
            await small.cache.drain(5.0)
            await small.cache.attach_storage("memory://later" + str(seed))
            assert await small.cache.drain(30.0) == 0
            stored = await small.cache.stored(prompt(4), 5.0)
            assert (stored.tokens, stored.reason) == (16, None)
            snapshot = small.cache.snapshot().storage
            assert snapshot is not None
            assert (snapshot.url, snapshot.attached, snapshot.written_pages) == (f"memory://later{seed}", 1, 12)
            assert await found(small, 4, family=2) == 4
        async with open_small(url="memory://later" + str(seed)) as other:
            assert await found(other, 4, family=1) == 4

    run_checked(main, seed)


@SEEDS
def test_after_detach_nothing_is_stored_and_nothing_is_asked(seed: int | None) -> None:
    async def main() -> None:
        backend = Seen(MemoryBackend())
        async with open_small(backend=backend) as small:
            wanted = reference_token(small, prompt(PAGES))
            assert await request(small, prompt(PAGES)) == wanted
            await small.cache.drain(5.0)
            assert await small.cache.detach_storage(5.0) == 0
            assert backend.closed
            asked = backend.asked
            stored = await small.cache.stored(prompt(PAGES), 5.0)
            assert stored.reason == "no_storage"
            assert await found(small) == 0
            assert await request(small, prompt(PAGES)) == wanted
            assert await small.cache.detach_storage(5.0) == 0  # again: there is nothing to do
            assert backend.asked == asked
            snapshot = small.cache.snapshot().storage
            assert snapshot is not None
            assert (snapshot.url, snapshot.lanes, snapshot.detached_calls) == (None, {}, 0)
            await small.cache.attach_storage(backend.inner)
            assert await found(small) == PAGES

    run_checked(main, seed)


@SEEDS
def test_a_store_is_replaced_and_the_new_one_gets_all(seed: int | None) -> None:
    async def main() -> None:
        old, new = Seen(MemoryBackend()), Seen(MemoryBackend())
        async with open_small(backend=old) as small:
            for family in range(3):
                await request(small, prompt(4, family=family))
            await small.cache.drain(5.0)
            asked = old.asked
            await small.cache.attach_storage(new)
            assert old.closed
            assert await small.cache.drain(30.0) == 0
            assert objects(new) == objects(old) == 12
            assert await found(small, 4, family=1) == 4
            assert old.asked == asked
        assert new.closed

    run_checked(main, seed)


@SEEDS
def test_what_is_only_in_the_old_store_is_gone_with_it(seed: int | None) -> None:
    async def main() -> None:
        async with open_small(backend=MemoryBackend()) as small:
            await request(small, prompt(PAGES))
            assert await found(small) == PAGES
            await small.cache.reset()
            await small.cache.attach_storage(MemoryBackend())
            assert await found(small) == 0
            assert await request(small, prompt(PAGES)) == reference_token(small, prompt(PAGES))
            assert await found(small) == PAGES

    run_checked(main, seed)


# -- refused before anything happens -----------------------------------------------------------------------------------


class Shut(MemoryBackend):
    """Cannot be opened, or takes its time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    async def open(self) -> None:
        if self.how == "raises":
            raise KeyError("planted")
        if self.how == "refuses":
            raise BackendError("planted")
        await anyio.sleep(1000)


async def _still_works(small: Small, backend: Seen) -> None:
    assert small.cache.movers.storage.store is not None
    assert small.cache.movers.storage.store.backend is backend
    assert not backend.closed
    assert await request(small, prompt(PAGES)) == reference_token(small, prompt(PAGES))
    assert await found(small) == PAGES


@pytest.mark.parametrize("how", ["raises", "refuses", "hangs"])
def test_a_store_that_cannot_be_opened_changes_nothing(how: str) -> None:
    async def main() -> None:
        backend = Seen(MemoryBackend())
        async with open_small(backend=backend) as small:
            started_s = now_s()
            with pytest.raises(BackendError, match=r"open|planted"):
                await small.cache.attach_storage(Shut(how), deadline_s=3.0)
            assert now_s() - started_s <= 3.0
            await _still_works(small, backend)

    run_checked(main, None)


@pytest.mark.parametrize("url", ["/var/cache", "nosuch://x", "memory://a/b/c", ""])
def test_a_bad_url_is_refused_and_changes_nothing(url: str) -> None:
    async def main() -> None:
        backend = Seen(MemoryBackend())
        async with open_small(backend=backend) as small:
            with pytest.raises(ConfigError) as caught:
                await small.cache.attach_storage(url)
            assert caught.value.field == "storage.url"
            await _still_works(small, backend)

    run_checked(main, None)


def test_facts_that_only_storage_needs_are_checked_when_it_comes() -> None:
    async def main() -> None:
        nameless = msgspec.structs.replace(small_config(), model=ModelFacts(model_id="toy"))
        async with open_small(config=nameless) as small:
            for store in ("memory://", MemoryBackend()):
                with pytest.raises(ConfigError) as caught:
                    await small.cache.attach_storage(store)
                assert caught.value.field == "model.weights"
                assert "set model.weights" in str(caught.value)
            assert small.cache.snapshot().storage is None
            assert await request(small, prompt(PAGES)) == reference_token(small, prompt(PAGES))

    run_checked(main, None)


def test_slots_without_room_for_a_header_take_no_store() -> None:
    async def main() -> None:
        config = small_config()
        bare = msgspec.structs.replace(config, host=msgspec.structs.replace(config.host, header_bytes=0))
        async with open_small(config=bare) as small:
            with pytest.raises(ConfigError) as caught:
                await small.cache.attach_storage(MemoryBackend())
            assert caught.value.field == "host.header_bytes"

    run_checked(main, None)


def test_a_closed_cache_takes_no_store() -> None:
    async def main() -> None:
        async with open_small() as small:
            pass
        with pytest.raises(StoppedError):
            await small.cache.attach_storage("memory://")
        with pytest.raises(StoppedError):
            await small.cache.detach_storage(1.0)

    run_checked(main, None)


# -- beside calls that run or hang -------------------------------------------------------------------------------------


@SEEDS
def test_detach_lets_what_has_begun_end(seed: int | None) -> None:
    """B109: three copies and two stores are pending; after detach the backend sees no call, and what ran has been done."""

    async def main() -> None:
        backend = Seen(Slow(MemoryBackend(), latency_s=1.0))
        async with open_small(backend=backend, host_pages=64) as small:
            small.device.throttle(latency_s=0.2)
            for family in range(3):
                await request(small, prompt(4, family=family))
            while "backup.run" not in small.cache.core.usage().jobs:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            started_s = now_s()
            assert await small.cache.detach_storage(20.0) == 0
            assert 0.1 < now_s() - started_s < 20.0
            assert small.cache.core.usage().jobs.get("backup.run", 0) == 0
            asked, stored = backend.asked, objects(backend)
            assert stored % 4 == 0
            assert stored > 0
            await small.cache.drain(30.0)
            assert (backend.asked, objects(backend), backend.asked_late) == (asked, stored, 0)

    run_checked(main, seed)


@SEEDS
@pytest.mark.parametrize("verb", ["exists", "read", "write"])
def test_detach_ends_in_time_beside_a_hung_call_whose_memory_stays_its_own(verb: Verb, seed: int | None) -> None:
    async def main() -> None:
        backend = Hanging(MemoryBackend(), [verb])
        backend.release()
        seen = Seen(backend)
        async with open_small(backend=seen) as small:
            wanted = reference_token(small, prompt(PAGES))
            await request(small, prompt(PAGES))
            await small.cache.drain(10.0)
            await small.cache.reset()
            backend.hang_again()
            async with anyio.create_task_group() as group:
                group.start_soon(request, small, prompt(PAGES, family=int(verb == "write")))
                await asyncio.sleep(0.2)
                assert backend.hung == 1
                started_s = now_s()
                left = await small.cache.detach_storage(3.0)
                assert now_s() - started_s <= 3.0 + 1e-6
                assert left == 1
            await asyncio.sleep(1.0)
            usage = small.cache.core.usage()
            assert usage.host.limbo_pages == (PAGES if verb == "read" else 0)
            jobs = {"exists": {}, "read": {"prefetch.limbo": 1}, "write": {"backup.limbo": 1}}[verb]
            assert usage.jobs == jobs
            snapshot = small.cache.snapshot().storage
            assert snapshot is not None
            assert (snapshot.detached_calls, snapshot.open_calls) == (1, 1)
            for family in range(4):  # host pages come and go; those of the hung call do not
                await request(small, prompt(7, family=10 + family))
            check_conservation(small.cache.core)
            assert await request(small, prompt(PAGES)) == wanted
            backend.release()
            await small.cache.pipelines.idle()
            snapshot = small.cache.snapshot().storage
            assert snapshot is not None
            assert (snapshot.detached_calls, seen.asked_late) == (0, 0)
            assert await request(small, prompt(PAGES)) == wanted

    run_checked(main, seed)


@SEEDS
def test_a_hung_store_is_replaced_in_time(seed: int | None) -> None:
    async def main() -> None:
        old, new = Hanging(MemoryBackend(), ["read", "write", "exists"]), MemoryBackend()
        async with open_small(backend=old) as small:
            wanted = reference_token(small, prompt(PAGES))
            assert await request(small, prompt(PAGES)) == wanted
            await asyncio.sleep(0.2)
            assert old.hung == 2  # the lookup and the write
            started_s = now_s()
            await small.cache.attach_storage(new, deadline_s=2.0)
            assert now_s() - started_s <= 2.0 + 1e-6
            assert await small.cache.drain(30.0) == 0
            assert objects(new) == PAGES
            assert await found(small) == PAGES
            old.release()

    run_checked(main, seed)


def test_a_backend_whose_close_hangs_holds_nobody_up() -> None:
    async def main() -> None:
        class Sticky(MemoryBackend):
            async def close(self) -> None:
                await anyio.sleep(1000)

        async with open_small(backend=Sticky(), close_timeout_s=1.0) as small:
            started_s = now_s()
            assert await small.cache.detach_storage(2.0) == 0
            assert now_s() - started_s <= 2.0 + 1e-6
        assert now_s() - started_s < 10.0

    run_checked(main, None)


def test_who_asked_for_it_may_go() -> None:
    async def main() -> None:
        async with open_small(backend=MemoryBackend()) as small:
            old = small.cache.movers.storage.store

            class Slowly(MemoryBackend):
                async def open(self) -> None:
                    await anyio.sleep(1.0)

            new = Slowly()
            with anyio.move_on_after(0.5):
                await small.cache.attach_storage(new)
            assert small.cache.movers.storage.store is old
            await asyncio.sleep(1.0)
            assert small.cache.movers.storage.store is not None
            assert small.cache.movers.storage.store.backend is new

    run_checked(main, None)


def test_closing_ends_an_attach_that_hangs() -> None:
    async def main() -> None:
        async with open_small(close_timeout_s=1.0, check_pools=False) as small:
            attaching = asyncio.ensure_future(small.cache.attach_storage(Shut("hangs"), deadline_s=100.0))
            await asyncio.sleep(0.1)
        assert now_s() < 2.0
        with pytest.raises(StoppedError):
            await attaching

    run_checked(main, None)


@SEEDS
def test_one_transaction_at_a_time(seed: int | None) -> None:
    async def main() -> None:
        stores = [Seen(MemoryBackend()) for _ in range(5)]
        async with open_small() as small:
            async with anyio.create_task_group() as group:
                for store in stores:
                    group.start_soon(small.cache.attach_storage, store)
                    group.start_soon(small.cache.detach_storage, 2.0)
            await small.cache.attach_storage("memory://")
            assert all(store.opened and store.closed for store in stores)

    run_checked(main, seed)


# -- with steps --------------------------------------------------------------------------------------------------------


def test_with_steps_the_next_step_decides() -> None:
    async def main() -> None:
        backend = MemoryBackend()
        async with open_small(driver="step", backend=backend) as small, stepping(small.cache):
            await small.cache.detach_storage(5.0)
            await small.cache.attach_storage(MemoryBackend())
            snapshot = small.cache.snapshot().storage
            assert snapshot is not None
            assert snapshot.attached == 2

    run_checked(main, None)


def test_an_engine_that_makes_no_steps_cannot_keep_a_store() -> None:
    """It is cut off in time; Core learns of it in the next step, whenever that is."""

    async def main() -> None:
        backend = Seen(MemoryBackend())
        async with open_small(driver="step", backend=backend) as small:
            started_s = now_s()
            assert await small.cache.detach_storage(2.0) == 0
            assert now_s() - started_s <= 2.0 + 1e-6
            assert backend.closed
            async with stepping(small.cache):
                await asyncio.sleep(0.1)
            assert small.cache.movers.storage.store is None
            assert not small.cache.core.state.storage

    run_checked(main, None)


def test_a_store_that_no_step_attaches_is_given_up() -> None:
    async def main() -> None:
        old, new = Seen(MemoryBackend()), Seen(MemoryBackend())
        async with open_small(driver="step", backend=old) as small:
            with pytest.raises(BackendError, match="no step"):
                await small.cache.attach_storage(new, deadline_s=1.0)
            async with stepping(small.cache):
                await asyncio.sleep(0.1)
                assert new.closed
                assert small.cache.movers.storage.store is not None
                assert small.cache.movers.storage.store.backend is old
                assert not old.closed

    run_checked(main, None)


def test_a_degraded_cache_takes_no_store() -> None:
    async def main() -> None:
        new = Seen(MemoryBackend())
        async with open_small(check_pools=False) as small:
            small.cache.driver.fail(TransferError("planted"))
            await asyncio.sleep(0.1)
            with pytest.raises(BackendError, match="degraded"):
                await small.cache.attach_storage(new)
            await asyncio.sleep(0.1)
            assert new.closed
            assert not new.opened

    run_checked(main, None)


def test_a_detach_that_core_learns_of_later_does_not_touch_the_next_store() -> None:
    async def main() -> None:
        new = MemoryBackend()
        async with open_small(driver="step", backend=MemoryBackend()) as small:
            await small.cache.detach_storage(1.0)
            attaching = asyncio.ensure_future(small.cache.attach_storage(new))
            await asyncio.sleep(0.1)
            async with stepping(small.cache):
                await attaching
                assert small.cache.movers.storage.store is not None
                assert small.cache.movers.storage.store.backend is new
                assert small.cache.core.state.storage
                assert small.cache.core.state.storage_epoch == 2

    run_checked(main, None)


# -- with threads and files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)
async def test_folders_are_exchanged_while_threads_hang_in_the_old_one(
    anyio_backend: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()
    read_many = Folder.read_many

    def hung(folder: Folder, *args: Any) -> Any:
        if str(folder.root).endswith("old"):
            hang.wait()
        return read_many(folder, *args)

    old, new = f"file://{tmp_path}/old", f"file://{tmp_path}/new"
    async with open_small(url=old) as small:
        wanted = reference_token(small, prompt(PAGES))
        assert await request(small, prompt(PAGES)) == wanted
        await small.cache.drain(10.0)
        await small.cache.reset()
        monkeypatch.setattr(Folder, "read_many", hung)
        async with small.cache.acquire(prompt(PAGES), deadline_s=0.1) as lease:
            assert lease.usable_tokens == 0
        await small.cache.attach_storage(new, deadline_s=0.5)
        snapshot = small.cache.snapshot()
        assert snapshot.storage is not None
        assert (snapshot.storage.url, snapshot.storage.detached_calls) == (new, 1)
        assert snapshot.core.host.limbo_pages == PAGES
        assert await request(small, prompt(PAGES)) == wanted
        assert await found(small) == PAGES
        hang.set()
        await small.cache.pipelines.idle()
        assert small.cache.core.usage().host.limbo_pages == 0
        await small.cache.attach_storage(new)  # the same folder anew, and back to the first
        assert await found(small) == PAGES
        await small.cache.attach_storage(old)
        assert await found(small) == PAGES
        assert await request(small, prompt(PAGES)) == wanted


async def test_any_thread_may_look_while_stores_come_and_go() -> None:
    """A scraper does not run on the loop."""
    seen: list[int] = [0]
    failures: list[BaseException] = []
    enough = threading.Event()
    async with open_small(backend=MemoryBackend()) as small:
        tier = small.cache.movers.storage

        def look() -> None:
            try:
                while not enough.is_set():
                    usage = tier.usage()
                    assert usage is not None
                    seen.append(usage.attached)
            except BaseException as error:
                failures.append(error)

        scraper = threading.Thread(target=look)
        scraper.start()
        for family in range(20):
            await request(small, prompt(4, family=family % 5))
            await small.cache.attach_storage(MemoryBackend())
        while seen[-1] < 21 and not failures:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        enough.set()
        await asyncio.to_thread(scraper.join)
    assert not failures
    assert seen == sorted(seen)


# -- under load --------------------------------------------------------------------------------------------------------


def _another(rng: random.Random, stores: list[Hanging]) -> Backend:
    store = Hanging(
        Slow(MemoryBackend(), latency_s=0.005, jitter_s=0.02, seed=rng.randrange(1000)), ["exists", "read", "write"]
    )
    store.release()
    stores.append(store)
    return Seen(store)


@pytest.mark.parametrize("seed", range(10))
def test_stores_come_and_go_under_load(seed: int) -> None:
    """At random moments a store is attached, replaced or detached, often while it hangs; every answer is right, no page is lost."""

    async def main() -> None:
        rng = random.Random(seed)
        stores: list[Hanging] = []
        seen: list[Any] = []
        deadlines = Deadlines(load_s=2.0, write_back_s=2.0, backup_s=2.0)
        settings: dict[str, Any] = {"query_timeout_s": 0.5, "read_timeout_s": 0.5, "write_timeout_s": 0.5}
        async with open_small(
            backend=_another(rng, stores) if seed % 2 else None, host_pages=48, deadlines=deadlines, **settings
        ) as small:
            wanted = {family: reference_token(small, prompt(4, family=family)) for family in range(6)}

            async def serve() -> None:
                for _ in range(12):
                    family = rng.randrange(6)
                    assert await request(small, prompt(4, family=family)) == wanted[family]
                    if rng.random() < 0.1:
                        await small.cache.reset()
                    await asyncio.sleep(rng.random() * 0.2)

            async def switch() -> None:
                for _ in range(10):
                    await asyncio.sleep(rng.random() * 0.4)
                    if stores and rng.random() < 0.6:
                        stores[-1].hang_again()
                        await asyncio.sleep(rng.random() * 0.3)
                    limit_s = rng.choice([0.05, 0.5, 3.0])
                    started_s = now_s()
                    if rng.random() < 0.4:
                        await small.cache.detach_storage(limit_s)
                        assert now_s() - started_s <= limit_s + 1e-6
                    else:
                        store = _another(rng, stores)
                        seen.append(store)
                        await small.cache.attach_storage(store, deadline_s=limit_s)
                        assert now_s() - started_s <= 2 * limit_s + 1e-6
                    check_conservation(small.cache.core)
                    if rng.random() < 0.5:
                        for store in stores:
                            store.release()

            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(serve)
                group.start_soon(switch)
            for store in stores:
                store.release()
            await small.cache.attach_storage(_another(rng, stores))
            assert await small.cache.drain(60.0) == 0
            await small.cache.pipelines.idle()
            await asyncio.sleep(1.0)  # lookups that hung belong to no job any more
            assert small.cache.state == "open"
            snapshot = small.cache.snapshot().storage
            assert snapshot is not None
            assert (snapshot.detached_calls, snapshot.open_calls) == (0, 0)
            on_host = small.cache.core.usage().host.owned_pages
            assert objects(stores[-1]) >= small.cache.core.usage().stored_pages == on_host
            for family in range(6):
                assert await request(small, prompt(4, family=family)) == wanted[family]
        assert all(store.asked_late == 0 for store in seen)

    run_checked(main, seed)
