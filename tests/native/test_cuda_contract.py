"""The contract of devices on the native CUDA device, over a stub of the driver: unchanged code, down to the driver's calls."""

from __future__ import annotations

import pytest

from hicache_actors.cuda_ext.native_cuda import NativeCudaDevice
from hicache_actors.testing.device_contract import DeviceContract

from .gpu_stub import IMAGE, Stub

pytestmark = pytest.mark.native


class TestNativeCudaDevice(DeviceContract):
    @pytest.fixture(autouse=True)
    def driver(self, stub: Stub) -> None:
        stub.everywhere()
        self.stub = stub

    def make_device(self) -> NativeCudaDevice:
        return NativeCudaDevice(path=self.stub.path, kernel=lambda major, minor: IMAGE)
