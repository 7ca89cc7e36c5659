from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from hicache_actors.cuda_ext import NativeCpuDevice, TorchCpuDevice
from hicache_actors.cuda_ext.loop_ring import LoopRing
from hicache_actors.cuda_ext.native.library import library, why_not
from hicache_actors.testing.device_contract import DeviceContract
from hicache_actors.testing.sim_device import SimDevice

needs_library = pytest.mark.skipif(library() is None, reason=f"the native library is not in use: {why_not()}")


@pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)
class TestTorchCpuDevice(DeviceContract):
    def make_device(self) -> TorchCpuDevice:
        return TorchCpuDevice()


@needs_library
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
class TestNativeCpuDevice(DeviceContract):
    """Coroutines are woken by the device's own thread of Python."""

    def make_device(self) -> NativeCpuDevice:
        return NativeCpuDevice()


@needs_library
@pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)
class TestNativeCpuDeviceOnARing(DeviceContract):
    """Coroutines are woken by the ring of their loop."""

    def make_device(self) -> NativeCpuDevice:
        return NativeCpuDevice()

    @pytest.fixture(autouse=True)
    async def ring(self) -> AsyncIterator[None]:
        ring = LoopRing.open()
        yield
        await ring.close(0.0)
        assert ring.counts().refused == 0


@pytest.mark.parametrize("anyio_backend", ["virtual:0", "virtual:1", "virtual:2"], indirect=True)
class TestSimDevice(DeviceContract):
    def make_device(self) -> SimDevice:
        return SimDevice()
