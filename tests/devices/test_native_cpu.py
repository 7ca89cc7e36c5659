"""What the native CPU device does without Python: layers, waits, failures, and the end of what nobody holds any more."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext.loop_ring import LoopRing
from hicache_actors.cuda_ext.native.library import library, why_not
from hicache_actors.cuda_ext.native_cpu import NativeCpuDevice
from hicache_actors.errors import StoppedError, TransferError
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.testing.kv_samples import LAYERS, Asked, Call, as_bytes, engine_tensors, host_memory
from hicache_actors.transfer.completions import Completion, End, fired
from hicache_actors.transfer.plan import CopyPlan, CopyWork
from hicache_actors.transfer.waits import LayerWaits

pytestmark = pytest.mark.skipif(library() is None, reason=f"the native library is not in use: {why_not()}")

WAIT_S = 60.0


@pytest.fixture
def device() -> Iterator[NativeCpuDevice]:
    device = NativeCpuDevice(watch_s=0.01)
    yield device
    device.close(0.0)


@pytest.fixture
async def ring() -> AsyncIterator[LoopRing]:
    ring = LoopRing.open()
    yield ring
    await ring.close(0.0)


class Load:
    """A load of page 4 of the host to page 7 of the device."""

    def __init__(self, device: NativeCpuDevice) -> None:
        self.kv = engine_tensors("contiguous")
        self.host = host_memory(self.kv, "page_first_direct")
        self.waits = LayerWaits(LAYERS, device.make_end)
        self.plan = CopyPlan(self.host, pack_slots([4]), self.kv, pack_slots([7]))
        self.held: list[End] = []
        self._device = device

    def works(self) -> list[CopyWork]:
        return [self.plan.work(range(layer, layer + 1)) for layer in self.plan.layers]

    def submit(self) -> End:
        return self._device.stream("load").submit_layers(self.works(), self.waits, self.held.append)

    def arrived(self, layer: int) -> bool:
        return as_bytes(self.kv.layer(layer)[0][7]) == as_bytes(self.host.layer(layer)[0][4])


async def test_a_load_is_one_ticket_and_layers_end_one_by_one(device: NativeCpuDevice, ring: LoopRing) -> None:
    load = Load(device)
    gate = device.gate("load")
    whole = load.submit()
    assert load.held == [whole]
    for layer in range(LAYERS):
        await fired(gate.reached)
        assert [load.waits.done(other) for other in range(LAYERS)] == [other < layer for other in range(LAYERS)]
        assert [load.arrived(other) for other in range(LAYERS)] == [other < layer for other in range(LAYERS)]
        assert not whole.query()
        gate.allow()
        await load.waits.ready(layer)
    assert await fired(whole) is None
    assert load.waits.error is None


async def test_layers_reach_threads_and_streams_while_the_loop_stands_still(device: NativeCpuDevice) -> None:
    load = Load(device)
    seen: list[int] = []

    def forward() -> None:
        for layer in range(LAYERS):
            assert load.waits.wait(layer, WAIT_S)
            assert load.arrived(layer)
            seen.append(layer)

    for layer in range(LAYERS):
        load.waits.stream_wait(layer, device.stream("compute"))  # before anything has been submitted
    computed = device.stream("compute").record()
    thread = threading.Thread(target=forward)
    thread.start()
    load.submit()
    thread.join(WAIT_S)  # on the loop's thread: the loop does nothing meanwhile
    assert seen == list(range(LAYERS))
    assert computed.wait(WAIT_S)


async def test_a_failed_layer_fails_those_behind_it_at_once(device: NativeCpuDevice, ring: LoopRing) -> None:
    load = Load(device)
    error = TransferError("planted")
    device.fail_next(error, after=1, stream="load")
    gate = device.gate("load")
    whole = load.submit()
    gate.allow()
    await load.waits.ready(0)
    assert load.waits.done(0)
    gate.allow()
    with pytest.raises(TransferError, match="planted"):
        await load.waits.ready(LAYERS - 1)
    assert load.waits.error is error
    assert not load.waits.done(0)
    assert not load.waits.wait(0, WAIT_S)
    await fired(gate.reached)
    assert not whole.query()  # the copies behind it run all the same, and their memory is held
    gate.open()
    assert await fired(whole) is error


async def test_giving_a_load_up_does_not_let_go_of_its_memory(device: NativeCpuDevice, ring: LoopRing) -> None:
    load = Load(device)
    gate = device.gate("load")
    whole = load.submit()
    await fired(gate.reached)
    load.waits.fail(TransferError("too late"))
    for layer in range(LAYERS):
        with pytest.raises(TransferError, match="too late"):
            await load.waits.ready(layer)
    assert not whole.query()
    gate.open()
    assert await fired(whole) is None
    assert not any(load.waits.done(layer) for layer in range(LAYERS))


async def test_a_load_that_was_given_up_before_it_began(device: NativeCpuDevice, ring: LoopRing) -> None:
    load = Load(device)
    load.waits.fail(TransferError("never mind"))
    assert not load.waits.wait(0, WAIT_S)
    assert await fired(load.submit()) is None
    assert isinstance(load.waits.error, TransferError)


async def test_layers_of_another_device_are_followed(device: NativeCpuDevice, ring: LoopRing) -> None:
    load = Load(device)
    load.waits = LayerWaits(LAYERS)  # plain ends in Python
    await fired(load.submit())
    for layer in range(LAYERS):
        await load.waits.ready(layer)
    assert load.waits.error is None


async def test_any_number_of_loads_in_flight(device: NativeCpuDevice, ring: LoopRing) -> None:
    loads = [Load(device) for _ in range(200)]
    with device.gate("load"):
        tickets = [load.submit() for load in loads]
        assert ring.in_flight == 0
        waiting = asyncio.gather(*(fired(ticket) for ticket in tickets))
        await asyncio.sleep(0)
        assert ring.in_flight == 200
    async with asyncio.timeout(WAIT_S):
        assert await waiting == [None] * 200
    assert all(load.arrived(layer) for load in loads for layer in range(LAYERS))
    assert ring.counts().refused == 0


async def test_throttled_streams_work_at_the_same_time(device: NativeCpuDevice) -> None:
    device.throttle(latency_s=1000.0)
    for name in ("load", "write_back"):
        load = Load(device)
        device.stream(name).submit(load.plan.work())
    async with asyncio.timeout(WAIT_S):
        while not all(device.stream(name).raw.counts().running_ns for name in ("load", "write_back")):  # noqa: ASYNC110  counters call nobody
            await asyncio.sleep(0.001)
    assert not device.close(0.0)


async def test_a_dead_stream_fails_everything_with_the_reason(device: NativeCpuDevice, ring: LoopRing) -> None:
    load = Load(device)
    device.break_stream("load", RuntimeError("an illegal address"))
    whole = load.submit()
    other = device.stream("write_back")
    other.wait_event(whole)
    behind = other.record()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(load.waits.wait(0, WAIT_S)))
    thread.start()
    async with asyncio.timeout(WAIT_S):
        error = await fired(whole)
        assert await fired(behind) is error
        with pytest.raises(TransferError, match="stream load has died: an illegal address"):
            await load.waits.ready(1)
    thread.join(WAIT_S)
    assert answers == [False]
    assert device.lost is error
    assert await fired(device.stream("new").record()) is error


async def test_a_copy_that_native_code_refuses_says_why(device: NativeCpuDevice, ring: LoopRing) -> None:
    load = Load(device)
    device.copy_threads = 0
    error = await fired(load.submit())
    assert isinstance(error, TransferError)
    assert "thread" in str(error)
    assert device.snapshot()["failed"] == LAYERS


async def test_memory_lives_until_native_code_is_done_with_it(device: NativeCpuDevice, ring: LoopRing) -> None:
    load = Load(device)
    with device.gate("load") as gate:
        whole = load.submit()
        await fired(gate.reached)
        gone: list[weakref.ref[KVTensors] | weakref.ref[HostMemory]] = [weakref.ref(load.kv), weakref.ref(load.host)]
        load.host.close()
        del load
        gc.collect()
        assert all(ref() is not None for ref in gone)
    assert await fired(whole) is None
    assert device.close(WAIT_S)
    del whole
    gc.collect()
    assert all(ref() is None for ref in gone)


async def test_a_copy_from_memory_that_was_closed_fails(device: NativeCpuDevice, ring: LoopRing) -> None:
    load = Load(device)
    works = load.works()
    load.host.close()
    assert isinstance(await fired(device.stream("load").submit(works[0])), StoppedError)


async def test_foreign_events_hold_a_stream(device: NativeCpuDevice, ring: LoopRing) -> None:
    asked, told = Asked(), Completion()
    stream = device.stream("write_back")
    stream.wait_event(asked)
    stream.wait_event(told)
    ticket = stream.submit(Call(lambda: None))
    told.finish(ValueError("a forward has failed"))  # the stream goes on: the verdict is the job's
    assert not ticket.wait(0.05)
    asked.over = True
    assert await fired(ticket) is None


def _threads(name: str) -> int:
    found = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            found += (task / "comm").read_text().strip() == name
        except FileNotFoundError:
            continue  # it has ended meanwhile
    return found


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are listed by Linux only")
def test_a_device_that_nobody_holds_ends_its_threads() -> None:
    device = NativeCpuDevice("forgotten")
    stream = device.stream("forgotten")
    gate = device.gate("forgotten")
    ticket = stream.submit(Call(lambda: None))
    assert gate.reached.wait(WAIT_S)
    assert _threads("hic-forgotten") == 1
    del device, stream, gate
    gc.collect()
    assert ticket.wait(WAIT_S)
    assert isinstance(ticket.error, StoppedError)
    end_s = time.monotonic() + WAIT_S
    while _threads("hic-forgotten"):
        assert time.monotonic() < end_s
        time.sleep(0.001)


async def test_callbacks_have_been_called_for_who_has_seen_the_end(device: NativeCpuDevice, ring: LoopRing) -> None:
    for _ in range(100):
        seen: list[str] = []
        with device.gate("copy"):
            ticket = device.stream("copy").submit(Call(lambda: None))
            ticket.add_callback(functools.partial(seen.append, "callback"))
            waiter = asyncio.ensure_future(fired(ticket))
            await asyncio.sleep(0)
        assert await waiter is None
        assert seen == ["callback"]
        ticket = device.stream("copy").submit(Call(lambda: None))
        ticket.add_callback(functools.partial(seen.append, "another"))
        assert await fired(ticket) is None
        assert seen == ["callback", "another"]


async def test_callbacks_come_while_the_loop_stands_still(device: NativeCpuDevice, ring: LoopRing) -> None:
    called = threading.Event()
    with device.gate("copy"):
        device.stream("copy").submit(Call(lambda: None)).add_callback(called.set)
    assert called.wait(WAIT_S)
