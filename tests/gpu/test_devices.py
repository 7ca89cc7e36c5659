"""The contract of devices on GPUs, and the steps of gpu_check that know right from wrong."""

from __future__ import annotations

import pytest

from hicache_actors.cuda_ext import NativeCudaDevice, TorchCudaDevice, open_device
from hicache_actors.cuda_ext.native.library import library, why_not
from hicache_actors.testing.device_contract import DeviceContract
from hicache_actors.testing.gpu_faces import TorchGpu
from hicache_actors.testing.gpu_steps import correctness, end_to_end, gil, hazards

pytestmark = pytest.mark.gpu(1)

NATIVE = pytest.mark.skipif(library() is None, reason=f"the native library is not in use: {why_not()}")


@NATIVE
class TestNativeCudaDevice(DeviceContract):
    place = "cuda:0"

    def make_device(self) -> NativeCudaDevice:
        return NativeCudaDevice(0)


class TestTorchCudaDevice(DeviceContract):
    place = "cuda:0"

    def make_device(self) -> TorchCudaDevice:
        return TorchCudaDevice(0)


@NATIVE
def test_the_native_device_is_the_one_that_opens() -> None:
    device = open_device("cuda:0")
    assert isinstance(device, NativeCudaDevice), device
    assert device.has_kernel, device.kernel
    assert device.close(10.0)


@NATIVE
@pytest.mark.parametrize("step", [correctness, hazards, gil, end_to_end])
def test_right_bytes_on_the_gpu(step) -> None:  # type: ignore[no-untyped-def]
    assert "problem" not in step(TorchGpu(0))
