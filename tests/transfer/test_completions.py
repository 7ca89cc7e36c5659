from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

from hicache_actors.errors import TransferError, UsageError
from hicache_actors.testing.kv_samples import Asked
from hicache_actors.transfer.completions import Completion, fired, has_fired, notify

WAIT_S = 30.0


def test_a_completion_ends_once() -> None:
    done = Completion()
    assert not done.query()
    assert not done.wait(0.0)
    error = TransferError("first")
    assert done.finish(error)
    assert not done.finish()
    assert (done.query(), done.wait(0.0), done.error) == (True, True, error)


def test_threads_wait_for_it() -> None:
    done = Completion()
    seen: list[bool] = []
    threads = [threading.Thread(target=lambda: seen.append(done.wait(WAIT_S))) for _ in range(3)]
    for thread in threads:
        thread.start()
    done.finish()
    for thread in threads:
        thread.join(WAIT_S)
    assert seen == [True] * 3


def test_callbacks_are_called_once_and_cannot_stop_each_other(caplog: pytest.LogCaptureFixture) -> None:
    done = Completion()
    seen: list[str] = []
    done.add_callback(lambda: seen.append("a"))
    done.add_callback(lambda: 1 // 0)
    done.add_callback(lambda: seen.append("b"))
    done.finish()
    done.finish()
    done.add_callback(lambda: seen.append("late"))
    assert seen == ["a", "b", "late"]
    assert caplog.text.count("completion_callback_failed") == 1


def test_racing_callbacks_are_all_called() -> None:
    for _ in range(50):
        done = Completion()
        seen: list[int] = []
        start = threading.Barrier(3)

        def add(first: int, done: Completion = done, seen: list[int] = seen, start: threading.Barrier = start) -> None:
            start.wait(WAIT_S)
            for number in range(first, first + 20):
                done.add_callback(lambda number=number: seen.append(number))  # type: ignore[misc]

        threads = [threading.Thread(target=add, args=(first,)) for first in (0, 20)]
        for thread in threads:
            thread.start()
        start.wait(WAIT_S)
        done.finish()
        for thread in threads:
            thread.join(WAIT_S)
        assert sorted(seen) == list(range(40))


@pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop", "virtual:1"], indirect=True)
async def test_every_kind_of_engine_event_is_awaited() -> None:
    loop = asyncio.get_running_loop()
    done, flag, future, asked = Completion(), threading.Event(), concurrent.futures.Future[int](), Asked()
    waiters = [asyncio.ensure_future(fired(event)) for event in (done, flag, future, asked)]
    await asyncio.sleep(0.003)
    assert not any(waiter.done() for waiter in waiters)
    loop.call_soon(done.finish)
    loop.call_soon(flag.set)
    loop.call_soon(future.set_result, 7)
    loop.call_soon(setattr, asked, "over", True)
    assert [await waiter for waiter in waiters] == [None] * 4
    assert all(has_fired(event) for event in (done, flag, future, asked))
    assert [await fired(event) for event in (done, flag, future, asked)] == [None] * 4


async def test_a_failed_ticket_is_returned_not_raised() -> None:
    done, error = Completion(), TransferError("planted")
    waiter = asyncio.ensure_future(fired(done))
    await asyncio.sleep(0)
    done.finish(error)
    assert await waiter is error
    assert await fired(done) is error


async def test_what_a_future_raises_is_returned_too() -> None:
    failed, cancelled = concurrent.futures.Future[int](), concurrent.futures.Future[int]()
    waiters = [asyncio.ensure_future(fired(each)) for each in (failed, cancelled)]
    await asyncio.sleep(0)
    error = ValueError("planted")
    failed.set_exception(error)
    cancelled.cancel()
    cancelled.set_running_or_notify_cancel()
    assert await waiters[0] is error
    assert "cancelled" in str(await waiters[1])


async def test_what_is_no_event_is_refused() -> None:
    for thing in (None, 3, object()):
        with pytest.raises(UsageError, match="is no event"):
            await fired(thing)
        with pytest.raises(UsageError):
            has_fired(thing)
    assert not notify(threading.Event(), lambda: None)


async def test_an_event_that_cannot_be_asked_is_a_transfer_error() -> None:
    asked = Asked()
    waiter = asyncio.ensure_future(fired(asked))
    await asyncio.sleep(0)
    asked.error = RuntimeError("sticky")
    with pytest.raises(TransferError, match="sticky"):
        await waiter


async def test_cancelling_one_waiter_harms_no_other() -> None:
    done = Completion()
    waiters = [asyncio.ensure_future(fired(done)) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    await asyncio.wait([waiters[0]])
    done.finish()
    assert waiters[0].cancelled()
    assert [await waiter for waiter in waiters[1:]] == [None, None]


def test_work_that_outlives_the_loop_tells_nobody(caplog: pytest.LogCaptureFixture) -> None:
    done = Completion()

    async def leave() -> None:
        waiter = asyncio.ensure_future(fired(done))
        await asyncio.sleep(0)
        waiter.cancel()

    asyncio.run(leave())
    assert done.finish()
    assert caplog.text == ""
