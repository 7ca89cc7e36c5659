"""Channels between stages, and deadlines."""

from __future__ import annotations

import anyio
import pytest

from hicache_actors.runtime import Deadline, Receiver, Sender, System, channel
from hicache_actors.testing.loop import run_virtual

every_loop = pytest.mark.parametrize("anyio_backend", ["virtual:3", "asyncio", "uvloop"], indirect=True)
virtual_only = pytest.mark.parametrize("anyio_backend", ["virtual:3"], indirect=True)

Batch = tuple[int, ...]


@every_loop
async def test_end_of_stream_runs_down_the_stages(anyio_backend_name: str) -> None:
    stored: list[Batch] = []

    async def read(sender: Sender[Batch]) -> None:
        async with sender:
            for first in range(5):
                await sender.send((first, first + 1))

    async def seal(receiver: Receiver[Batch], sender: Sender[Batch]) -> None:
        async with receiver, sender:
            async for batch in receiver:
                await sender.send(tuple(-page for page in batch))

    async def store(receiver: Receiver[Batch]) -> None:
        async with receiver:
            stored.extend([batch async for batch in receiver])

    async with System() as system:
        first, second = channel(1, Batch), channel(2, Batch)
        system.spawn("read", read, first[0])
        system.spawn("seal", seal, first[1], second[0])
        await system.spawn("store", store, second[1]).wait()
    assert stored == [(-first, -first - 1) for first in range(5)]


@every_loop
async def test_a_full_channel_blocks_the_stage_above(anyio_backend_name: str) -> None:
    sender, receiver = channel(2, Batch)
    with sender, receiver:
        sent: list[int] = []

        async def feed() -> None:
            for page in range(5):
                await sender.send((page,))
                sent.append(page)

        async with anyio.create_task_group() as group:
            group.start_soon(feed)
            await anyio.wait_all_tasks_blocked()
            assert sent == [0, 1]
            assert [await receiver.receive() for _ in range(5)] == [(page,) for page in range(5)]


@every_loop
async def test_a_stage_whose_successor_is_gone_is_told(anyio_backend_name: str) -> None:
    sender, receiver = channel(1, Batch)
    receiver.close()
    with sender, pytest.raises(anyio.BrokenResourceError):
        await sender.send((1,))


def test_parallel_workers_share_a_channel_by_clones() -> None:
    async def main() -> list[int]:
        done: list[int] = []

        async def work(receiver: Receiver[int]) -> None:
            async with receiver:
                async for page in receiver:
                    await anyio.sleep(1)
                    done.append(page)

        sender, receiver = channel(4, int)
        async with anyio.create_task_group() as group:
            with receiver:
                for _ in range(3):
                    group.start_soon(work, receiver.clone())
            async with sender:
                for page in range(9):
                    await sender.send(page)
        assert anyio.current_time() == 3.0
        return done

    assert sorted(run_virtual(main, 1)) == list(range(9))


def test_a_channel_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_batches = 0"):
        channel(0, int)


@virtual_only
async def test_deadlines_follow_the_loops_clock(anyio_backend_name: str) -> None:
    deadline = Deadline.after(10.0)
    assert deadline.remaining_s == pytest.approx(10.0)
    await anyio.sleep(4)
    assert deadline.remaining_s == pytest.approx(6.0)
    assert not deadline.expired
    assert deadline.sooner(2.0).remaining_s == pytest.approx(2.0)
    assert deadline.sooner(8.0) == deadline
    assert deadline.sooner(None) == deadline
    with deadline.move_on() as scope:
        await anyio.sleep(60)
    assert scope.cancelled_caught
    assert deadline.expired
    assert deadline.remaining_s == 0.0
    with pytest.raises(TimeoutError), Deadline.after(1.0).fail():
        await anyio.sleep(60)


@virtual_only
async def test_no_deadline_is_never(anyio_backend_name: str) -> None:
    never = Deadline.after(None)
    with never.fail(), never.move_on() as scope:
        await anyio.sleep(10**6)
    assert not scope.cancelled_caught
    assert not never.expired
    assert never.sooner(1.0) < never
