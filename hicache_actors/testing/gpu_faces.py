"""What the steps of `gpu_check` work on: a GPU and its engine's streams; torch.cuda here, a stub of the driver in tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

import torch

from hicache_actors.cuda_ext.native.driver import Notice
from hicache_actors.cuda_ext.native_cuda import NativeCudaDevice
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.shapes import KVShape

WAIT_S: Final = 30.0


class EngineStream(Protocol):
    """A stream of the engine, and kernels of its own."""

    def hold(self) -> None:
        """What is submitted later runs after a while, or after `let_go`."""

    def let_go(self) -> None: ...
    def fill(self, tensor: torch.Tensor, value: int) -> None: ...
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...
    def event(self) -> Any: ...
    def capturing(self) -> Any:
        """A context in which the stream is being captured in a graph."""

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """A graph of what ``run`` submits to this stream -> what replays it."""

    def synchronize(self) -> None: ...

    @property
    def cuda_stream(self) -> int: ...


class Gpu(Protocol):
    quick: bool
    """Small sizes: the numbers mean nothing."""

    def device(self, notice: Notice = "host_function") -> NativeCudaDevice: ...
    def kv(self, shape: KVShape, pages: int) -> KVTensors: ...
    def stream(self) -> EngineStream: ...
    def compute(self, seconds: float) -> int | None:
        """Matrix products for so long -> how many; None where nothing computes."""

    def pin_s(self, nbytes: int) -> float | None:
        """Seconds that torch takes for pinned memory; None where it cannot."""

    def facts(self) -> dict[str, Any]: ...


class TorchGpu:
    """The real one."""

    quick = False

    def __init__(self, index: int) -> None:
        self.index = index
        torch.cuda.set_device(index)

    def device(self, notice: Notice = "host_function") -> NativeCudaDevice:
        return NativeCudaDevice(self.index, notice=notice)

    def kv(self, shape: KVShape, pages: int) -> KVTensors:
        return KVTensors.make(shape, pages, device=f"cuda:{self.index}")

    def stream(self) -> TorchStream:
        return TorchStream()

    def compute(self, seconds: float) -> int | None:
        if not hasattr(self, "_factors"):
            self._factors = [torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        end_s, count = time.monotonic() + seconds, 0
        while time.monotonic() < end_s:
            for _ in range(8):
                torch.mm(*self._factors)
                count += 1
            torch.cuda.current_stream().synchronize()
        return count

    def pin_s(self, nbytes: int) -> float | None:
        start_s = time.perf_counter()
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return time.perf_counter() - start_s

    def facts(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.index)
        return {"torch": torch.__version__, "memory_bytes": properties.total_memory, "torch_cuda": torch.version.cuda}


class TorchStream:
    def __init__(self) -> None:
        self._cuda: Any = torch.cuda  # parts of it have no types
        self._stream = self._cuda.Stream()
        self.cuda_stream = int(self._stream.cuda_stream)

    def hold(self) -> None:
        with torch.cuda.stream(self._stream):
            self._cuda._sleep(400_000_000)  # cycles: some 0.2 s

    def let_go(self) -> None:
        """It goes on by itself."""

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        with torch.cuda.stream(self._stream):
            tensor.fill_(value)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source)

    def event(self) -> Any:
        event = self._cuda.Event()
        event.record(self._stream)
        return event

    def capturing(self) -> Any:
        return torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local")

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            run()

        def replay() -> None:
            with torch.cuda.stream(self._stream):
                graph.replay()

        return replay

    def synchronize(self) -> None:
        self._stream.synchronize()


class attached:
    """A device that knows the host memory, closed at the end."""

    def __init__(self, gpu: Gpu, host: HostMemory, notice: Notice = "host_function") -> None:
        self._device = gpu.device(notice)
        self._device.register(*host.extent(), step_bytes=host.layout.slot_bytes)

    def __enter__(self) -> NativeCudaDevice:
        return self._device

    def __exit__(self, *exc: object) -> Literal[False]:
        self._device.close(WAIT_S)
        return False


def on_loop(name: str, main: Callable[[], Any]) -> Any:
    """What the coroutine of ``main`` returns, on "asyncio" or "uvloop"."""
    if name == "asyncio":
        return asyncio.run(main())
    try:
        import uvloop
    except ImportError:
        return "uvloop is not installed"
    return uvloop.run(main())
