"""Field reports, section B: pages come back to their pool, each once, however a fetch ends; and nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Sequence

import anyio
import anyio.lowlevel
import numpy as np
import psutil
import pytest

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Access, Fault, Faulty, Hanging, Slow, Wrapper
from hicache_actors.core.pool import Pool
from hicache_actors.errors import BackendError
from hicache_actors.pipelines.observer import BatchEnd, Observation
from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.small import Small, prompt

from .kit import (
    LOOPS,
    PAGE,
    VIRTUAL,
    clear_device,
    compute,
    ended,
    on_device_and_host,
    opened,
    pins,
    quiet,
    store,
    until,
)


def free_host_slots(small: Small) -> list[int]:
    return small.cache.core.state.pools[1].free_slots()


@pytest.mark.parametrize("fault", [Fault.MISS, Fault.TORN, Fault.FLIP])
async def test_b015_the_tail_that_was_not_fetched_is_freed_once(fault: Fault) -> None:
    """Given a store where pages 1-6 of 10 can be read, and page 7 is missing, torn or damaged.
    When the fetch has ended.
    Then 6 host pages are used, no page is twice in the free list, and what takes all free pages afterwards shares none."""
    backend = MemoryBackend()
    asked = prompt(10)
    (first,) = await store(backend, asked)
    bad = Faulty(backend, lambda access: fault if access.verb == "read" and access.object == 7 else None)
    async with opened(device_pages=24, host_pages=24, backend=bad) as small:
        fetch = small.cache.prefetch(asked, "r")
        assert await fetch.wait() == 6 * PAGE
        await quiet(small)
        free = free_host_slots(small)
        assert len(free) == len(set(free)) == 24 - 6
        others = [prompt(9, family=1), prompt(9, family=2)]
        answers = [await compute(small, other) for other in others]
        await quiet(small)
        assert free_host_slots(small) == []
        await clear_device(small)
        for other, before in zip(others, answers, strict=True):
            again = await compute(small, other)
            assert (again.account.host, again.tokens) == (9 * PAGE, before.tokens)
        await clear_device(small)
        again = await compute(small, asked)
        assert (again.account.host, again.tokens) == (6 * PAGE, first.tokens)


@VIRTUAL
async def test_b016_aborted_requests_leave_no_page_behind(anyio_backend: object) -> None:
    """Given a host pool of 64 pages and a slow store that holds more than that.
    When 1,000 requests with a fetch are aborted at random points: before the reading, during it, after it, in its last turn.
    Then every host page is free or may be evicted, nothing is open and nothing is pinned."""
    dice = random.Random(16)
    backend = MemoryBackend()
    prompts = [prompt(dice.randint(2, 6), family=family) for family in range(40)]
    await store(backend, *prompts)
    slow = Slow(backend, 0.002, jitter_s=0.004)
    loading: set[anyio.CancelScope] = set()

    def abort_in_the_turn_it_ends(what: Observation) -> None:
        if isinstance(what, BatchEnd) and what.kind == "prefetch":
            for scope in loading:
                scope.cancel()

    async with opened(device_pages=24, host_pages=64, backend=slow) as small:
        small.cache.observe(abort_in_the_turn_it_ends)
        served = 0

        async def request(number: int) -> None:
            nonlocal served
            await anyio.sleep(dice.random() * 1.5)
            asked, manner = dice.choice(prompts), dice.randrange(4)
            with anyio.CancelScope() as scope:
                if manner == 0:
                    scope.cancel()
                elif manner == 1:
                    loading.add(scope)
                else:
                    scope.deadline = anyio.current_time() + dice.random() * 0.02
                if manner == 3:
                    fetch = small.cache.prefetch(asked, f"r{number}")
                    try:
                        await fetch.wait()
                    finally:
                        fetch.stop()
                async with small.cache.acquire(asked, rid=f"r{number}") as lease:
                    served += 1
                    if lease.loading is not None:
                        await lease.loading.verdict()
                    await anyio.sleep(dice.random() * 0.01)
            loading.discard(scope)

        async with anyio.create_task_group() as group:
            for number in range(1000):
                group.start_soon(request, number)
        await quiet(small)
        assert 100 < served < 900
        usage, counts = small.cache.core.usage(), small.cache.snapshot().counts
        assert counts["prefetches"] > 100
        assert usage.host.free_pages + usage.host.evictable_pages == usage.host.total_pages == 64
        assert usage.device.free_pages + usage.device.evictable_pages == usage.device.total_pages
        assert (usage.leases, usage.pending_acquires, usage.jobs, pins(small)) == (0, 0, {}, 0)
        fetched = await small.engine.answer(prompts[0])  # and it still fetches what it needs
        assert fetched.account.computed == 1


@LOOPS
async def test_b018_a_reset_during_fetches_leaves_pool_and_budget_whole(anyio_backend: object) -> None:
    """Given 5 fetches whose reads hang, which together use up the fetch budget.
    When the cache is reset and the reads end afterwards.
    Then each page is free once, and a fetch that needs the whole budget works."""
    backend = MemoryBackend()
    small_ones, large = [prompt(2, family=family) for family in range(5)], prompt(10, family=9)
    await store(backend, *small_ones, large)
    slow = Hanging(backend)
    async with opened(device_pages=24, host_pages=20, backend=slow) as small:
        fetches = [small.cache.prefetch(each, f"r{n}") for n, each in enumerate(small_ones)]
        await until(lambda: slow.hung == 4)  # the fifth waits for its turn
        assert small.cache.core.usage().host.owned_pages == 10
        await small.cache.reset()
        check_conservation(small.cache.core)
        slow.release()
        assert [await fetch.wait() for fetch in fetches] == [0] * 5
        await quiet(small)
        assert sorted(free_host_slots(small)) == list(range(20))
        assert await small.cache.prefetch(large, "large").wait() == 10 * PAGE
        assert on_device_and_host(small, large) == (0, 10)


def test_b019_handles_do_not_keep_the_free_list_alive() -> None:
    """Given a pool of 1,000,000 slots.
    When 20,000 rounds take and give pages and every hundredth handle is kept.
    Then resident memory grows by less than 50 MB."""
    pool = Pool("host", 1_000_000)
    pool.give(pool.take(1_000_000))  # so that its own arrays are resident
    process = psutil.Process()
    before = process.memory_info().rss
    kept = []
    for n in range(20_000):
        slots = pool.take(64)
        if n % 100 == 0:
            kept.append(slots)
        else:
            pool.give(slots)
    assert process.memory_info().rss - before < 50e6
    for slots in kept:
        pool.give(slots)
    assert pool.free == 1_000_000


@pytest.mark.parametrize("save", ["ends before", "runs", "fails"])
@LOOPS
async def test_b026_a_prefix_published_during_its_fetch_is_kept_once(anyio_backend: object, save: str) -> None:
    """Given a fetch of a prefix whose pages are granted and being read.
    When another request computes and publishes that prefix; its own save to the host has ended, runs, or has failed.
    Then the tree has the prefix once, no page is lost or freed under a copy, and its bytes are right."""
    backend = MemoryBackend()
    asked = prompt(6)
    (first,) = await store(backend, asked)
    slow = Hanging(backend)
    async with opened(device_pages=16, host_pages=20, backend=slow) as small:
        fetch = small.cache.prefetch(asked, "staged")
        await until(lambda: slow.hung == 1)
        if save == "fails":
            small.device.fail_next(BackendError("planted"), stream="write_back")
        gate = small.device.gate("write_back")
        if save != "runs":
            gate.open()
        assert (await compute(small, asked)).tokens == first.tokens
        if save != "runs":
            await ended(small, "write_back", "backup")
        slow.release()
        assert await fetch.wait() == 6 * PAGE
        gate.open()
        await quiet(small)
        usage = small.cache.core.usage()
        assert (usage.tree_pages, usage.device.owned_pages, usage.host.owned_pages) == (6, 6, 6)
        await clear_device(small)
        again = await compute(small, asked)
        assert (again.account.computed, again.tokens) == (1, first.tokens)


@pytest.mark.parametrize("bad_read", [False, True])
@LOOPS
async def test_b029_a_fetch_with_too_little_room_never_shows_unfilled_pages(
    anyio_backend: object, bad_read: bool
) -> None:
    """Given host memory filled with 0xAB, with room for 6 of 10 stored pages.
    When the 10 are fetched, and the read works or says that it found what it did not write.
    Then the hit is at most 6 pages, each with its true bytes."""
    backend = MemoryBackend()
    asked = prompt(10)
    (first,) = await store(backend, asked)
    slow = Hanging(_Lying(backend) if bad_read else backend, ["write"])
    async with opened(device_pages=40, host_pages=20, backend=slow) as small:
        memory = small.cache.movers.host.memory
        for slot in range(memory.slots):
            memory.object(slot)[:] = b"\xab" * len(memory.object(slot))
        await compute(small, prompt(14, family=1))
        await until(lambda: slow.hung == 1)  # their backup pins 14
        answer = await small.engine.answer(asked)
        assert answer.tokens == first.tokens
        assert answer.account.storage == (0 if bad_read else 6 * PAGE)
        assert (answer.account.reasons.get("host_capacity", 0) > 0) != bad_read
        slow.release()


class _Lying(Wrapper):
    """Reads touch no buffer and claim to have found everything."""

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        await anyio.lowlevel.checkpoint()
        return [True] * len(keys)


@VIRTUAL
async def test_b030_a_fetch_without_any_room_is_declined_and_blocks_nobody(anyio_backend: object) -> None:
    """Given a host pool in which every page is pinned.
    When a fetch asks for pages.
    Then it is declined with a reason, and a task that wants to run every 10 ms has done so meanwhile."""
    backend = MemoryBackend()
    asked = prompt(4)
    await store(backend, asked)
    slow = Hanging(Slow(backend, 0.05), ["write"])
    async with opened(device_pages=16, host_pages=8, backend=slow) as small:
        await compute(small, prompt(8, family=1))
        await until(lambda: slow.hung == 1)
        assert small.cache.core.usage().host.evictable_pages == small.cache.core.usage().host.free_pages == 0
        beats: list[float] = []

        async def heartbeat() -> None:
            while True:
                beats.append(anyio.current_time())
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as group:
            group.start_soon(heartbeat)
            begun = anyio.current_time()
            async with small.cache.acquire(asked) as lease:
                assert lease.usable_tokens == 0
                assert lease.account.reasons["host_capacity"] == 4 * PAGE
            assert anyio.current_time() - begun < 1
            group.cancel_scope.cancel()
        assert len(beats) >= 5
        assert float(np.diff(beats).max()) < 0.1
        assert small.cache.snapshot().counts["prefetch_host_capacity"] == 1
        slow.release()


@pytest.mark.parametrize("failing", [None, Fault.FAIL, BackendError], ids=["sound", "refused", "raising"])
@VIRTUAL
async def test_b031_a_fetch_that_does_not_fit_pins_nothing(
    anyio_backend: object, failing: Fault | type[BackendError] | None
) -> None:
    """Given 10 stored pages and host memory that lends 4 to fetches; the store takes, refuses or fails what is put.
    When they are fetched and computed 100 times, with a reset between.
    Then nothing is pinned and the host is as free as before, each time."""
    backend = MemoryBackend()
    asked = prompt(10)
    (first,) = await store(backend, asked)

    def schedule(access: Access) -> Fault | Exception | None:
        if access.verb != "write" or failing is None:
            return None
        return failing if isinstance(failing, Fault) else failing("planted")

    faulty = Faulty(backend, schedule)
    async with opened(device_pages=16, host_pages=8, backend=faulty) as small:
        for _ in range(100):
            answer = await small.engine.answer(asked)
            assert (answer.account.storage, answer.tokens) == (4 * PAGE, first.tokens)
            await ended(small, "write_back", "backup", "prefetch", "drain", "load")
            assert pins(small) == 0
            usage = small.cache.core.usage().host
            assert usage.free_pages + usage.evictable_pages == 8
            await small.cache.reset()
            assert small.cache.core.usage().host.free_pages == 8
        assert (faulty.injected.total() > 0) == (failing is not None)
