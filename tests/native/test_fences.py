"""No copy overtakes the GPU: what steps of the engine still read is not written, what they have not written yet is not read.

Each rule has its negative control: the same without the fence goes wrong, so the stub does reorder what may be reordered.
"""

from __future__ import annotations

import anyio.to_thread
import pytest
import torch

from hicache_actors.cache.api import HiCache
from hicache_actors.config import Config, DeviceConfig, HostConfig, LoadEngine, ModelFacts
from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext.native_cuda import NativeCudaDevice
from hicache_actors.errors import UsageError
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.shapes import KVShape
from hicache_actors.testing.engines import StepEngine
from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.small import prompt
from hicache_actors.testing.toy_model import ToyModel
from hicache_actors.transfer.engines import Engine, Engines
from hicache_actors.transfer.plan import CopyPlan
from hicache_actors.transfer.waits import LayerWaits

from .gpu_stub import IMAGE, Stub, attach

pytestmark = pytest.mark.native

WAIT_S = 60.0
LAYERS = 4
SHAPE = KVShape(LAYERS, 1, 1, 64, "uint8", 4)


def opened(stub: Stub, engines: Engines = Engines()) -> tuple[NativeCudaDevice, KVTensors, HostMemory]:  # noqa: B008
    device = NativeCudaDevice(path=stub.path, kernel=lambda major, minor: IMAGE)
    device.engines = engines
    kv = KVTensors.make(SHAPE, 8)
    host = HostMemory(SlotLayout(SHAPE), 8)
    attach(device, stub, kv, host)
    return device, kv, host


def page(kv: KVTensors, layer: int, number: int) -> torch.Tensor:
    return kv.layer(layer)[0][number]


@pytest.mark.parametrize("fence", [True, False], ids=["fence", "no fence"])
@pytest.mark.parametrize("engine", ["kernel", "direct", "staged"])
@pytest.mark.parametrize("version", [13000, 12080, 12000])
def test_a_write_back_reads_what_the_step_before_it_has_written(
    stub: Stub, version: int, engine: Engine, fence: bool
) -> None:
    """With a source that may be read in any order this would fail: the stub reads it when the copy is submitted."""
    stub.reset(version)
    device, kv, host = opened(stub, Engines(write_back=engine))
    step = stub.stream()
    step.gate(shut=True)
    for layer in range(LAYERS):
        step.fill(page(kv, layer, 3), 7)
    stream = device.stream("write_back")
    if fence:
        stream.wait_event(step.event())  # as torch.cuda.Event: with a handle
    ticket = stream.submit(CopyPlan(kv, pack_slots([3]), host, pack_slots([5])).work())
    assert not fence or not ticket.wait(0.05)
    if not fence:
        assert ticket.wait(WAIT_S)
    step.gate(shut=False)
    assert ticket.wait(WAIT_S)
    assert ticket.error is None
    assert {int(value) for layer in range(LAYERS) for value in host.layer(layer)[0][5].flatten()} == {7 if fence else 0}
    step.synchronize()
    assert device.close(WAIT_S)


@pytest.mark.parametrize("fence", [True, False], ids=["fence", "no fence"])
@pytest.mark.parametrize("engine", ["kernel", "direct"])
def test_a_load_writes_no_page_that_a_step_still_reads(stub: Stub, engine: LoadEngine, fence: bool) -> None:
    device, kv, host = opened(stub, Engines(load=engine))
    page(kv, 0, 3).fill_(1)
    host.layer(0)[0][5].fill_(2)
    read = torch.zeros_like(page(kv, 0, 3))
    step = stub.stream()
    step.gate(shut=True)
    step.copy(read, page(kv, 0, 3))  # attention of an earlier request
    stream = device.stream("load")
    if fence:
        stream.wait_event(step.event())
    ticket = stream.submit(CopyPlan(host, pack_slots([5]), kv, pack_slots([3])).work())
    assert ticket.wait(0.05 if fence else WAIT_S) is not fence
    step.gate(shut=False)
    step.synchronize()
    assert ticket.wait(WAIT_S)
    assert int(read[0, 0, 0]) == (1 if fence else 2)
    assert int(page(kv, 0, 3)[0, 0, 0]) == 2
    assert device.close(WAIT_S)


@pytest.mark.parametrize("version", [13000, 12080])
@pytest.mark.parametrize("behind", ["same stream", "event"])
def test_a_load_reads_what_the_write_back_before_it_brings(stub: Stub, version: int, behind: str) -> None:
    """A batch may read a load's source in any order, but not where the stream has before it what writes that source."""
    stub.reset(version)
    device, kv, host = opened(stub, Engines(load="direct", write_back="direct"))
    for layer in range(LAYERS):
        page(kv, layer, 3).fill_(7)
    step = stub.stream()
    step.gate(shut=True)
    step.fill(page(kv, 0, 0), 0)
    write_backs = device.stream("write_back")
    loads = write_backs if behind == "same stream" else device.stream("load")
    write_backs.wait_event(step.event())
    written = write_backs.submit(CopyPlan(kv, pack_slots([3, 4]), host, pack_slots([5, 2])).work())
    if behind == "event":
        loads.wait_event(written)
    loaded = loads.submit(CopyPlan(host, pack_slots([5, 2]), kv, pack_slots([6, 7])).work())
    assert not loaded.wait(0.05)
    step.gate(shut=False)
    assert loaded.wait(WAIT_S)
    assert loaded.error is None
    assert all(bool((page(kv, layer, 6) == 7).all()) for layer in range(LAYERS))
    assert device.close(WAIT_S)


def test_a_fence_of_one_load_does_not_hold_another_stream(stub: Stub) -> None:
    device, kv, host = opened(stub)
    step = stub.stream()
    step.gate(shut=True)
    step.fill(page(kv, 0, 0), 1)
    device.stream("load").wait_event(step.event())
    held = device.stream("load").submit(CopyPlan(host, pack_slots([5]), kv, pack_slots([3])).work())
    free = device.stream("write_back").submit(CopyPlan(kv, pack_slots([4]), host, pack_slots([6])).work())
    assert free.wait(WAIT_S)
    assert not held.query()
    step.gate(shut=False)
    assert held.wait(WAIT_S)
    assert device.close(WAIT_S)


@pytest.mark.parametrize("waits_for_layers", [True, False], ids=["stream_wait", "no wait"])
def test_a_forward_pass_reads_each_layer_behind_its_copy(stub: Stub, waits_for_layers: bool) -> None:
    device, kv, host = opened(stub)
    for layer in range(LAYERS):
        host.layer(layer)[0][5].fill_(layer + 1)
    before = stub.stream()  # holds the copies on the GPU, after they have been submitted
    before.gate(shut=True)
    before.fill(page(kv, 0, 0), 0)
    load = device.stream("load")
    load.wait_event(before.event())
    plan = CopyPlan(host, pack_slots([5]), kv, pack_slots([3]))
    waits = LayerWaits(LAYERS, device.make_end)
    held: list[object] = []
    whole = load.submit_layers([plan.work(range(layer, layer + 1)) for layer in plan.layers], waits, held.append)
    forward, read = stub.stream(), torch.zeros(LAYERS, *SHAPE_OF_PAGE, dtype=torch.uint8)
    for layer in range(LAYERS):
        if waits_for_layers:
            waits.stream_wait(layer, forward)
        forward.copy(read[layer], page(kv, layer, 3))
    if not waits_for_layers:
        forward.synchronize()
    assert not any(waits.done(layer) for layer in range(LAYERS))
    before.gate(shut=False)
    assert whole.wait(WAIT_S)
    forward.synchronize()
    wanted = [layer + 1 if waits_for_layers else 0 for layer in range(LAYERS)]
    assert [int(each[0, 0, 0]) for each in read] == wanted
    assert all(waits.wait(layer, WAIT_S) for layer in range(LAYERS))
    assert held == [whole]
    assert stub.calls("cuLaunchHostFunc") == 1  # one an operation, none a layer
    assert device.close(WAIT_S)


SHAPE_OF_PAGE = (SHAPE.page_size, SHAPE.heads, SHAPE.head_dim)


def test_a_captured_stream_is_refused_and_pieces_of_a_graph_work(stub: Stub) -> None:
    device, kv, host = opened(stub)
    host.layer(1)[0][5].fill_(9)
    plan = CopyPlan(host, pack_slots([5]), kv, pack_slots([3]))
    waits = LayerWaits(LAYERS, device.make_end)
    device.stream("load").submit_layers(
        [plan.work(range(layer, layer + 1)) for layer in plan.layers], waits, lambda ticket: None
    )
    forward, read = stub.stream(), torch.zeros(SHAPE_OF_PAGE, dtype=torch.uint8)
    forward.capture(on=True)
    with pytest.raises(UsageError, match="capture piecewise, a graph for each layer or group of layers"):
        waits.stream_wait(1, forward)
    assert waits.wait(1, WAIT_S)
    with pytest.raises(UsageError, match="capture piecewise"):  # also when there is nothing to wait for today
        waits.stream_wait(1, forward)
    forward.capture(on=False)
    waits.stream_wait(1, forward)  # between two pieces
    forward.copy(read, page(kv, 1, 3))  # the replay of one
    forward.synchronize()
    assert int(read[0, 0, 0]) == 9
    assert device.close(WAIT_S)


def test_what_is_no_stream_is_refused(stub: Stub) -> None:
    device, _, _ = opened(stub)
    with pytest.raises(UsageError, match=r"is no CUDA stream: give a torch\.cuda\.Stream"):
        LayerWaits(1, device.make_end).stream_wait(0, "stream")
    assert device.close(WAIT_S)


async def test_a_cache_serves_over_the_native_cuda_device(stub: Stub) -> None:
    """All tiers but storage, with the pages that come back compared byte for byte; nothing is left behind."""
    shape = KVShape(2, 2, 1, 8, "float32", 4)
    kv = KVTensors.make(shape, 7)
    stub.device_memory(kv)
    device = NativeCudaDevice(path=stub.path, kernel=lambda major, minor: IMAGE)
    config = Config(
        page_size=4,
        model=ModelFacts(model_id="toy", weights="v1"),
        host=HostConfig(pages=32),
        device=DeviceConfig(write_back_engine="staged"),
    )
    async with HiCache.open(config, kv, device=device, driver="step") as cache:
        engine = StepEngine(cache, ToyModel(kv), batch=1)
        for turn in range(2):
            prompts = [(f"{turn}.{at}", prompt(5, family=family)) for at, family in enumerate((0, 1, 2, 2))]
            answers = await anyio.to_thread.run_sync(engine.run, prompts)
        engine.close()
        check_conservation(cache.core)
        assert sum(answer.account.host for answer in answers.values()) > 0
    assert stub.calls("cuMemcpyBatchAsync") > 0
    assert stub.live() == {}


async def test_a_cache_on_a_gpu_that_dies_degrades(stub: Stub) -> None:
    shape = KVShape(2, 2, 1, 8, "float32", 4)
    kv = KVTensors.make(shape, 7)
    stub.device_memory(kv)
    device = NativeCudaDevice(path=stub.path, kernel=lambda major, minor: IMAGE, watch_s=0.05)
    config = Config(page_size=4, host=HostConfig(pages=32), close_timeout_s=2.0)
    async with HiCache.open(config, kv, device=device, driver="step") as cache:
        engine = StepEngine(cache, ToyModel(kv), batch=1)
        await anyio.to_thread.run_sync(engine.run, [("before", prompt(5))])
        stub.kill(719)
        answers = await anyio.to_thread.run_sync(
            engine.run, [(f"after.{at}", prompt(5, family=at + 1)) for at in range(3)]
        )
        engine.close()
        assert set(answers) >= {"after.0", "after.1", "after.2"}  # the engine lives
        assert cache.state == "degraded"
