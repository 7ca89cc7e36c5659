"""Tickets through a ring: none is lost, the loop is woken once for many, and the end is orderly."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from hicache_actors.cuda_ext.loop_ring import LoopRing, ring_of
from hicache_actors.cuda_ext.native.events import events
from hicache_actors.cuda_ext.native.library import library, why_not
from hicache_actors.cuda_ext.native.ring import Ring
from hicache_actors.cuda_ext.native_cpu import NativeCpuDevice
from hicache_actors.errors import StoppedError
from hicache_actors.transfer.completions import fired

pytestmark = [
    pytest.mark.skipif(library() is None, reason=f"the native library is not in use: {why_not()}"),
    pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True),
]

WAIT_S = 60.0


async def test_one_wake_up_for_many_tickets() -> None:
    ring: Ring[int] = Ring(64)
    made = [events().take() for _ in range(50)]
    for number, event in enumerate(made):
        ring.add(event, number)
    for address, generation in reversed(made):
        assert events().finish(address, generation, 0) == 1
        assert events().finish(address, generation, 0) == 0
    assert ring.wait(0.0)
    assert ring.take() == list(reversed(range(50)))
    assert ring.counts() == (50, 50, 1, 0)
    assert not ring.wait(0.0)
    assert ring.take() == []


async def test_an_event_that_has_ended_tells_at_once() -> None:
    ring: Ring[str] = Ring(8)
    address, generation = events().take()
    events().finish(address, generation, 7)
    ring.add((address, generation), "late")
    assert ring.take() == ["late"]
    assert events().code(address) == 7
    assert not events().query(address, generation + 1)


async def test_what_has_no_room_stands_in_line() -> None:
    ring: Ring[int] = Ring(4)
    made = [events().take() for _ in range(11)]
    for number, event in enumerate(made):
        ring.add(event, number)
        events().finish(*event, 0)
    assert len(ring) == 11
    seen: list[int] = []
    while len(ring):
        assert ring.wait(WAIT_S)
        seen += ring.take()
    assert seen == list(range(11))
    assert ring.counts().refused == 0


async def test_four_producers_lose_nothing() -> None:
    ring: Ring[int] = Ring(256)
    rounds, each = 20, 64
    made = [[events().take() for _ in range(each)] for _ in range(4)]
    seen: list[int] = []
    start = threading.Barrier(4)

    def produce(mine: list[tuple[int, int]], round_number: int) -> None:
        start.wait(WAIT_S)
        for address, generation in mine:
            events().finish(address, generation + round_number, 0)

    for round_number in range(rounds):
        for which, mine in enumerate(made):
            for at, (address, generation) in enumerate(mine):
                ring.add((address, generation + round_number), which * each + at)
        threads = [threading.Thread(target=produce, args=(mine, round_number)) for mine in made]
        for thread in threads:
            thread.start()
        arrived: list[int] = []
        while len(arrived) < 4 * each:
            assert ring.wait(WAIT_S)
            arrived += ring.take()
        for thread in threads:
            thread.join()
        for which in range(4):  # of one producer in its order
            assert [n for n in arrived if n // each == which] == list(range(which * each, (which + 1) * each))
        seen += arrived
    assert len(seen) == rounds * 4 * each
    counts = ring.counts()
    assert counts.pushed == counts.drained == rounds * 4 * each
    assert counts.wakes <= counts.pushed


async def test_a_loop_has_one_ring_for_all_who_open_it() -> None:
    loop = asyncio.get_running_loop()
    first, second = LoopRing.open(), LoopRing.open()
    assert first is second is ring_of(loop)
    assert await first.close(0.0)
    assert ring_of(loop) is second
    assert await second.close(0.0)
    assert ring_of(loop) is None


def test_a_loop_that_is_closed_takes_its_ring_along(anyio_backend: object) -> None:
    async def leave_it_open() -> weakref.ref[LoopRing]:
        return weakref.ref(LoopRing.open())

    left = asyncio.run(leave_it_open())
    gc.collect()
    assert left() is None


async def test_many_coroutines_wait_on_few_streams() -> None:
    device = NativeCpuDevice()
    ring = LoopRing.open(capacity=16)

    async def client(number: int) -> None:
        stream = device.stream(f"s{number % 4}")
        for _ in range(20):
            assert await fired(stream.record()) is None

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(client(number) for number in range(64)))
    counts = ring.counts()
    assert counts.refused == 0
    assert counts.pushed == counts.drained <= 64 * 20
    assert device.close(WAIT_S)
    assert await ring.close(WAIT_S)


async def test_close_drains_what_is_in_flight() -> None:
    device = NativeCpuDevice()
    ring = LoopRing.open()
    gate = device.gate("copy")
    waiter = asyncio.ensure_future(fired(device.stream("copy").record()))
    held = asyncio.ensure_future(fired(gate.reached))
    await asyncio.sleep(0)
    device.stream("copy").wait_event(device.make_end())
    assert await waiter is None
    closing = asyncio.ensure_future(ring.close(WAIT_S))
    await asyncio.sleep(0)
    assert not closing.done()
    gate.reached.finish()
    assert await closing
    assert await held is None
    assert not device.close(0.0)


async def test_close_fails_what_never_ends() -> None:
    device = NativeCpuDevice()
    ring = LoopRing.open()
    end = device.make_end()
    waiter = asyncio.ensure_future(fired(end))
    await asyncio.sleep(0)
    assert ring.in_flight == 1
    assert not await ring.close(0.01)
    with pytest.raises(StoppedError):
        await waiter
    assert end.finish()  # late: it finds the old ring, and no stranger's descriptor
    assert await fired(end) is None
    assert device.close(WAIT_S)


async def test_close_does_not_wait_for_who_has_gone() -> None:
    device = NativeCpuDevice()
    ring = LoopRing.open()
    waiter = asyncio.ensure_future(fired(device.make_end()))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait([waiter])
    assert ring.in_flight == 1
    assert await ring.close(WAIT_S)
    assert device.close(WAIT_S)


async def test_a_cancelled_waiter_leaves_the_ring_in_order() -> None:
    device = NativeCpuDevice()
    ring = LoopRing.open()
    end = device.make_end()
    waiters = [asyncio.ensure_future(fired(end)) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[1].cancel()
    await asyncio.wait([waiters[1]])
    end.finish()
    assert [await waiters[0], await waiters[2]] == [None, None]
    assert waiters[1].cancelled()
    assert await ring.close(WAIT_S)
    assert device.close(WAIT_S)
