"""The contract of devices as tests: subclass `DeviceContract`, say how to make a device, and let pytest collect it.

Bytes are compared with plain torch references; order, waits, failures and close with what the protocol promises.  Nothing is
timed: tests hold a stream at its gate and wait for `Gate.reached`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext.controls import ControlledDevice
from hicache_actors.errors import StoppedError, TransferError
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.layout import Order, SlotLayout
from hicache_actors.memory.shapes import BATCH_PAGES, KVShape
from hicache_actors.testing.kv_samples import (
    LAYERS,
    ORDERS_AND_MLA,
    PAGES,
    PLACES,
    SLOTS,
    STRIDES,
    Asked,
    Call,
    as_bytes,
    engine_tensors,
    host_memory,
    page_bytes,
    slot_bytes,
)
from hicache_actors.transfer.completions import Completion, fired
from hicache_actors.transfer.plan import CopyPlan
from hicache_actors.transfer.waits import LayerWaits


def known(device: ControlledDevice[Any], host: HostMemory) -> HostMemory:
    """The host memory, once the device has been told of it."""
    device.register(*host.extent(), step_bytes=host.layout.slot_bytes)
    return host


class DeviceContract:
    """Subclasses give `make_device`, and where tests run by parametrising the fixture ``anyio_backend``."""

    place = "cpu"
    """Torch's name of where the KV tensors are."""

    def make_device(self) -> ControlledDevice[Any]:
        raise NotImplementedError

    @pytest.fixture
    def device(self) -> Iterator[ControlledDevice[Any]]:
        device = self.make_device()
        yield device
        device.close(0.0)

    # -- bytes ---------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("places", PLACES)
    @pytest.mark.parametrize("strides", STRIDES)
    @pytest.mark.parametrize(("order", "mla"), ORDERS_AND_MLA)
    async def test_write_back_bytes(
        self, device: ControlledDevice[Any], order: Order, mla: bool, strides: str, places: str
    ) -> None:
        kv = engine_tensors(strides, mla=mla, place=self.place)
        host = known(device, host_memory(kv, order))
        before, header_bytes = [slot_bytes(host, slot) for slot in range(SLOTS)], host.layout.slot_header_bytes
        pages, slots = PLACES[places]
        plan = CopyPlan(kv, pack_slots(pages), host, pack_slots(slots))
        assert await fired(device.stream("write_back").submit(plan.work())) is None
        for page, slot in zip(pages, slots, strict=True):
            assert slot_bytes(host, slot) == before[slot][:header_bytes] + page_bytes(kv, page, order)
        for slot in set(range(SLOTS)) - set(slots):
            assert slot_bytes(host, slot) == before[slot]

    @pytest.mark.parametrize("places", PLACES)
    @pytest.mark.parametrize("strides", STRIDES)
    @pytest.mark.parametrize(("order", "mla"), ORDERS_AND_MLA)
    async def test_load_bytes(
        self, device: ControlledDevice[Any], order: Order, mla: bool, strides: str, places: str
    ) -> None:
        kv = engine_tensors(strides, mla=mla, place=self.place)
        host = known(device, host_memory(kv, order))
        before = [page_bytes(kv, page, order) for page in range(PAGES)]
        host_before = [slot_bytes(host, slot) for slot in range(SLOTS)]
        pages, slots = PLACES[places]
        plan = CopyPlan(host, pack_slots(slots), kv, pack_slots(pages))
        for layer in plan.layers:
            for batch in range(len(plan.batches)):
                device.stream("load").submit(plan.work(range(layer, layer + 1), batch))
        assert await fired(device.stream("load").record()) is None
        for page, slot in zip(pages, slots, strict=True):
            assert page_bytes(kv, page, order) == host_before[slot][host.layout.slot_header_bytes :]
        for page in set(range(PAGES)) - set(pages):
            assert page_bytes(kv, page, order) == before[page]
        assert [slot_bytes(host, slot) for slot in range(SLOTS)] == host_before

    @pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "float8_e4m3fn", "uint8"])
    async def test_there_and_back_keeps_every_bit(self, device: ControlledDevice[Any], dtype: str) -> None:
        kv = engine_tensors("page_major", dtype=getattr(torch, dtype), place=self.place)
        host = known(device, host_memory(kv, "page_first", header_bytes=0))
        before = page_bytes(kv, 3, "page_first")
        stream = device.stream("copy")
        stream.submit(CopyPlan(kv, pack_slots([3]), host, pack_slots([5])).work())
        assert await fired(stream.submit(CopyPlan(host, pack_slots([5]), kv, pack_slots([9])).work())) is None
        assert bytes(host.object(5)) == before
        assert page_bytes(kv, 9, "page_first") == before

    async def test_a_batch_moves_its_pages_only(self, device: ControlledDevice[Any]) -> None:
        shape, pages = KVShape(2, 1, 1, 1, "uint8", 1), BATCH_PAGES + 36
        kv = KVTensors.make(shape, pages, device=self.place)
        kv.layer(0)[0].fill_(1)
        kv.layer(1)[0].fill_(2)
        host = known(device, HostMemory(SlotLayout(shape, header_bytes=0), pages))
        slots = pack_slots(range(pages))
        plan = CopyPlan(kv, slots, host, slots)
        assert plan.batches == (range(BATCH_PAGES), range(BATCH_PAGES, pages))
        assert await fired(device.stream("copy").submit(plan.work(range(1, 2), 1))) is None
        assert host.layer(0)[0].sum() == 0
        assert host.layer(1)[0].flatten().tolist() == [0] * BATCH_PAGES + [2] * 36

    # -- order ---------------------------------------------------------------------------------------------------------

    async def test_a_stream_runs_in_submission_order(self, device: ControlledDevice[Any]) -> None:
        seen: list[int] = []
        stream = device.stream("copy")
        for number in range(50):
            stream.submit(Call(functools.partial(seen.append, number), nbytes=(50 - number) * 1000))
        await fired(stream.record())
        assert seen == list(range(50))

    async def test_streams_do_not_wait_for_each_other(self, device: ControlledDevice[Any]) -> None:
        seen: list[str] = []
        with device.gate("one") as gate:
            held = device.stream("one").submit(Call(lambda: seen.append("one")))
            await fired(gate.reached)
            assert await fired(device.stream("two").submit(Call(lambda: seen.append("two")))) is None
            assert not held.query()
        await fired(held)
        assert seen == ["two", "one"]
        assert device.stream("one") is device.stream("one")

    async def test_wait_event_holds_what_is_submitted_later(self, device: ControlledDevice[Any]) -> None:
        seen: list[str] = []
        copy, compute = device.stream("copy"), device.stream("compute")
        with device.gate("copy") as gate:
            copied = copy.submit(Call(lambda: seen.append("copy")))
            assert await fired(compute.submit(Call(lambda: seen.append("before")))) is None
            compute.wait_event(copied)
            after = compute.submit(Call(lambda: seen.append("after")))
            await fired(gate.reached)
            await asyncio.sleep(0)
            assert seen == ["before"]
            assert not after.query()
        assert await fired(after) is None
        assert seen == ["before", "copy", "after"]

    async def test_wait_event_takes_engine_events(self, device: ControlledDevice[Any]) -> None:
        stream = device.stream("copy")
        asked, hold, failed, old = Asked(), Completion(), Completion(), Completion()
        old.finish()
        seen: list[str] = []
        for event in (old, failed, hold, asked):
            stream.wait_event(event)
        ticket = stream.submit(Call(lambda: seen.append("ran")))
        failed.finish(TransferError("planted"))
        hold.finish()
        await asyncio.sleep(0.005)
        assert seen == []
        assert not ticket.query()
        asked.over = True
        assert await fired(ticket) is None
        assert seen == ["ran"]

    async def test_an_event_that_raises_loses_the_device(self, device: ControlledDevice[Any]) -> None:
        stream = device.stream("copy")
        asked = Asked()
        stream.wait_event(asked)
        ticket = stream.submit(Call(lambda: None))
        asked.error = RuntimeError("sticky")
        error = await fired(ticket)
        assert isinstance(error, TransferError)
        assert "sticky" in str(error)
        assert device.lost is error

    async def test_record_ends_with_everything_before_it(self, device: ControlledDevice[Any]) -> None:
        stream = device.stream("copy")
        assert await fired(stream.record()) is None
        with device.gate("copy") as gate:
            stream.submit(Call(lambda: None))
            recorded = stream.record()
            await fired(gate.reached)
            assert not recorded.query()
            assert not stream.record().query()
        assert await fired(recorded) is None

    # -- gates, failures, callbacks ------------------------------------------------------------------------------------

    async def test_a_gate_lets_as_many_pass_as_it_is_told(self, device: ControlledDevice[Any]) -> None:
        seen: list[int] = []
        stream = device.stream("copy")
        gate = device.gate("copy")
        tickets = [stream.submit(Call(functools.partial(seen.append, number))) for number in range(4)]
        await fired(gate.reached)
        assert seen == []
        gate.allow()
        await fired(tickets[0])
        await fired(gate.reached)
        assert seen == [0]
        gate.allow(2)
        await fired(tickets[2])
        await fired(gate.reached)
        assert seen == [0, 1, 2]
        gate.open()
        await fired(tickets[3])
        assert seen == [0, 1, 2, 3]

    async def test_failing_work_fails_its_own_ticket(self, device: ControlledDevice[Any]) -> None:
        error = ValueError("planted")

        def fail() -> None:
            raise error

        stream = device.stream("copy")
        failed, recorded, good = (
            stream.submit(Call(fail)),
            stream.record(),
            stream.submit(Call(lambda: None, nbytes=10)),
        )
        assert await fired(failed) is error
        assert failed.error is error
        assert await fired(recorded) is None
        assert await fired(good) is None
        counts = device.snapshot()
        assert (counts["submitted"], counts["finished"], counts["failed"], counts["moved_bytes"]) == (2, 1, 1, 10)

    async def test_planned_failures(self, device: ControlledDevice[Any]) -> None:
        seen: list[str] = []
        error = TransferError("planted")
        device.fail_next(error, works=2, after=1, stream="one")
        tickets = [device.stream("one").submit(Call(lambda: seen.append("one"))) for _ in range(4)]
        other = device.stream("two").submit(Call(lambda: seen.append("two")))
        assert [await fired(ticket) for ticket in tickets] == [None, error, error, None]
        assert await fired(other) is None
        assert sorted(seen) == ["one", "one", "two"]

    async def test_throttled_work_lasts(self, device: ControlledDevice[Any]) -> None:
        device.throttle(gb_s=0.001, latency_s=0.005, stream="slow")
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        for _ in range(2):
            device.stream("slow").submit(Call(lambda: None, nbytes=5_000))
        await fired(device.stream("slow").record())
        assert loop.time() - start_s >= 0.0199

    async def test_callbacks_are_called_once(self, device: ControlledDevice[Any]) -> None:
        called: list[str] = []
        last = Completion()
        with device.gate("copy"):
            ticket = device.stream("copy").submit(Call(lambda: None))
            ticket.add_callback(lambda: called.append("early"))
            ticket.add_callback(lambda: 1 // 0)
            ticket.add_callback(lambda: called.append("second"))
            ticket.add_callback(last.finish)
        await fired(last)  # not the ticket: who waits for it may be told before the callbacks are
        ticket.add_callback(lambda: called.append("late"))
        assert called == ["early", "second", "late"]

    async def test_a_cancelled_waiter_harms_nobody(self, device: ControlledDevice[Any]) -> None:
        seen: list[str] = []
        with device.gate("copy") as gate:
            ticket = device.stream("copy").submit(Call(lambda: seen.append("copy")))
            waiters = [asyncio.ensure_future(fired(ticket)) for _ in range(3)]
            await fired(gate.reached)
            waiters[1].cancel()
            await asyncio.wait([waiters[1]])
            assert waiters[1].cancelled()
        assert [await waiters[0], await waiters[2]] == [None, None]
        assert seen == ["copy"]

    # -- layers --------------------------------------------------------------------------------------------------------

    async def test_a_layer_is_ready_after_its_copy_and_not_before(self, device: ControlledDevice[Any]) -> None:
        kv = engine_tensors("contiguous", place=self.place)
        host = known(device, host_memory(kv, "page_first_direct"))
        plan = CopyPlan(host, pack_slots([4]), kv, pack_slots([7]))
        waits = LayerWaits(LAYERS)
        compute = device.stream("compute")
        gate = device.gate("load")
        for layer in plan.layers:
            waits.follow(layer, device.stream("load").submit(plan.work(range(layer, layer + 1))))
        readers = []
        for layer in plan.layers:
            waits.stream_wait(layer, compute)
            readers.append(compute.submit(Call(lambda: None)))
        for layer in plan.layers:
            waiters = [asyncio.ensure_future(waits.ready(later)) for later in range(layer, LAYERS)]
            await fired(gate.reached)
            assert [waits.done(other) for other in plan.layers] == [other < layer for other in plan.layers]
            assert not readers[layer].query()
            gate.allow()
            await waiters[0]
            assert as_bytes(kv.layer(layer)[0][7]) == as_bytes(host.layer(layer)[0][4])
            await fired(readers[layer])
            for waiter in waiters[1:]:
                assert not waiter.done()
                waiter.cancel()
        assert waits.error is None

    async def test_a_failing_layer_releases_all_waiters(self, device: ControlledDevice[Any]) -> None:
        kv = engine_tensors("contiguous", place=self.place)
        plan = CopyPlan(known(device, host_memory(kv, "page_first")), pack_slots([4]), kv, pack_slots([7]))
        waits = LayerWaits(LAYERS)
        error = TransferError("planted")
        device.fail_next(error, after=1, stream="load")
        gate = device.gate("load")
        for layer in plan.layers:
            waits.follow(layer, device.stream("load").submit(plan.work(range(layer, layer + 1))))
        waiters = [asyncio.ensure_future(waits.ready(layer)) for layer in plan.layers]
        await fired(gate.reached)
        gate.allow()
        await waiters[0]
        gate.allow()
        async with asyncio.timeout(60.0):
            for waiter in waiters[1:]:
                with pytest.raises(TransferError, match="planted"):
                    await waiter
        assert waits.error is error
        assert not any(waits.done(layer) for layer in plan.layers)
        with pytest.raises(TransferError):
            await waits.ready(0)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def test_close_runs_what_was_submitted(self, device: ControlledDevice[Any]) -> None:
        seen: list[int] = []
        stream = device.stream("copy")
        tickets = [stream.submit(Call(functools.partial(seen.append, number))) for number in range(5)]
        assert device.close(10.0)
        assert seen == [0, 1, 2, 3, 4]
        assert all(ticket.query() and ticket.error is None for ticket in tickets)
        assert device.close(0.0)
        with pytest.raises(StoppedError):
            stream.submit(Call(lambda: None))
        with pytest.raises(StoppedError):
            device.stream("new")

    async def test_close_says_what_it_could_not_end(self, device: ControlledDevice[Any]) -> None:
        seen: list[str] = []
        device.gate("copy")
        held = device.stream("copy").submit(Call(lambda: seen.append("held")))
        recorded = device.stream("copy").record()
        device.stream("other").wait_event(held)
        assert not device.close(0.02)
        assert isinstance(held.error, StoppedError)
        assert isinstance(recorded.error, StoppedError)
        assert seen == []
        assert not device.close(0.0)

    async def test_a_lost_device_fails_everything_at_once(self, device: ControlledDevice[Any]) -> None:
        error = TransferError("gone")
        stream = device.stream("copy")
        device.gate("copy")
        tickets = [stream.submit(Call(lambda: None)), stream.record()]
        device.lose(error)
        tickets += [stream.submit(Call(lambda: None)), device.stream("new").record()]
        assert [await fired(ticket) for ticket in tickets] == [error] * 4
        assert device.snapshot()["lost"] == 1
