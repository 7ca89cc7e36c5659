from __future__ import annotations

import asyncio

import pytest

from hicache_actors.core.words import pack_slots
from hicache_actors.errors import StoppedError, UsageError
from hicache_actors.testing.kv_samples import Call, as_bytes, engine_tensors, host_memory
from hicache_actors.testing.sim_device import SimDevice
from hicache_actors.transfer.completions import fired
from hicache_actors.transfer.plan import CopyPlan

pytestmark = pytest.mark.parametrize("anyio_backend", ["virtual:5"], indirect=True)


async def test_work_lasts_latency_and_bytes_by_bandwidth() -> None:
    device = SimDevice(gb_s=2.0, latency_s=0.5)
    loop = asyncio.get_running_loop()
    first = device.stream("a").submit(Call(lambda: None, nbytes=4_000_000_000))
    second = device.stream("a").submit(Call(lambda: None, nbytes=2_000_000_000))
    other = device.stream("b").submit(Call(lambda: None))
    await fired(other)
    assert loop.time() == pytest.approx(0.5)
    await fired(first)
    assert loop.time() == pytest.approx(2.5)
    await fired(second)
    assert loop.time() == pytest.approx(4.0)


async def test_bytes_move_at_the_end() -> None:
    device = SimDevice(gb_s=None, latency_s=1.0)
    kv = engine_tensors("contiguous")
    host = host_memory(kv, "page_first")
    old = as_bytes(host.layer(0)[0][3])
    ticket = device.stream("copy").submit(CopyPlan(kv, pack_slots([2]), host, pack_slots([3])).work())
    await asyncio.sleep(0.9)
    assert as_bytes(host.layer(0)[0][3]) == old
    kv.layer(0)[0][2].zero_()  # too early: the copy has not ended
    await fired(ticket)
    assert as_bytes(host.layer(0)[0][3]) == bytes(len(old))


async def test_a_thread_cannot_wait_for_a_ticket() -> None:
    ticket = SimDevice().stream("copy").submit(Call(lambda: None))
    with pytest.raises(UsageError, match="fired"):
        ticket.wait(1.0)
    await fired(ticket)
    assert ticket.wait(1.0)


async def test_close_ends_what_fits_and_late_bytes_come_late() -> None:
    device = SimDevice(gb_s=None, latency_s=1.0)
    seen: list[str] = []
    short = device.stream("short").submit(Call(lambda: seen.append("short")))
    device.throttle(latency_s=100.0, stream="long")
    long = device.stream("long").submit(Call(lambda: seen.append("long")))
    assert not device.close(5.0)
    assert seen == ["short"]
    assert short.error is None
    assert isinstance(long.error, StoppedError)
    await asyncio.sleep(200.0)
    assert seen == ["short", "long"]


async def test_close_follows_streams_that_wait_for_each_other() -> None:
    device = SimDevice()
    seen: list[int] = []
    one, two = device.stream("one"), device.stream("two")
    ticket = two.submit(Call(lambda: seen.append(1)))
    one.wait_event(ticket)
    two.wait_event(one.submit(Call(lambda: seen.append(2))))
    two.submit(Call(lambda: seen.append(3)))
    assert device.close(1.0)
    assert seen == [1, 2, 3]
