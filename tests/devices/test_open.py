from __future__ import annotations

import subprocess
import sys

import pytest

from hicache_actors import cuda_ext
from hicache_actors.cuda_ext import TorchCpuDevice, open_device
from hicache_actors.errors import ConfigError


def test_the_cpu_device_opens_by_name() -> None:
    device = open_device("cpu")
    assert isinstance(device, TorchCpuDevice)
    assert (device.name, device.kind) == ("cpu", "cpu")
    assert device.close(0.0)


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "tpu", ""])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_device(name)
    assert caught.value.field == "device"
    assert caught.value.value == name
    assert "'cpu'" in caught.value.allowed


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
