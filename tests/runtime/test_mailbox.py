"""Mailbox: order of the lanes, the fuse, threads, and that no kind of cancellation loses an item."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from hicache_actors.errors import MailboxFull, StoppedError, UsageError
from hicache_actors.runtime import Mailbox

every_loop = pytest.mark.parametrize("anyio_backend", ["virtual:3", "asyncio", "uvloop"], indirect=True)
loops_with_threads = pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)


def _bound(limit: int = 8) -> Mailbox[object]:
    box: Mailbox[object] = Mailbox(limit)
    box.bind()
    return box


async def _take(box: Mailbox[object]) -> object:
    await box.wait()
    return box.get()


@every_loop
async def test_control_comes_before_data_and_lanes_are_fifo(anyio_backend_name: str) -> None:
    box = _bound()
    box.put("d1")
    box.put("d2")
    box.put_control("c1")
    box.put_control("c2")
    await box.wait()
    assert [box.get() for _ in range(5)] == ["c1", "c2", "d1", "d2", None]
    assert (box.control_high_water, box.data_high_water) == (2, 2)


@every_loop
async def test_native_cancel_right_after_delivery_loses_nothing(anyio_backend_name: str) -> None:
    box = _bound()
    owner = asyncio.create_task(_take(box))
    await anyio.wait_all_tasks_blocked()
    box.put("item")  # the owner is woken ...
    owner.cancel()  # ... and cancelled before it resumes
    with pytest.raises(asyncio.CancelledError):
        await owner
    assert await _take(box) == "item"


@every_loop
async def test_scope_cancel_right_after_delivery_loses_nothing(anyio_backend_name: str) -> None:
    box = _bound()
    taken: list[object] = []

    async def owner() -> None:
        taken.append(await _take(box))

    async with anyio.create_task_group() as group:
        group.start_soon(owner)
        await anyio.wait_all_tasks_blocked()
        box.put("item")
        group.cancel_scope.cancel()
    left = box.get()
    assert [*taken, left] in (["item", None], ["item"])


@every_loop
async def test_put_after_the_waiter_was_cancelled(anyio_backend_name: str) -> None:
    box = _bound()
    owner = asyncio.create_task(_take(box))
    await anyio.wait_all_tasks_blocked()
    owner.cancel()
    box.put("data")  # the waiter is cancelled but has not resumed
    box.put_control("control")
    with pytest.raises(asyncio.CancelledError):
        await owner
    assert [box.get(), box.get()] == ["control", "data"]


@every_loop
async def test_a_full_data_lane_refuses_and_control_passes(anyio_backend_name: str) -> None:
    box = _bound(limit=2)
    box.put(1)
    box.put(2)
    with pytest.raises(MailboxFull):
        box.put(3)
    box.put_control("control")
    assert box.refused == 1
    assert [box.get() for _ in range(4)] == ["control", 1, 2, None]
    box.put(4)
    assert box.get() == 4


@every_loop
async def test_close_returns_what_is_left_and_refuses_the_rest(anyio_backend_name: str) -> None:
    box = _bound()
    box.put("d")
    box.put_control("c")
    assert box.close() == ["c", "d"]
    assert box.close() == []
    for put in (box.put, box.put_control):
        with pytest.raises(StoppedError):
            put("late")


async def test_one_owner_only() -> None:
    box = _bound()
    with pytest.raises(UsageError):
        box.bind()


async def test_what_is_put_before_bind_waits_for_the_owner() -> None:
    box: Mailbox[object] = Mailbox(8)
    with pytest.raises(UsageError):
        _ = box.loop
    box.put("early")
    box.put_control("control")
    box.bind()
    assert [await _take(box), await _take(box)] == ["control", "early"]


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit = 0"):
        Mailbox[object](0)


@loops_with_threads
async def test_a_put_from_a_thread_wakes_an_idle_owner(anyio_backend_name: str) -> None:
    """Nothing else is on the loop: a put that only sets a future would be seen at the next timer, if ever."""
    box = _bound()
    asyncio.get_running_loop().set_debug(True)
    owner = asyncio.create_task(_take(box))
    await anyio.wait_all_tasks_blocked()
    thread = threading.Thread(target=box.put, args=("item",))
    thread.start()
    assert await owner == "item"
    thread.join()


@loops_with_threads
async def test_puts_from_many_threads_lose_nothing_and_keep_the_order_of_each(anyio_backend_name: str) -> None:
    threads, puts = 8, 500
    box = _bound(limit=threads * puts)
    start = threading.Barrier(threads)

    def work(thread: int) -> None:
        start.wait()
        for number in range(puts):
            (box.put_control if number % 10 == 0 else box.put)((thread, number))

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    taken: list[tuple[int, int]] = []
    while len(taken) < threads * puts:
        await box.wait()
        while (item := box.get()) is not None:
            assert isinstance(item, tuple)
            taken.append(item)
    for worker in workers:
        worker.join()
    for thread in range(threads):
        mine = [number for owner, number in taken if owner == thread]
        assert [number for number in mine if number % 10 == 0] == list(range(0, puts, 10))
        assert [number for number in mine if number % 10] == [number for number in range(puts) if number % 10]
    assert box.get() is None


@loops_with_threads
async def test_threads_against_close_either_deliver_or_are_refused(anyio_backend_name: str) -> None:
    box = _bound(limit=10**6)
    threads = 4
    accepted = [0] * threads
    refused = threading.Barrier(threads + 1)

    def work(thread: int) -> None:
        try:
            while True:
                box.put(thread)
                accepted[thread] += 1
        except StoppedError:
            refused.wait()

    workers = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(threads)]
    for worker in workers:
        worker.start()
    await box.wait()
    left = box.close()
    refused.wait()
    assert len(left) == sum(accepted)


def test_a_put_on_a_closed_loop_is_refused() -> None:
    box: Mailbox[object] = Mailbox(8)

    async def bind() -> None:
        box.bind()

    asyncio.run(bind())
    refusals: list[StoppedError] = []

    def work() -> None:
        try:
            box.put("late")
        except StoppedError as error:
            refusals.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(refusals) == 1
