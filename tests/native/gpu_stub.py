"""The stub of libcuda: built once a session, and driven by tests through its own functions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hicache_actors.cuda_ext import native
from hicache_actors.cuda_ext.native_cuda import NativeCudaDevice
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors

NATIVE = Path(native.__file__).parent
SOURCE = Path(__file__).parent / "stub" / "cuda_stub.cpp"
IMAGE = (b"machine code", "a test")


def build(folder: Path, *, without: Sequence[str] = ()) -> Path:
    """``without``: entry points that this driver is too old to have."""
    compiler = shutil.which("g++")
    assert compiler is not None, "the stub needs g++"
    made, path = folder / "stub.o", folder / f"libcuda_stub{len(list(folder.iterdir()))}.so"
    if not made.exists():
        flags = ["-O1", "-g", "-std=c++17", "-fPIC", "-pthread", f"-I{NATIVE}"]
        subprocess.run([compiler, *flags, "-c", SOURCE, "-o", made], check=True)
    script = folder / "visible"
    script.write_text("{ local: " + "".join(f"{name}; " for name in without) + "};" if without else "{};")
    subprocess.run([compiler, "-shared", "-pthread", f"-Wl,--version-script={script}", made, "-o", path], check=True)
    return path


class Stub:
    """The functions of one stub library."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.stub_calls.restype = self._library.stub_live.restype = ctypes.c_int64

    def reset(self, driver_version: int = 13000) -> None:
        self._library.stub_reset(driver_version)

    def fail(self, call: str, result: int, nth: int = 1) -> None:
        self._library.stub_fail(call.encode(), nth, result)

    def kill(self, result: int = 700) -> None:
        self._library.stub_kill(result)

    def calls(self, name: str) -> int:
        return int(self._library.stub_calls(name.encode()))

    def live(self) -> dict[str, int]:
        kinds = ("stream", "event", "module", "memory", "registration", "context")
        return {kind: count for kind in kinds if (count := int(self._library.stub_live(kind.encode())))}

    def shift(self, on: bool) -> None:
        self._library.stub_shift(4096 if on else 0)

    def lose_host_functions(self) -> None:
        self._library.stub_lose_host_functions(1)

    def capture_elsewhere(self, on: bool) -> None:
        self._library.stub_capture_elsewhere(int(on))

    def contexts(self) -> int:
        """Current contexts of this thread."""
        return int(self._library.stub_contexts())

    def device_memory(self, kv: KVTensors) -> None:
        """From now on the tensors lie on the GPU."""
        for layer in range(kv.shape.layers):
            for tensor in kv.layer(layer):
                storage = tensor.untyped_storage()
                self._library.stub_device_memory(ctypes.c_uint64(storage.data_ptr()), ctypes.c_uint64(storage.nbytes()))

    def everywhere(self) -> None:
        """All memory is the GPU's."""
        self._library.stub_everywhere()

    def stream(self) -> EngineStream:
        return EngineStream(self._library)


class EngineStream:
    """A stream of the engine, with handles as torch has them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        handle, none = ctypes.c_void_p(), ctypes.c_void_p()
        library.cuDevicePrimaryCtxRetain(ctypes.byref(none), 0)
        library.cuCtxPushCurrent_v2(none)
        assert library.cuStreamCreateWithPriority(ctypes.byref(handle), 1, 0) == 0
        library.cuCtxPopCurrent_v2(ctypes.byref(none))
        library.cuDevicePrimaryCtxRelease_v2(0)
        self._handle = handle
        assert handle.value is not None
        self.cuda_stream = handle.value

    def gate(self, *, shut: bool) -> None:
        self._library.stub_gate(self._handle, int(shut))

    def capture(self, *, on: bool) -> None:
        self._library.stub_capture(self._handle, int(on))

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        """A kernel that writes one page."""
        assert tensor.is_contiguous()
        self._library.stub_fill(self._handle, ctypes.c_uint64(tensor.data_ptr()), value, ctypes.c_uint64(tensor.nbytes))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A kernel that reads one page."""
        assert source.is_contiguous()
        self._library.stub_copy(
            self._handle,
            ctypes.c_uint64(target.data_ptr()),
            ctypes.c_uint64(source.data_ptr()),
            ctypes.c_uint64(source.nbytes),
        )

    def event(self) -> EngineEvent:
        return EngineEvent(self._library, self._handle)

    def synchronize(self) -> None:
        self._library.stub_synchronize(self._handle)


class EngineEvent:
    """torch.cuda.Event, as far as it matters: recorded on a stream."""

    def __init__(self, library: ctypes.CDLL, stream: ctypes.c_void_p) -> None:
        self._library, self._handle = library, ctypes.c_void_p()
        with _Context(library):
            assert library.cuEventCreate(ctypes.byref(self._handle), 2) == 0
            assert library.cuEventRecord(self._handle, stream) == 0
        assert self._handle.value is not None
        self.cuda_event = self._handle.value

    def query(self) -> bool:
        with _Context(self._library):
            result = self._library.cuEventQuery(self._handle)
        assert result in (0, 600), result
        return int(result) == 0


class _Context:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __enter__(self) -> None:
        self._library.cuCtxPushCurrent_v2(ctypes.c_void_p(1))

    def __exit__(self, *exc: object) -> None:
        self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libcuda")


@pytest.fixture(scope="session")
def stub_library(stub_folder: Path) -> Stub:
    return Stub(build(stub_folder))


@pytest.fixture
def stub(stub_library: Stub) -> Stub:
    stub_library.reset()
    return stub_library


def attach(device: NativeCudaDevice, stub: Stub, kv: KVTensors, host: HostMemory) -> None:
    """Make both sides of copies known, as an open cache does."""
    stub.device_memory(kv)
    device.register(*host.extent(), step_bytes=host.layout.slot_bytes)
