"""Write-back and backup: order, retries by the agreed clock, giving up, and what `stored` and `drain` say meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import anyio
import pytest

from hicache_actors import Shortfall, TransferError
from hicache_actors.backends import backend as contract
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Access, Fault, Faulty, Hanging, Slow, Wrapper
from hicache_actors.cache.api import Stored
from hicache_actors.config import Deadlines
from hicache_actors.errors import BackendError
from hicache_actors.memory import shapes
from hicache_actors.testing.lives import reference_token, request, run_checked
from hicache_actors.testing.small import Small, evict_device, open_small, prompt
from hicache_actors.tiers.storage.words import StorageSnapshot

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2, 3])
PAGES = 6
ALL = 4 * PAGES
BATCH = 64  #: pages, where a test has many batches


class Clocked(Wrapper):
    """Writes when it may, and notes when it was asked."""

    def __init__(self, failures: int) -> None:
        super().__init__(MemoryBackend())
        self.asked_s: list[float] = []
        self._failures = failures

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[contract.Stored]:
        self.asked_s.append(anyio.current_time())
        if len(self.asked_s) <= self._failures:
            raise BackendError("planted")
        return await super().write(keys, buffers)

    @property
    def pauses_s(self) -> list[float]:
        return [after - before for before, after in zip(self.asked_s, self.asked_s[1:], strict=False)]


def _about(pauses_s: Sequence[float], *wanted_s: float) -> bool:
    return len(pauses_s) == len(wanted_s) and all(
        wanted <= pause < wanted + 0.1 for pause, wanted in zip(pauses_s, wanted_s, strict=True)
    )


@SEEDS
@pytest.mark.parametrize("failures", [0, 1, 2, 3])
def test_a_failed_backup_is_tried_again_after_1_4_and_16_seconds(failures: int, seed: int | None) -> None:
    async def main() -> None:
        store = Clocked(failures)
        async with open_small(backend=store) as small:
            await request(small, prompt(PAGES))
            assert await small.cache.stored(prompt(PAGES), 60.0) == Stored(ALL, None)
            assert _about(store.pauses_s, *(1.0, 4.0, 16.0)[:failures])
            assert small.cache.snapshot().counts.get("backup_failed_pages", 0) == failures * PAGES
            assert await small.cache.drain(1.0) == 0

    run_checked(main, seed)


@SEEDS
def test_after_three_retries_a_backup_is_given_up(seed: int | None) -> None:
    async def main() -> None:
        store = Clocked(4)
        async with open_small(backend=store) as small:
            asked = prompt(PAGES)
            await request(small, asked)
            assert await small.cache.stored(asked, 60.0) == Stored(0, "given_up")
            assert _about(store.pauses_s, 1.0, 4.0, 16.0)
            assert await small.cache.drain(60.0) == PAGES
            assert small.cache.snapshot().counts["backup_given_up_pages"] == PAGES
            assert await request(small, asked) == reference_token(small, asked)  # the host has it all the same

    run_checked(main, seed)


@SEEDS
def test_a_drain_ends_at_its_deadline_and_says_how_much_is_left(seed: int | None) -> None:
    async def main() -> None:
        store = Clocked(2)
        async with open_small(backend=store) as small:
            await request(small, prompt(PAGES))
            started_s = anyio.current_time()
            assert await small.cache.drain(0.5) == PAGES  # a retry is still to come
            assert anyio.current_time() - started_s == pytest.approx(0.5)
            assert await small.cache.stored(prompt(PAGES), 0.25) == Stored(0, "pending")
            assert anyio.current_time() - started_s == pytest.approx(0.75)
            assert await small.cache.drain(60.0) == 0
            assert await small.cache.drain(0.0) == 0

    run_checked(main, seed)


@SEEDS
def test_a_drain_beside_a_store_that_hangs_ends_at_its_deadline(seed: int | None) -> None:
    async def main() -> None:
        store = Hanging(MemoryBackend(), ["write"])
        async with open_small(backend=store) as small:
            await request(small, prompt(PAGES))
            assert await small.cache.drain(2.0) == PAGES
            assert await small.cache.stored(prompt(PAGES), 1.0) == Stored(0, "pending")
            store.release()
            assert await small.cache.drain(60.0) == 0

    run_checked(main, seed)


@SEEDS
def test_a_backup_stops_at_its_first_failure_so_that_no_hole_is_stored(seed: int | None) -> None:
    """The fourth page is refused: pages 1 to 3 count at once, the rest comes with the retry."""

    def refuse(access: Access) -> Fault | None:
        return Fault.FAIL if access.call == 1 and access.object == 4 else None

    async def main() -> None:
        async with open_small(backend=Faulty(MemoryBackend(), refuse)) as small:
            asked = prompt(PAGES)
            await request(small, asked)
            assert await small.cache.stored(asked, 0.5) == Stored(12, "pending")
            assert await small.cache.drain(0.1) == 3
            assert await small.cache.stored(asked, 60.0) == Stored(ALL, None)

    run_checked(main, seed)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "BATCH_PAGES", BATCH)


@SEEDS
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("at_once", [1, 2])
def test_batches_are_stored_in_prefix_order_and_the_first_failure_ends_the_job(at_once: int, seed: int | None) -> None:
    """Those that are under way beside the one that fails are stored, and do not count; no more begin."""

    class Ordered(Clocked):
        async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[contract.Stored]:
            batches.append(len(keys))
            number = len(batches)
            await anyio.sleep(0.01 * number)  # so that all begin that may, and end in order
            if number == 1:
                raise BackendError("planted")
            return await super().write(keys, buffers)

    batches: list[int] = []

    async def main() -> None:
        store, pages = Ordered(0), 5 * BATCH + 10
        async with open_small(
            device_pages=pages + BATCH, host_pages=pages + BATCH, backend=store, write_concurrency=at_once
        ) as small:
            await request(small, prompt(pages))
            assert await small.cache.stored(prompt(pages), 0.9) == Stored(0, "pending")
            assert batches == [BATCH] * at_once
            assert store.inner.stats()["objects"] == BATCH * (at_once - 1)
            assert await small.cache.stored(prompt(pages), 60.0) == Stored(4 * pages, None)
            assert batches[at_once:] == [BATCH] * 5 + [10]
            assert _storage(small).present_pages == BATCH * (at_once - 1)

    run_checked(main, seed)


@SEEDS
@pytest.mark.usefixtures("small_batches")
def test_a_backup_that_is_given_up_is_released_when_all_that_was_under_way_has_ended(seed: int | None) -> None:
    """RESULT comes at its deadline, with two batches at the store and one waiting: the slots stay in limbo until both return."""

    async def main() -> None:
        store, pages = Hanging(MemoryBackend(), ["write"]), 4 * BATCH - 6
        deadlines = Deadlines(backup_s=1.0)
        async with open_small(
            device_pages=pages + 10, host_pages=pages + 10, backend=store, deadlines=deadlines
        ) as small:
            await request(small, prompt(pages))
            await anyio.sleep(0.5)
            lane = _storage(small).lanes["write"]
            assert (lane.running_calls, lane.waiting_calls) == (2, 1)
            await anyio.sleep(0.6)
            assert small.cache.pipelines.open_jobs == 1
            lane = _storage(small).lanes["write"]
            assert (lane.running_calls, lane.waiting_calls) == (2, 0)
            store.release()
            assert await small.cache.stored(prompt(pages), 60.0) == Stored(4 * pages, None)
            await small.cache.pipelines.idle()

    run_checked(main, seed)


@SEEDS
def test_a_backlog_goes_to_the_store_by_as_many_writes_as_may_be_under_way(seed: int | None) -> None:
    async def main() -> None:
        pages = shapes.BATCH_PAGES
        async with open_small(device_pages=pages + 10, host_pages=3 * pages) as small:
            for family in (1, 2):
                await request(small, prompt(pages, family=10 * family))
            assert await small.cache.drain(30.0) == 0
            store = Hanging(MemoryBackend(), ["write"])
            await small.cache.attach_storage(store)
            await anyio.sleep(0.5)
            assert _storage(small).lanes["write"].running_calls == 2
            store.release()
            assert await small.cache.drain(60.0) == 0
            assert store.inner.stats()["objects"] == 2 * pages

    run_checked(main, seed)


@SEEDS
def test_stored_says_why_not(seed: int | None) -> None:
    async def main() -> None:
        async with open_small(host_pages=8, backend=Slow(MemoryBackend(), latency_s=0.01)) as small:
            cache = small.cache
            assert await cache.stored(prompt(3), 1.0) == Stored(0, "not_committed")
            waiting = asyncio.ensure_future(cache.stored(prompt(PAGES, family=1), 5.0))
            await request(small, prompt(PAGES, family=1))
            assert (await waiting).tokens in (0, ALL)
            assert await cache.stored(prompt(PAGES, family=1), 5.0) == Stored(ALL, None)
            longer = prompt(PAGES + 2, family=1)
            assert await cache.stored(longer, 5.0) == Stored(ALL, "not_committed")
            assert await cache.stored(prompt(0, extra=1), 5.0) == Stored(0, None)
            assert await cache.stored(prompt(0, extra=0), 5.0) == Stored(0, None)
        async with open_small() as small:
            await request(small, prompt(PAGES))
            assert await small.cache.stored(prompt(PAGES), 1.0) == Stored(0, "no_storage")

    run_checked(main, seed)


@SEEDS
def test_stored_ends_when_a_reset_takes_the_pages(seed: int | None) -> None:
    async def main() -> None:
        store = Hanging(MemoryBackend(), ["write"])
        async with open_small(backend=store) as small:
            await request(small, prompt(PAGES))
            waiting = asyncio.ensure_future(small.cache.stored(prompt(PAGES), 30.0))
            await anyio.sleep(0.1)
            await small.cache.reset()
            assert (await waiting).reason == "evicted"
            assert anyio.current_time() < 2.0
            store.release()

    run_checked(main, seed)


@SEEDS
def test_a_failed_write_back_is_asked_again_by_the_next_who_passes(seed: int | None) -> None:
    async def main() -> None:
        async with open_small(backend=MemoryBackend()) as small:
            asked = prompt(PAGES)
            small.device.fail_next(TransferError("planted"), stream="write_back")
            await request(small, asked)
            assert await small.cache.drain(1.0) == PAGES
            assert small.cache.match(asked).host == small.cache.match(asked).device == ALL
            await anyio.sleep(30.0)  # no timer does it
            assert await small.cache.drain(1.0) == PAGES
            small.cache.lease(asked, "passes").release()
            assert await small.cache.drain(1.0) == 0
            await evict_device(small)
            assert await request(small, asked) == reference_token(small, asked)

    run_checked(main, seed)


@SEEDS
def test_nothing_is_copied_before_its_forward_has_ended(seed: int | None) -> None:
    async def main() -> None:
        async with open_small(backend=MemoryBackend()) as small:
            asked = prompt(PAGES)
            slow = asyncio.ensure_future(request(small, asked, forward_s=20.0))  # longer than any deadline
            await anyio.sleep(10.0)
            stream = small.device.snapshot()
            assert stream["submitted"] == 0
            assert await small.cache.stored(asked, 0.1) == Stored(0, "pending")
            await slow
            assert await small.cache.stored(asked, 5.0) == Stored(ALL, None)

    run_checked(main, seed)


@SEEDS
def test_what_the_host_has_no_room_for_is_counted_and_computed_again(seed: int | None) -> None:
    async def main() -> None:
        async with open_small(host_pages=4) as small:
            asked = prompt(PAGES)
            await request(small, asked)
            assert await small.cache.drain(5.0) == PAGES - 4
            assert small.cache.snapshot().counts["write_back_refused_pages"] == PAGES - 4
            async with small.cache.acquire(prompt(15, family=1, extra=0)) as lease:
                assert not isinstance(lease.allocate(4 * 15), Shortfall)  # takes nearly all of the device
            assert await request(small, asked) == reference_token(small, asked)

    run_checked(main, seed)


def _storage(small: Small) -> StorageSnapshot:
    found = small.cache.snapshot().storage
    assert found is not None
    return found
