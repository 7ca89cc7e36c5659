from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hicache_actors import cuda_ext
from hicache_actors.cuda_ext import NativeCpuDevice, TorchCpuDevice, TorchCudaDevice, open_device
from hicache_actors.cuda_ext.native.library import library
from hicache_actors.errors import ConfigError


def test_the_cpu_device_opens_by_name() -> None:
    device = open_device("cpu")
    assert isinstance(device, TorchCpuDevice if library() is None else NativeCpuDevice)
    assert (device.name, device.kind) == ("cpu", "cpu")
    assert device.close(0.0)


def test_without_the_native_library_python_copies_and_says_why() -> None:
    code = (
        "from hicache_actors.cuda_ext import open_cpu_device; device = open_cpu_device(); "
        "print(type(device).__name__, device.snapshot()['implementation'], device.listen())"
    )
    environment = {**os.environ, "HICACHE_NATIVE": "off"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "TorchCpuDevice threads of Python (the native library is not in use: HICACHE_NATIVE=off) None" in done.stdout


@pytest.mark.parametrize("name", ["cuda:0", "cuda:1", "cuda:x", "tpu", ""])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_device(name)
    assert caught.value.field == "device"
    assert caught.value.value == name
    assert "'cpu'" in caught.value.allowed


def test_without_a_driver_for_native_code_torch_drives_the_gpu_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("HICACHE_LIBCUDA", "/nowhere/libcuda.so.1")
    device = open_device("cuda:1")
    assert isinstance(device, TorchCudaDevice)
    assert (device.name, device.kind) == ("cuda:1", "cuda")
    shown = str(device.snapshot()["implementation"])
    assert "no CUDA driver: /nowhere/libcuda.so.1" in shown or "native library is not in use" in shown
    assert device.close(0.0)
    with pytest.raises(ConfigError, match="sees 2 CUDA devices"):
        open_device("cuda:2")


def test_exports_are_lazy_and_complete() -> None:
    code = (
        "import sys, hicache_actors.cuda_ext as ext; assert 'torch' not in sys.modules; "
        "import hicache_actors.cuda_ext.device, hicache_actors.memory.layout, hicache_actors.memory.budget; "
        "assert 'torch' not in sys.modules; ext.open_device().close(0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for name in cuda_ext.__all__:
        assert getattr(cuda_ext, name) is not None
    with pytest.raises(AttributeError, match="Nothing"):
        _ = cuda_ext.Nothing
