from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext import NativeCpuDevice, TorchCpuDevice
from hicache_actors.cuda_ext.native.library import library, why_not
from hicache_actors.errors import StoppedError, TransferError
from hicache_actors.memory.kv import KVTensors
from hicache_actors.testing.kv_samples import Asked, Call, as_bytes, engine_tensors, host_memory
from hicache_actors.transfer.completions import fired
from hicache_actors.transfer.plan import CopyPlan

WAIT_S = 30.0

Make = type[TorchCpuDevice] | type[NativeCpuDevice]


@pytest.fixture(params=[TorchCpuDevice, NativeCpuDevice], ids=["python", "native"])
def make(request: pytest.FixtureRequest) -> Make:
    """Both CPU devices."""
    kind: Make = request.param
    if kind is NativeCpuDevice and library() is None:
        pytest.skip(f"the native library is not in use: {why_not()}")
    return kind


async def test_the_loop_runs_while_a_copy_runs(make: Make) -> None:
    device = make()
    go, began = threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        assert go.wait(WAIT_S)

    ticket = device.stream("copy").submit(Call(block))
    assert await fired(began) is None
    assert not ticket.query()
    go.set()
    assert await fired(ticket) is None
    assert device.close(WAIT_S)


def test_two_streams_run_at_the_same_time(make: Make) -> None:
    device = make()
    meeting = threading.Barrier(2)
    tickets = [device.stream(name).submit(Call(lambda: meeting.wait(WAIT_S))) for name in ("one", "two")]
    assert [ticket.wait(WAIT_S) for ticket in tickets] == [True, True]
    assert [ticket.error for ticket in tickets] == [None, None]
    assert device.close(WAIT_S)


def test_a_thread_waits_for_a_ticket(make: Make) -> None:
    device = make()
    gate = device.gate("copy")
    ticket = device.stream("copy").submit(Call(lambda: None))
    assert gate.reached.wait(WAIT_S)
    assert not ticket.wait(0.001)
    gate.open()
    assert ticket.wait(WAIT_S)
    assert ticket.wait(0.0)
    assert device.close(WAIT_S)


def test_a_gate_may_be_opened_by_whoever_sees_it_reached(make: Make) -> None:
    device = make()
    gate = device.gate("copy")
    gate.reached.add_callback(gate.open)
    assert device.stream("copy").submit(Call(lambda: None)).wait(WAIT_S)
    assert device.close(WAIT_S)


def test_early_reuse_of_a_source_is_copied_wrong(make: Make) -> None:
    """Copies are late for real: the page that is there when the copy runs is what lands."""
    device = make()
    kv = engine_tensors("contiguous")
    host = host_memory(kv, "page_first")
    with device.gate("copy") as gate:
        ticket = device.stream("copy").submit(CopyPlan(kv, pack_slots([2]), host, pack_slots([3])).work())
        assert gate.reached.wait(WAIT_S)
        kv.layer(0)[0][2].zero_()
    assert ticket.wait(WAIT_S)
    assert as_bytes(host.layer(0)[0][3]) == bytes(kv.layer(0)[0][2].nbytes)
    assert device.close(WAIT_S)


def test_work_that_has_begun_outlives_close(make: Make) -> None:
    device = make()
    go, began, seen = threading.Event(), threading.Event(), []

    def block() -> None:
        began.set()
        assert go.wait(WAIT_S)
        seen.append("late")

    stream = device.stream("copy")
    running, queued = stream.submit(Call(block)), stream.submit(Call(lambda: seen.append("queued")))
    assert began.wait(WAIT_S)
    assert not device.close(0.01)
    assert isinstance(running.error, StoppedError)
    assert isinstance(queued.error, StoppedError)
    go.set()
    assert not device.close(WAIT_S)
    assert seen == ["late"]


def test_a_lost_device_does_not_wait_for_what_runs(make: Make) -> None:
    device = make()
    go, began = threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        assert go.wait(WAIT_S)

    ticket = device.stream("copy").submit(Call(block))
    assert began.wait(WAIT_S)
    error = TransferError("gone")
    device.lose(error)
    assert ticket.error is error
    go.set()
    assert not device.close(WAIT_S)
    assert device.snapshot()["finished"] == 0


def test_a_wait_for_an_event_that_never_comes_ends_at_close(make: Make) -> None:
    device = make("lonely")
    stream = device.stream("copy")
    stream.wait_event(Asked())
    ticket = stream.submit(Call(lambda: None))
    assert not device.close(0.01)
    assert isinstance(ticket.error, StoppedError)
    device.close(WAIT_S)
    assert not any(thread.name.startswith("hicache-lonely-") for thread in threading.enumerate())


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_copies_work_beside_a_forward_pass_in_inference_mode(
    make: Make, mode: type[torch.inference_mode] | type[torch.no_grad]
) -> None:
    device = make()
    shape = engine_tensors("contiguous").shape
    with mode():
        kv = KVTensors.make(shape, 4)
        host = host_memory(kv, "page_first_direct")
        ticket = device.stream("copy").submit(CopyPlan(host, pack_slots([1]), kv, pack_slots([2])).work())
        assert ticket.wait(WAIT_S)
        assert ticket.error is None
        kv.layer(0)[0][3].copy_(kv.layer(0)[0][2])
    assert not kv.layer(0)[0].is_inference()
    assert as_bytes(kv.layer(0)[0][3]) == as_bytes(host.layer(0)[0][1])
    assert device.close(WAIT_S)


def test_copies_leave_the_thread_count_alone(make: Make) -> None:
    device = make()
    before = torch.get_num_threads()
    kv = engine_tensors("contiguous")
    plan = CopyPlan(kv, pack_slots([0, 5, 1]), host_memory(kv, "page_first"), pack_slots([0, 2, 5]))
    assert device.stream("copy").submit(plan.work()).wait(WAIT_S)
    counts: list[int] = []
    later = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert [torch.get_num_threads(), *counts] == [before, before]
    assert device.close(WAIT_S)


def test_no_thread_is_left_behind(make: Make) -> None:
    device = make("tidy")
    for name in ("load", "write_back"):
        assert device.stream(name).submit(Call(lambda: None)).wait(WAIT_S)
    assert sum(thread.name.startswith("hicache-tidy-") for thread in threading.enumerate()) >= 2
    assert device.close(WAIT_S)
    assert not any(thread.name.startswith("hicache-tidy-") for thread in threading.enumerate())


def test_hung_work_does_not_keep_the_process(make: Make) -> None:
    code = (
        "import threading\n"
        "from hicache_actors.cuda_ext import NativeCpuDevice, TorchCpuDevice\n"
        "from hicache_actors.testing.kv_samples import Call\n"
        f"device = {make.__name__}()\n"
        "began = threading.Event()\n"
        "device.stream('copy').submit(Call(lambda: (began.set(), threading.Event().wait())))\n"
        "assert began.wait(30) and not device.close(0.01)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
