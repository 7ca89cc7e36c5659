from __future__ import annotations

import pytest

from hicache_actors.cuda_ext import TorchCpuDevice
from hicache_actors.testing.device_contract import DeviceContract
from hicache_actors.testing.sim_device import SimDevice


@pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)
class TestTorchCpuDevice(DeviceContract):
    def make_device(self) -> TorchCpuDevice:
        return TorchCpuDevice()


@pytest.mark.parametrize("anyio_backend", ["virtual:0", "virtual:1", "virtual:2"], indirect=True)
class TestSimDevice(DeviceContract):
    def make_device(self) -> SimDevice:
        return SimDevice()
