"""Devices: streams that copy KV pages between tensors and host memory.

The protocol needs no torch; a device is imported when it is opened.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hicache_actors.cuda_ext.controls import ControlledDevice, Gate
    from hicache_actors.cuda_ext.device import Device, Event, Stream, Ticket, Work
    from hicache_actors.cuda_ext.native_cpu import NativeCpuDevice
    from hicache_actors.cuda_ext.native_cuda import NativeCudaDevice
    from hicache_actors.cuda_ext.torch_cpu import TorchCpuDevice
    from hicache_actors.cuda_ext.torch_cuda import TorchCudaDevice

__all__ = [
    "ControlledDevice",
    "Device",
    "Event",
    "Gate",
    "NativeCpuDevice",
    "NativeCudaDevice",
    "Stream",
    "Ticket",
    "TorchCpuDevice",
    "TorchCudaDevice",
    "Work",
    "open_cpu_device",
    "open_cuda_device",
    "open_device",
]

_HOMES: Final = {
    "ControlledDevice": "controls",
    "Gate": "controls",
    "Device": "device",
    "Event": "device",
    "Stream": "device",
    "Ticket": "device",
    "Work": "device",
    "NativeCpuDevice": "native_cpu",
    "NativeCudaDevice": "native_cuda",
    "TorchCpuDevice": "torch_cpu",
    "TorchCudaDevice": "torch_cuda",
}


def open_device(name: str = "cpu") -> Device:
    """A device by the name that torch gives it.  Raises `ConfigError` for one that this build cannot drive."""
    from hicache_actors.errors import ConfigError

    if name == "cpu":
        return open_cpu_device()
    kind, _, index = name.partition(":")
    if kind == "cuda" and (index.isdigit() or not index):
        return open_cuda_device(int(index or 0))
    raise ConfigError("device", name, "unknown device", allowed=["cpu", "cuda:0"])


def open_cpu_device() -> ControlledDevice[Any]:
    """The native one where there is a native library; its `implementation` says which it is, and why."""
    from hicache_actors.cuda_ext.native.library import library, why_not

    if library() is not None:
        from hicache_actors.cuda_ext.native_cpu import NativeCpuDevice

        return NativeCpuDevice()
    from hicache_actors.cuda_ext.torch_cpu import TorchCpuDevice

    return TorchCpuDevice(why=f"the native library is not in use: {why_not()}")


def open_cuda_device(index: int) -> ControlledDevice[Any]:
    """The native one where there are a native library and a driver, else that of torch; its `implementation` says why.

    Raises `ConfigError` where torch sees no such GPU.
    """
    import torch

    from hicache_actors.cuda_ext.native.library import library, why_not
    from hicache_actors.errors import ConfigError, TransferError

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= found:
        seen = f"torch {torch.__version__} sees {found} CUDA devices"
        allowed = ["cpu", *(f"cuda:{each}" for each in range(found))]
        raise ConfigError("device", f"cuda:{index}", seen, allowed=allowed, fix="keep the KV tensors on one of these")
    why = f"the native library is not in use: {why_not()}"
    if library() is not None:
        from hicache_actors.cuda_ext.native_cuda import NativeCudaDevice

        try:
            return NativeCudaDevice(index)
        except TransferError as error:
            why = str(error)
    from hicache_actors.cuda_ext.torch_cuda import TorchCudaDevice

    return TorchCudaDevice(index, why)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
