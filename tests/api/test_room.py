"""`HiCache.room`: who waits for device pages holds nothing, is served in order, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random

import anyio
import anyio.lowlevel
import pytest

from hicache_actors import Shortfall, StoppedError, UsageError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.cache.rooms import Room
from hicache_actors.testing.engines import NoRoom
from hicache_actors.testing.pools import check_conservation, check_whole
from hicache_actors.testing.small import PAGE_SIZE, Small, open_small, prompt

LOOPS = pytest.mark.parametrize("anyio_backend", ["virtual:1", "virtual:2", "asyncio", "uvloop"], indirect=True)


def nothing_is_kept(small: Small) -> None:
    usage = small.cache.core.usage()
    assert (usage.waiting_rooms, usage.reserved_pages, usage.leases) == (0, 0, 0)
    check_conservation(small.cache.core)


@LOOPS
async def test_a_reservation_serves_an_acquire_and_the_rest_returns(anyio_backend: object) -> None:
    async with open_small(device_pages=8) as small:
        cache, asked = small.cache, prompt(4)
        async with cache.room(8 * PAGE_SIZE, deadline_s=1.0) as room:
            assert isinstance(room, Room)
            assert room.pages == 8
            async with cache.acquire(asked) as other:
                assert isinstance(other.allocate(PAGE_SIZE), Shortfall), "everything is reserved"
            async with cache.acquire(asked, room=room) as lease:
                pages = lease.allocate(len(asked))
                assert not isinstance(pages, Shortfall)
                assert (len(pages), room.pages) == (5, 3)
                small.model.forward(asked, pages, 0, len(asked))
                lease.commit(len(asked))
        assert room.pages == 0
        room.leave()  # idempotent
        nothing_is_kept(small)


@LOOPS
async def test_room_comes_in_order_when_leases_end(anyio_backend: object) -> None:
    order: list[int] = []

    async with open_small(device_pages=8) as small:
        cache = small.cache
        lease = cache.lease(prompt(0), "holder")
        assert not isinstance(lease.allocate(8 * PAGE_SIZE), Shortfall)

        async def wait(number: int, pages: int) -> None:
            async with cache.room(pages * PAGE_SIZE, deadline_s=60.0) as room:
                assert isinstance(room, Room)
                order.append(number)

        async with anyio.create_task_group() as group:
            for number, pages in enumerate((7, 5, 8, 6)):
                group.start_soon(wait, number, pages)
                while cache.core.usage().waiting_rooms <= number:
                    await anyio.lowlevel.checkpoint()
            assert order == []
            lease.release()
        assert order == [0, 1, 2, 3]
        nothing_is_kept(small)


@LOOPS
async def test_a_deadline_is_a_value(anyio_backend: object) -> None:
    async with open_small(device_pages=8) as small:
        cache = small.cache
        lease = cache.lease(prompt(0), "holder")
        lease.allocate(8 * PAGE_SIZE)
        await anyio.sleep(0.05)  # the clock of the last apply is old
        begun = anyio.current_time()
        async with cache.room(PAGE_SIZE, deadline_s=0.1) as room:
            assert room == Shortfall("device_capacity", 1)
        assert anyio.current_time() - begun >= 0.09
        async with cache.room(9 * PAGE_SIZE, deadline_s=60.0) as room:
            assert room == Shortfall("device_capacity", 1), "at once: the pool is smaller"
        lease.release()
        with pytest.raises(UsageError, match="positive"):
            async with cache.room(0, deadline_s=1.0):
                raise AssertionError("it came in")
        nothing_is_kept(small)


@pytest.mark.parametrize("anyio_backend", ["virtual:1", "virtual:5"], indirect=True)
@pytest.mark.parametrize("holding", [True, False])
async def test_a_native_cancel_at_any_turn_keeps_nothing(anyio_backend: object, holding: bool) -> None:
    async with open_small(device_pages=8, backend=MemoryBackend()) as small:
        cache = small.cache
        reached: set[str] = set()

        async def request() -> None:
            reached.add("begun")
            async with cache.room(6 * PAGE_SIZE, deadline_s=5.0) as room:
                assert isinstance(room, Room)
                reached.add("room")
                async with cache.acquire(prompt(4), room=room) as lease:
                    reached.add("lease")
                    assert not isinstance(lease.allocate(len(prompt(4)) - lease.usable_tokens), Shortfall)
                    await anyio.lowlevel.checkpoint()
                reached.add("end")

        for turns in range(30):
            lease = cache.lease(prompt(0), f"holder-{turns}")
            lease.allocate(4 * PAGE_SIZE if holding else 0)
            task = asyncio.ensure_future(request())
            for turn in range(turns):
                if turn == turns // 2:
                    lease.release()
                await asyncio.sleep(0)
            task.cancel()
            lease.release()
            await asyncio.wait({task})
            await cache.pipelines.idle()
            nothing_is_kept(small)
        assert reached == {"begun", "room", "lease", "end"}


@LOOPS
async def test_more_requests_than_fit_are_all_served(anyio_backend: object) -> None:
    rng = random.Random(5)
    async with open_small(device_pages=12, host_pages=24, backend=MemoryBackend()) as small:
        asked = [prompt(rng.randrange(1, 11), family=rng.randrange(4)) for _ in range(30)]
        answers: dict[int, tuple[int, ...]] = {}

        async def serve(at: int) -> None:
            answers[at] = (await small.engine.answer(asked[at], 3, room_s=60.0)).tokens

        async with anyio.create_task_group() as group:
            for at in range(len(asked)):
                group.start_soon(serve, at)
        assert len(answers) == len(asked)
        assert small.cache.core.counts["rooms_granted"] > 0
        for at in (0, 11, 29):
            assert (await small.engine.answer(asked[at], 3)).tokens == answers[at]
        with pytest.raises(NoRoom):
            await small.engine.answer(prompt(12))
        nothing_is_kept(small)


@pytest.mark.parametrize("anyio_backend", ["virtual:1", "virtual:2"], indirect=True)
async def test_a_stream_of_small_requests_lets_a_large_one_through(anyio_backend: object) -> None:
    async with open_small(device_pages=10) as small:
        served_small = 0
        warm, done = anyio.Event(), anyio.Event()

        async def stream(family: int) -> None:
            nonlocal served_small
            while not done.is_set():
                await small.engine.answer(prompt(2, family=family), 4)
                served_small += 1
                if served_small == 5:
                    warm.set()

        async with anyio.create_task_group() as group:
            for family in range(1, 6):
                group.start_soon(stream, family)
            await warm.wait()
            await small.engine.answer(prompt(9), room_s=60.0)
            done.set()
        assert small.cache.core.counts["rooms_granted"] > 0
        nothing_is_kept(small)


async def step(small: Small) -> None:
    """A step of an engine on the loop, and a turn for everybody else."""
    await small.cache.begin_step_async()
    small.cache.end_step()
    await anyio.lowlevel.checkpoint()


async def test_an_engine_that_steps_grants_room_in_its_steps() -> None:
    async with open_small(device_pages=8, driver="step") as small:
        cache = small.cache
        await cache.begin_step_async()
        lease = cache.lease(prompt(0), "holder")
        lease.allocate(8 * PAGE_SIZE)
        cache.end_step()
        seen: list[int] = []

        async def wait(deadline_s: float) -> None:
            async with cache.room(4 * PAGE_SIZE, deadline_s=deadline_s) as room:
                seen.append(room.pages if isinstance(room, Room) else -1)

        async with anyio.create_task_group() as group:
            group.start_soon(wait, 0.05)
            while not seen:
                await step(small)
            group.start_soon(wait, 60.0)
            while cache.core.usage().waiting_rooms == 0:
                await step(small)
            lease.release()
            while len(seen) < 2:
                await step(small)
        assert seen == [-1, 4]
        await step(small)
        check_whole(cache.core)
        assert cache.core.usage().reserved_pages == 0


async def test_an_engine_that_makes_no_steps_keeps_nobody_waiting() -> None:
    async with open_small(device_pages=8, driver="step") as small, small.cache.room(4, deadline_s=0.01) as room:
        assert room == Shortfall("device_capacity")


async def test_closing_ends_the_wait() -> None:
    failed: list[BaseException] = []

    async def wait(small: Small) -> None:
        try:
            async with small.cache.room(4 * PAGE_SIZE, deadline_s=60.0):
                raise AssertionError("there is no room")
        except StoppedError as error:
            failed.append(error)

    async with anyio.create_task_group() as group, open_small(device_pages=4, check_pools=False) as small:
        lease = small.cache.lease(prompt(0), "holder")
        lease.allocate(4 * PAGE_SIZE)
        group.start_soon(wait, small)
        while small.cache.core.usage().waiting_rooms == 0:
            await anyio.lowlevel.checkpoint()
    assert len(failed) == 1
