"""The copy engines of a configuration: pages come back bit for bit by each, and pairs that do not work are refused at start."""

from __future__ import annotations

import pytest

from hicache_actors import Config, DeviceConfig, HiCache, HostConfig, KVShape, KVTensors, Prompt, Shortfall
from hicache_actors.config import HostLayout, LoadEngine, WriteBackEngine
from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext.native.library import library, why_not
from hicache_actors.cuda_ext.native_cpu import NativeCpuDevice
from hicache_actors.cuda_ext.torch_cpu import TorchCpuDevice
from hicache_actors.errors import ConfigError
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.testing.kv_samples import as_bytes, fill
from hicache_actors.transfer.engines import Engines
from hicache_actors.transfer.plan import CopyPlan

SHAPE = KVShape(layers=3, kv=2, heads=2, head_dim=128, dtype="bfloat16", page_size=4)
PAGES = 6
WAIT_S = 30.0


def config(layout: HostLayout, load: LoadEngine, write_back: WriteBackEngine) -> Config:
    return Config(
        page_size=SHAPE.page_size,
        device=DeviceConfig(load_engine=load, write_back_engine=write_back),
        host=HostConfig(pages=16, layout=layout),
    )


@pytest.mark.parametrize(
    ("layout", "load", "write_back"),
    [
        ("page_first_direct", "direct", "direct"),
        ("page_first_direct", "kernel", "staged"),
        ("page_first", "kernel", "staged"),
        ("page_head", "auto", "staged"),
        ("layer_first", "direct", "kernel"),
    ],
)
async def test_pages_come_back_bit_for_bit(layout: HostLayout, load: LoadEngine, write_back: WriteBackEngine) -> None:
    if library() is None:
        pytest.skip(f"the native library is not in use: {why_not()}")
    device = NativeCpuDevice()
    async with HiCache.open(config(layout, load, write_back), KVTensors.make(SHAPE, PAGES + 1), device=device) as cache:
        assert device.engines == Engines(load, write_back)
        seen = cache.snapshot().device
        assert seen.load_engine.startswith(
            "kernel (auto: runs of " if load == "auto" else f"{load} (device.load_engine"
        )
        assert seen.write_back_engine == f"{write_back} (device.write_back_engine)"
        wanted = await compute(cache, 1)
        await cache.drain(WAIT_S)
        await compute(cache, 2)  # nothing else is left on the device
        await cache.drain(WAIT_S)
        async with cache.acquire(asked(1)) as lease:
            assert lease.usable_tokens == PAGES * SHAPE.page_size
            assert lease.loading is not None
            assert (await lease.loading.verdict()).failed is None
            assert bits(cache, list(lease.pages)[:PAGES]) == wanted


def asked(family: int) -> Prompt:
    return Prompt([1000 * family + at for at in range(PAGES * SHAPE.page_size + 1)])


async def compute(cache: HiCache, family: int) -> list[bytes]:
    """Fill the pages of a prompt with random bits -> those of each page."""
    async with cache.acquire(asked(family)) as lease:
        assert not isinstance(lease.allocate(len(asked(family)) - lease.usable_tokens), Shortfall)
        for page in lease.pages:
            for layer in range(SHAPE.layers):
                for kind, tensor in enumerate(cache.kv.layer(layer)):
                    fill(tensor[page], seed=((family * 100 + page) * 10 + layer) * 2 + kind)
        lease.commit(len(asked(family)))
        return bits(cache, list(lease.pages)[:PAGES])


def bits(cache: HiCache, pages: list[int]) -> list[bytes]:
    layers = range(SHAPE.layers)
    return [b"".join(as_bytes(tensor[page]) for layer in layers for tensor in cache.kv.layer(layer)) for page in pages]


async def test_a_pair_that_does_not_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'page_head'.*descriptors of 256 bytes") as caught:
        async with HiCache.open(config("page_head", "direct", "auto"), KVTensors.make(SHAPE, PAGES)):
            pass
    assert caught.value.field == "device.load_engine"
    assert caught.value.allowed == "'auto', 'kernel'"


async def test_a_device_that_copies_in_one_way_says_so_and_refuses_engines() -> None:
    kv = KVTensors.make(SHAPE, PAGES)
    async with HiCache.open(config("page_first", "auto", "auto"), kv, device=TorchCpuDevice()) as cache:
        seen = cache.snapshot().device
        assert seen.load_engine == seen.write_back_engine == "its own (this device copies in one way)"
    with pytest.raises(ConfigError, match="copies in one way"):
        async with HiCache.open(
            config("page_first", "auto", "staged"), KVTensors.make(SHAPE, PAGES), device=TorchCpuDevice()
        ):
            pass


def test_the_native_device_does_what_it_was_told() -> None:
    """A layer alone is no whole page, so it cannot be staged: the library says so."""
    if library() is None:
        pytest.skip(f"the native library is not in use: {why_not()}")
    device = NativeCpuDevice()
    device.engines = Engines(write_back="staged")
    kv, host = KVTensors.make(SHAPE, 4), HostMemory(SlotLayout(SHAPE, "page_first"), 4)
    plan = CopyPlan(kv, pack_slots([3, 1]), host, pack_slots([0, 2]))
    whole, part = device.stream("copy").submit(plan.work()), device.stream("copy").submit(plan.work(range(1)))
    assert whole.wait(WAIT_S)
    assert part.wait(WAIT_S)
    assert whole.error is None
    assert "whole pages" in str(part.error)
    assert device.close(WAIT_S)
