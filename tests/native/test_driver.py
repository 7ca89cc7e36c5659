"""The glue to the CUDA driver over a stub of it: errors of every call, both batch signatures, old drivers, dead contexts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from hicache_actors.config import WriteBackEngine
from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext.native.driver import How, LostError, RawCuda
from hicache_actors.cuda_ext.native_cuda import NativeCudaDevice
from hicache_actors.errors import ConfigError, TransferError, UsageError
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.testing.kv_samples import as_bytes, engine_tensors, host_memory
from hicache_actors.transfer.completions import End, fired
from hicache_actors.transfer.engines import Engine, Engines
from hicache_actors.transfer.plan import CopyPlan

from .gpu_stub import IMAGE, NATIVE, Stub, attach, build

pytestmark = pytest.mark.native

WAIT_S = 60.0
ENGINES: tuple[Engine, ...] = get_args(Engine)
CALLS = (
    "cuInit",
    "cuDriverGetVersion",
    "cuGetProcAddress",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuCtxPushCurrent",
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreate",
    "cuStreamDestroy",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventRecord",
    "cuEventQuery",
    "cuLaunchHostFunc",
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuLaunchKernel",
)
ENDINGS = {
    "cuDevicePrimaryCtxRelease",
    "cuStreamDestroy",
    "cuEventDestroy",
    "cuMemFree",
    "cuMemHostUnregister",
    "cuModuleUnload",
}


def opened(stub: Stub, engine: Engine | None = None, watch_s: float = 1.0) -> NativeCudaDevice:
    device = NativeCudaDevice(path=stub.path, kernel=lambda major, minor: IMAGE, watch_s=watch_s)
    if engine is not None:
        try:
            device.engines = Engines(
                load="kernel" if engine == "staged" else engine, write_back=_for_write_back(engine)
            )
        except ConfigError:
            device.close(WAIT_S)
            raise
    return device


def _for_write_back(engine: Engine) -> WriteBackEngine:
    return "staged" if engine == "kernel" else engine


def sides(stub: Stub) -> tuple[KVTensors, HostMemory]:
    kv = engine_tensors("contiguous")
    return kv, host_memory(kv, "page_first")


def copies(device: NativeCudaDevice, kv: KVTensors, host: HostMemory) -> Iterator[tuple[End, bool]]:
    """A write-back, a load of three layers, a record and a wait for an event: tickets, and whether pages were copied."""
    yield device.stream("write_back").submit(CopyPlan(kv, pack_slots([7, 2]), host, pack_slots([1, 5])).work()), True
    plan = CopyPlan(host, pack_slots([1, 5, 3]), kv, pack_slots([9, 4, 8]))
    for layer in plan.layers:
        yield device.stream("load").submit(plan.work(range(layer, layer + 1))), True
    device.stream("write_back").wait_event(device.stream("load").record())
    yield device.stream("write_back").record(), False


def life(stub: Stub, engine: Engine) -> tuple[list[BaseException], bool]:
    """Open, copy, close -> what went wrong, and whether everything must have been given back.  However it ends, nothing hangs."""
    errors: list[BaseException] = []
    kv, host = sides(stub)
    try:
        device = opened(stub, engine, watch_s=0.05)
    except (TransferError, ConfigError) as error:
        return [error], True
    try:
        attach(device, stub, kv, host)
    except TransferError as error:
        errors.append(error)
    else:
        for ticket, _ in copies(device, kv, host):
            assert ticket.wait(WAIT_S), "a ticket that never ends"
            if ticket.error is not None:
                errors.append(ticket.error)
    return errors, device.close(WAIT_S) and device.lost is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("result", [2, 719], ids=["refused", "fatal"])
def test_every_call_may_fail(stub: Stub, engine: Engine, result: int) -> None:
    assert life(stub, engine) == ([], True)
    assert stub.live() == {}
    expected = {name: stub.calls(name) for name in CALLS}
    for name in CALLS:
        for nth in sorted({1, 2, expected[name]} & set(range(1, expected[name] + 1))):
            stub.reset()
            stub.fail(name, result, nth)
            errors, whole = life(stub, engine)
            shown = f"{name} number {nth}: {errors}"
            assert all(isinstance(error, TransferError | ConfigError) for error in errors), shown
            assert stub.contexts() == 0, shown
            if whole and result == 2 and name not in ENDINGS:
                assert stub.live() == {}, shown
            if errors:
                assert "CUDA_ERROR" in str(errors[0]), shown


@pytest.mark.parametrize("engine", ["direct", "staged"])
@pytest.mark.parametrize("version", [13000, 12080, 12040])
def test_batches_by_the_signature_of_the_driver(stub: Stub, version: int, engine: Engine) -> None:
    stub.reset(version)
    kv, host = sides(stub)
    device = opened(stub, engine)
    attach(device, stub, kv, host)
    plan = CopyPlan(kv, pack_slots([7, 2]), host, pack_slots([1, 5]))
    assert device.stream("write_back").submit(plan.work()).wait(WAIT_S)
    facts = device.raw.facts()
    assert facts.batch_version == (version if version >= 12080 else 0)
    assert (facts.batch_calls > 0) == (version >= 12080)
    assert (facts.single_calls > 0) == (version < 12080)
    assert as_bytes(host.layer(2)[1][5]) == as_bytes(kv.layer(2)[1][2])
    assert device.close(WAIT_S)


def test_a_batch_that_is_refused_is_copied_one_by_one_from_then_on(stub: Stub) -> None:
    kv, host = sides(stub)
    device = opened(stub, "direct")
    attach(device, stub, kv, host)
    stub.fail("cuMemcpyBatchAsync", 1)
    plan = CopyPlan(kv, pack_slots([7, 2]), host, pack_slots([1, 5]))
    for _ in range(2):
        ticket = device.stream("write_back").submit(plan.work())
        assert ticket.wait(WAIT_S)
        assert ticket.error is None
    assert stub.calls("cuMemcpyBatchAsync") == 1
    assert device.raw.facts().batch_version == 0
    assert as_bytes(host.layer(0)[0][1]) == as_bytes(kv.layer(0)[0][7])
    assert device.close(WAIT_S)


@pytest.mark.parametrize("name", ["cuLaunchHostFunc", "cuGetProcAddress_v2", "cuMemHostRegister_v2"])
def test_a_driver_without_an_entry_point_is_refused_by_name(stub_folder: Path, name: str) -> None:
    with pytest.raises(TransferError, match=f"has no {name}: the driver is too old"):
        RawCuda(0, str(build(stub_folder, without=[name])))


def test_no_driver_and_no_such_gpu(stub: Stub) -> None:
    with pytest.raises(TransferError, match="no CUDA driver"):
        RawCuda(0, "/nowhere/libcuda.so.1")
    with pytest.raises(TransferError, match=r"cuDeviceGet: CUDA_ERROR_INVALID_DEVICE \(101\)"):
        RawCuda(7, stub.path)


def test_no_kernel_leaves_the_copy_engines(stub: Stub) -> None:
    def none(major: int, minor: int) -> tuple[bytes, str]:
        raise TransferError("no machine code here")

    kv, host = sides(stub)
    device = NativeCudaDevice(path=stub.path, kernel=none)
    assert "none: no machine code here" in str(device.snapshot()["implementation"])
    attach(device, stub, kv, host)
    for ticket, _ in copies(device, kv, host):
        assert ticket.wait(WAIT_S)
        assert ticket.error is None
    assert stub.calls("cuLaunchKernel") == 0
    assert device.close(WAIT_S)
    assert stub.live() == {}


def test_what_cannot_be_staged_is_refused(stub: Stub) -> None:
    kv, host = sides(stub)
    device = opened(stub, "staged")
    attach(device, stub, kv, host)
    part = device.stream("write_back").submit(CopyPlan(kv, pack_slots([7]), host, pack_slots([1])).work(range(1)))
    assert part.wait(WAIT_S)
    assert isinstance(part.error, UsageError)
    assert "whole pages" in str(part.error)
    assert device.lost is None
    assert device.close(WAIT_S)


def test_no_copy_crosses_the_border_of_two_registrations(stub: Stub) -> None:
    kv = engine_tensors("contiguous")
    host = host_memory(kv, "layer_first", header_bytes=0)
    device = opened(stub, "direct")
    stub.device_memory(kv)
    address, nbytes = host.extent()
    for start in range(0, nbytes, 4096):
        device.raw.register(address + start, min(4096, nbytes - start))
    plan = CopyPlan(kv, pack_slots(range(9)), host, pack_slots(range(9)))
    ticket = device.stream("write_back").submit(plan.work())
    assert ticket.wait(WAIT_S)
    assert ticket.error is None
    assert device.raw.facts().batch_version == 13000  # the stub refuses a batch with a copy that crosses
    for layer in plan.layers:
        for there, here in zip(host.layer(layer), kv.layer(layer), strict=True):
            assert as_bytes(there) == as_bytes(here[:9])
    for start in range(0, nbytes, 4096):
        device.raw.unregister(address + start)
    assert device.close(WAIT_S)


def test_host_memory_with_other_addresses_on_the_gpu_leaves_the_copy_engines(stub: Stub) -> None:
    kv, host = sides(stub)
    device = opened(stub, "kernel")
    stub.shift(True)
    attach(device, stub, kv, host)
    load = CopyPlan(host, pack_slots([1]), kv, pack_slots([7])).work()
    ticket = device.stream("load").submit(load)
    assert ticket.wait(WAIT_S)
    assert "only the engine direct works" in str(ticket.error)
    device.engines = Engines(load="direct")
    ticket = device.stream("load").submit(load)
    assert ticket.wait(WAIT_S)
    assert ticket.error is None
    assert device.close(WAIT_S)


def test_capture_by_another_thread_is_not_disturbed(stub: Stub) -> None:
    kv, host = sides(stub)
    device = opened(stub, "staged")
    attach(device, stub, kv, host)
    stub.capture_elsewhere(True)  # in global mode: cuEventQuery and cuMemAlloc would break it
    ticket = device.stream("write_back").submit(CopyPlan(kv, pack_slots([7]), host, pack_slots([1])).work())
    assert ticket.wait(WAIT_S)
    assert ticket.error is None
    assert device.close(WAIT_S)


def test_lost_host_functions_are_made_up_for(stub: Stub) -> None:
    device = opened(stub)
    stub.lose_host_functions()
    tickets = [device.stream("load").record() for _ in range(5)]
    assert all(ticket.wait(WAIT_S) and ticket.error is None for ticket in tickets)
    assert device.close(WAIT_S)


async def test_the_watchdog_finds_a_dead_context(stub: Stub) -> None:
    kv, host = sides(stub)
    device = opened(stub, watch_s=0.05)
    attach(device, stub, kv, host)
    engine = stub.stream()
    engine.gate(shut=True)
    engine.fill(kv.layer(0)[0], 1)
    stream = device.stream("write_back")
    stream.wait_event(engine.event())
    tickets = [stream.submit(CopyPlan(kv, pack_slots([7]), host, pack_slots([1])).work()), stream.record()]
    device.listen()
    stub.kill(700)  # no call is under way, no host function will ever come
    errors = [await fired(ticket) for ticket in tickets]
    for error in errors:
        assert isinstance(error, TransferError)
        assert "CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered" in str(error)
    assert device.lost is not None
    later = device.stream("load").record()
    assert await fired(later) is device.lost
    assert not device.close(WAIT_S)


def test_an_illegal_access_of_the_kernel_loses_the_device(stub: Stub) -> None:
    kv, host = sides(stub)
    device = opened(stub, "kernel", watch_s=0.05)
    stub.device_memory(kv)  # the host memory has not been registered
    ticket = device.stream("load").submit(CopyPlan(host, pack_slots([1]), kv, pack_slots([7])).work())
    assert ticket.wait(WAIT_S)
    assert "ILLEGAL_ADDRESS" in str(ticket.error)
    assert isinstance(device.lost, LostError)
    assert not device.close(WAIT_S)


def test_many_pages_take_several_launches(stub: Stub) -> None:
    from hicache_actors.memory.layout import SlotLayout
    from hicache_actors.memory.shapes import KVShape

    shape = KVShape(1, 1, 1, 16, "uint8", 1)
    kv = KVTensors.make(shape, 4000)
    kv.layer(0)[0].copy_((kv.layer(0)[0].new_tensor(range(256)).repeat(250)).view(4000, 1, 1, 16))
    host = HostMemory(SlotLayout(shape, header_bytes=0), 4000)
    device = opened(stub)
    attach(device, stub, kv, host)
    slots = pack_slots(range(4000))
    from hicache_actors.cuda_ext.native.copies import plans

    stream = device.raw.stream(urgent=False)
    copy = CopyPlan(kv, slots, host, slots).work().affine()
    mark = stream.submit(plans(copy), How("kernel", True, "poll"), None)
    while not mark.query():
        pass
    mark.free()
    assert stub.calls("cuLaunchKernel") == 2
    assert as_bytes(host.layer(0)[0]) == as_bytes(kv.layer(0)[0])
    assert stream.close()
    assert device.close(WAIT_S)


def test_calls_are_as_cuda_h_declares_them(tmp_path: Path) -> None:
    """Number, kind and size of all parameters, and every constant, where the toolkit's headers are."""
    compiler = shutil.which("g++")
    assert compiler is not None
    nvcc = shutil.which("nvcc")
    folders = [Path(nvcc).resolve().parents[1] / "include"] if nvcc else []
    folders += sorted(Path("/usr/local").glob("cuda*/include"))
    include = next((folder for folder in folders if (folder / "cuda.h").exists()), None)
    if include is None:
        pytest.skip("no cuda.h here to compare with")
    source = Path(__file__).parent / "stub" / "signatures.cpp"
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{NATIVE}", f"-I{include}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
