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
    from hicache_actors.cuda_ext.torch_cpu import TorchCpuDevice

__all__ = [
    "ControlledDevice",
    "Device",
    "Event",
    "Gate",
    "NativeCpuDevice",
    "Stream",
    "Ticket",
    "TorchCpuDevice",
    "Work",
    "open_cpu_device",
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
    "TorchCpuDevice": "torch_cpu",
}


def open_device(name: str = "cpu") -> Device:
    """A device by the name that torch gives it.  Raises `ConfigError` for one that this build cannot drive."""
    from hicache_actors.errors import ConfigError

    if name == "cpu":
        return open_cpu_device()
    if name.partition(":")[0] == "cuda":
        raise ConfigError(
            "device", name, "this build drives no CUDA device", allowed=["cpu"], fix="keep the KV tensors on the CPU"
        )
    raise ConfigError("device", name, "unknown device", allowed=["cpu"])


def open_cpu_device() -> ControlledDevice[Any]:
    """The native one where there is a native library; its `implementation` says which it is, and why."""
    from hicache_actors.cuda_ext.native.library import library, why_not

    if library() is not None:
        from hicache_actors.cuda_ext.native_cpu import NativeCpuDevice

        return NativeCpuDevice()
    from hicache_actors.cuda_ext.torch_cpu import TorchCpuDevice

    return TorchCpuDevice(why=f"the native library is not in use: {why_not()}")


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
