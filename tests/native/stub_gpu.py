"""What stands for torch.cuda in the dry run of gpu_check: CPU tensors, and the stub of the driver."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hicache_actors.cuda_ext.native.driver import LIBCUDA, Notice
from hicache_actors.cuda_ext.native_cuda import NativeCudaDevice
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.shapes import KVShape

from .gpu_stub import IMAGE, EngineEvent, EngineStream, Stub


class StubGpu:
    quick = True

    def __init__(self, index: int) -> None:
        self.index = index
        self.stub = Stub(Path(os.environ[LIBCUDA]))
        self.stub.everywhere()

    def device(self, notice: Notice = "host_function") -> NativeCudaDevice:
        return NativeCudaDevice(self.index, notice=notice, kernel=lambda major, minor: IMAGE)

    def kv(self, shape: KVShape, pages: int) -> KVTensors:
        return KVTensors.make(shape, pages)

    def stream(self) -> StubStream:
        return StubStream(self.stub.stream())

    def compute(self, seconds: float) -> int | None:
        return None

    def pin_s(self, nbytes: int) -> float | None:
        return None

    def facts(self) -> dict[str, Any]:
        return {"stub": True}


class StubStream:
    def __init__(self, stream: EngineStream) -> None:
        self._stream = stream
        self.cuda_stream = stream.cuda_stream

    def hold(self) -> None:
        self._stream.gate(shut=True)

    def let_go(self) -> None:
        self._stream.gate(shut=False)

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        self._stream.fill(tensor, value)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._stream.copy(target, source)

    def event(self) -> EngineEvent:
        return self._stream.event()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self._stream.capture(on=True)
        try:
            yield
        finally:
            self._stream.capture(on=False)

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        return run  # the stub knows no graphs: what is captured is done each time

    def synchronize(self) -> None:
        self._stream.synchronize()
