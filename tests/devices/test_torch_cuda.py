"""The CUDA device of torch, over something that stands for torch.cuda; tests/gpu runs the same contract on GPUs."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext.registration import pieces
from hicache_actors.cuda_ext.torch_cuda import CudaTicket, TorchCudaDevice
from hicache_actors.errors import TransferError, UsageError
from hicache_actors.testing.device_contract import DeviceContract
from hicache_actors.testing.kv_samples import LAYERS, Call, engine_tensors, host_memory
from hicache_actors.transfer.completions import fired
from hicache_actors.transfer.plan import CopyPlan
from hicache_actors.transfer.waits import LayerWaits

from .fake_cuda import FakeCuda

WAIT_S = 30.0


@pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)
class TestTorchCudaDevice(DeviceContract):
    def make_device(self) -> TorchCudaDevice:
        return TorchCudaDevice(cuda=FakeCuda())


def opened() -> tuple[FakeCuda, TorchCudaDevice]:
    cuda = FakeCuda()
    return cuda, TorchCudaDevice(cuda=cuda)


def test_a_ticket_ends_with_the_event_and_not_with_the_submission() -> None:
    cuda, device = opened()
    cuda.hold(-1)
    kv = engine_tensors("contiguous")
    plan = CopyPlan(host_memory(kv, "page_first_direct"), pack_slots([4]), kv, pack_slots([7]))
    held = device.stream("load").submit(plan.work())
    other = device.stream("write_back").record()
    assert other.wait(WAIT_S)  # the streams do not wait for each other
    assert isinstance(held, CudaTicket)
    assert held._submitted.wait(WAIT_S)
    assert not held.query()
    assert not device.close(0.0)
    cuda.let_go()


def test_loads_have_the_higher_priority() -> None:
    cuda, device = opened()
    for name in ("load", "write_back"):
        assert device.stream(name).record().wait(WAIT_S)
    assert sorted(stream.priority for stream in cuda.streams) == [-1, 0]
    assert device.close(WAIT_S)


def test_a_stream_waits_on_the_gpu_for_tickets_and_events_of_the_engine() -> None:
    cuda, device = opened()
    cuda.hold(-1)
    copied = device.stream("load").record()
    assert isinstance(copied, CudaTicket)
    assert copied._submitted.wait(WAIT_S)
    compute = device.stream("compute")
    of_engine = cuda.Event()
    compute.wait_event(copied)
    compute.wait_event(cast(Any, of_engine))
    assert compute.record().wait(WAIT_S)  # neither has fired, and no thread waits for them
    (stream,) = (stream for stream in cuda.streams if stream.priority == 0)
    assert stream.waited_for == [copied.event, of_engine]
    cuda.let_go()
    assert device.close(WAIT_S)


def test_work_of_the_host_runs_after_the_copies_before_it() -> None:
    cuda, device = opened()
    cuda.hold(-1)
    seen: list[str] = []
    stream = device.stream("load")
    first = stream.record()
    second = stream.submit(Call(lambda: seen.append("ran")))
    assert isinstance(first, CudaTicket)
    assert first._submitted.wait(WAIT_S)
    assert seen == []
    cuda.let_go()
    assert second.wait(WAIT_S)
    assert seen == ["ran"]
    assert device.close(WAIT_S)


async def test_a_dead_context_loses_the_device() -> None:
    cuda, device = opened()
    cuda.hold(-1)
    open_ticket = device.stream("load").record()
    cuda.fail(RuntimeError("CUDA error: an illegal memory access was encountered"))
    error = await fired(open_ticket)
    assert isinstance(error, TransferError)
    assert "illegal memory access" in str(error)
    assert device.lost is error
    assert await fired(device.stream("load").submit(Call(lambda: None))) is error
    assert not device.close(WAIT_S)


def test_host_memory_is_registered_in_pieces_or_not_at_all() -> None:
    assert pieces(10, 4, limit_bytes=9) == [range(8), range(8, 10)]
    assert pieces(12, 5, limit_bytes=3) == [range(5), range(5, 10), range(10, 12)]
    cuda, device = opened()
    nbytes = (130 << 30) + 4096
    device.register(1 << 40, nbytes, step_bytes=3 << 30)
    assert [*cuda.registered.values()] == [63 << 30, 63 << 30, nbytes - (126 << 30)]
    with pytest.raises(UsageError, match="registered already"):
        device.register(1 << 40, 4096, step_bytes=4096)
    device.registrations.remove(1 << 40)
    device.registrations.remove(1 << 40)
    assert not cuda.registered
    cuda.results = [0, 2]
    with pytest.raises(TransferError, match="cudaHostRegister on cuda:0 failed with CUDA error 2"):
        device.register(1 << 40, nbytes, step_bytes=3 << 30)
    assert not cuda.registered
    assert device.close(WAIT_S)


def test_close_lets_go_of_host_memory_unless_something_may_still_touch_it() -> None:
    cuda, device = opened()
    device.register(1 << 40, 4096, step_bytes=4096)
    assert device.close(WAIT_S)
    assert not cuda.registered
    cuda, device = opened()
    device.register(1 << 40, 4096, step_bytes=4096)
    cuda.hold(-1)
    device.stream("load").record()
    assert not device.close(0.1)
    assert cuda.registered
    cuda.let_go()


def test_a_stream_of_the_engine_waits_for_a_layer_on_the_gpu() -> None:
    cuda, device = opened()
    kv = engine_tensors("contiguous")
    plan = CopyPlan(host_memory(kv, "page_first_direct"), pack_slots([4]), kv, pack_slots([7]))
    waits = LayerWaits(LAYERS, device.make_end)
    engine = cuda.Stream(0, priority=7)
    cuda.capturing.add(engine)
    with pytest.raises(UsageError, match="capture piecewise"):
        waits.stream_wait(0, engine)
    cuda.capturing.clear()
    cuda.hold(-1)
    held: list[object] = []
    works = [plan.work(range(layer, layer + 1)) for layer in plan.layers]
    last = device.stream("load").submit_layers(works, waits, held.append)
    for layer in plan.layers:
        waits.stream_wait(layer, engine)
        assert not waits.done(layer)
    assert len(engine.waited_for) == len(held) == LAYERS
    assert engine.waited_for[-1] is cast(CudaTicket, last).event
    cuda.let_go()
    assert all(waits.wait(layer, WAIT_S) for layer in plan.layers)
    assert device.close(WAIT_S)


def test_a_load_that_is_never_submitted_does_not_hold_the_engine() -> None:
    cuda, device = opened()
    waits = LayerWaits(LAYERS, device.make_end)
    waits.fail(TransferError("planted"))
    engine = cuda.Stream(0)
    waits.stream_wait(0, engine)
    assert engine.waited_for == []
    assert device.close(WAIT_S)


def test_a_device_without_a_gpu_says_how_else_to_wait() -> None:
    with pytest.raises(UsageError, match=r"call wait\(layer\)"):
        LayerWaits(1).stream_wait(0, FakeCuda().Stream(0))


def test_no_thread_is_left_behind() -> None:
    _, device = opened()
    assert device.stream("load").record().wait(WAIT_S)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache-cuda:0-")]
    assert sorted(names) == ["hicache-cuda:0-load", "hicache-cuda:0-load-ends"]
    assert device.close(WAIT_S)
    for thread in threading.enumerate():
        if thread.name.startswith("hicache-cuda:0-"):
            thread.join(WAIT_S)
            assert not thread.is_alive()
