from __future__ import annotations

import asyncio
import threading

import pytest

from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext import open_cpu_device
from hicache_actors.errors import TransferError, UsageError
from hicache_actors.testing.kv_samples import LAYERS, Call, as_bytes, engine_tensors, host_memory
from hicache_actors.transfer.completions import Completion, fired
from hicache_actors.transfer.plan import CopyPlan
from hicache_actors.transfer.waits import LayerWaits

WAIT_S = 30.0


def test_a_forward_thread_goes_on_layer_by_layer() -> None:
    """The forward pass reads layer k after its copy, while the copies of later layers stand at the gate."""
    device = open_cpu_device()
    kv = engine_tensors("page_major")
    host = host_memory(kv, "page_first")
    plan = CopyPlan(host, pack_slots([4, 1]), kv, pack_slots([7, 3]))
    waits = LayerWaits(LAYERS)
    gate = device.gate("load")
    for layer in plan.layers:
        waits.follow(layer, device.stream("load").submit(plan.work(range(layer, layer + 1))))
    reads: list[bytes] = []
    passed = [Completion() for _ in range(LAYERS)]

    def forward() -> None:
        for layer in range(LAYERS):
            assert waits.wait(layer, WAIT_S)
            reads.append(as_bytes(kv.layer(layer)[0][7]))
            passed[layer].finish()

    thread = threading.Thread(target=forward)
    thread.start()
    for layer in range(LAYERS):
        assert gate.reached.wait(WAIT_S)
        assert len(reads) == layer
        assert not waits.wait(layer, 0.001)
        assert waits.error is None
        gate.allow()
        assert passed[layer].wait(WAIT_S)
    thread.join(WAIT_S)
    assert reads == [as_bytes(host.layer(layer)[0][4]) for layer in range(LAYERS)]
    assert device.close(WAIT_S)


def test_a_failed_copy_releases_every_thread() -> None:
    device = open_cpu_device()
    error = TransferError("planted")
    device.fail_next(error, after=1)
    waits = LayerWaits(4)
    gate = device.gate("load")
    for layer in range(4):
        waits.follow(layer, device.stream("load").submit(Call(lambda: None)))
    answers: dict[int, bool] = {}

    def wait(layer: int) -> None:
        answers[layer] = waits.wait(layer, WAIT_S)

    threads = [threading.Thread(target=wait, args=(layer,)) for layer in range(1, 4)]
    for thread in threads:
        thread.start()
    gate.allow(2)  # layers 2 and 3 stay at the gate: their waiters are released by the failure of layer 1
    for thread in threads:
        thread.join(WAIT_S)
    assert answers == {1: False, 2: False, 3: False}
    assert waits.error is error
    assert not waits.wait(0, 0.0)
    gate.open()
    assert device.close(WAIT_S)
    assert not any(waits.done(layer) for layer in range(4))


async def test_stream_thread_and_loop_wait_for_the_same_layer() -> None:
    device = open_cpu_device()
    waits = LayerWaits(2)
    gate = device.gate("load")
    for layer in range(2):
        waits.follow(layer, device.stream("load").submit(Call(lambda: None)))
    waits.stream_wait(0, device.stream("compute"))
    computed = device.stream("compute").submit(Call(lambda: None))
    ready = asyncio.ensure_future(waits.ready(0))
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(waits.wait(0, WAIT_S)))
    thread.start()
    await fired(gate.reached)
    assert not ready.done()
    assert not computed.query()
    gate.allow()
    await ready
    assert await fired(computed) is None
    thread.join(WAIT_S)
    assert answers == [True]
    assert [waits.done(layer) for layer in range(2)] == [True, False]
    gate.open()
    await waits.ready(1)
    assert device.close(WAIT_S)


async def test_a_cancelled_coroutine_harms_no_other_waiter() -> None:
    waits = LayerWaits(2)
    waiters = [asyncio.ensure_future(waits.ready(1)) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[1].cancel()
    await asyncio.wait([waiters[1]])
    waits.set(1)
    await waiters[0]
    await waiters[2]
    assert waiters[1].cancelled()
    assert waits.done(1)


def test_failing_too_late_changes_nothing() -> None:
    waits = LayerWaits(2)
    waits.set(0)
    waits.set(1)
    waits.fail(TransferError("late"))
    assert waits.error is None
    assert waits.wait(1, 0.0)
    assert waits.layers == 2


async def test_the_first_failure_stands() -> None:
    waits = LayerWaits(2)
    first = TransferError("first")
    waits.fail(first)
    waits.fail(TransferError("second"))
    waits.set(0)
    assert waits.error is first
    assert not waits.done(0)
    with pytest.raises(TransferError, match="first"):
        await waits.ready(0)


@pytest.mark.parametrize("anyio_backend", ["virtual"], indirect=True)
async def test_a_virtual_loop_is_not_blocked() -> None:
    waits = LayerWaits(1)
    with pytest.raises(UsageError, match="await ready"):
        waits.wait(0, 1.0)
    waits.set(0)
    assert waits.wait(0, 1.0)
