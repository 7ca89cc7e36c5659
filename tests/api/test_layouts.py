"""Every layout of the host: what comes back from host and storage is what was computed, bit for bit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from hicache_actors import Config, HiCache, HostConfig, KVShape, KVTensors, ModelFacts, Prompt, Shortfall, StorageConfig
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.config import HostLayout
from hicache_actors.cuda_ext.torch_cpu import TorchCpuDevice
from hicache_actors.errors import ConfigError, UsageError
from hicache_actors.memory.budget import host_memory_scope
from hicache_actors.pipelines.observer import BatchEnd, CommitEnd
from hicache_actors.testing.kv_samples import as_bytes, fill
from hicache_actors.testing.pools import pools_whole
from hicache_actors.testing.small import open_small, prompt

PAGE_TOKENS, DEVICE_PAGES, ASKED_PAGES = 4, 7, 6  # one more page for the token that is left to compute
SHAPES = {
    "mha": KVShape(layers=3, kv=2, heads=2, head_dim=4, dtype="bfloat16", page_size=PAGE_TOKENS),
    "one row": KVShape(layers=1, kv=2, heads=1, head_dim=1, dtype="uint8", page_size=PAGE_TOKENS),
    "mla": KVShape(layers=3, kv=1, heads=1, head_dim=9, dtype="float32", page_size=PAGE_TOKENS),
}
LAYOUTS: list[HostLayout] = ["page_first_direct", "page_first", "page_head", "layer_first"]
PAIRS = [(layout, name) for layout in LAYOUTS for name in SHAPES if (layout, name) != ("page_head", "mla")]


@asynccontextmanager
async def opened(shape: KVShape, layout: HostLayout, url: str) -> AsyncIterator[HiCache]:
    config = Config(
        page_size=PAGE_TOKENS,
        host=HostConfig(pages=24, layout=layout),
        model=ModelFacts(model_id="bits", weights="v1"),
        storage=StorageConfig(url=url, prefetch_threshold_tokens=PAGE_TOKENS, prefetch_policy="wait_complete"),
    )
    kv = KVTensors.make(shape, DEVICE_PAGES)
    async with HiCache.open(config, kv, device=TorchCpuDevice()) as cache:
        yield cache
        await pools_whole(cache)


def asked(family: int = 0) -> Prompt:
    return Prompt([1000 * family + at for at in range(ASKED_PAGES * PAGE_TOKENS + 1)])


async def compute(cache: HiCache, family: int) -> list[bytes]:
    """Fill the pages of a prompt with random bits -> those of each page."""
    async with cache.acquire(asked(family)) as lease:
        assert not isinstance(lease.allocate(len(asked()) - lease.usable_tokens), Shortfall)
        for number, page in enumerate(lease.pages):
            for layer in range(cache.kv.shape.layers):
                for kind, tensor in enumerate(cache.kv.layer(layer)):
                    fill(tensor[page], seed=((family * 100 + number) * 10 + layer) * 2 + kind)
        lease.commit(len(asked()))
        return bits(cache, list(lease.pages)[:ASKED_PAGES])


async def found(cache: HiCache, family: int) -> tuple[list[bytes], int, int]:
    """-> the bits of each page that the cache has, and how many tokens came from host and storage."""
    async with cache.acquire(asked(family)) as lease:
        assert lease.loading is None or (await lease.loading.verdict()).failed is None
        pages = list(lease.pages)[: lease.usable_tokens // PAGE_TOKENS]
        return bits(cache, pages), lease.account.host, lease.account.storage


def bits(cache: HiCache, pages: list[int]) -> list[bytes]:
    layers = range(cache.kv.shape.layers)
    return [b"".join(as_bytes(tensor[page]) for layer in layers for tensor in cache.kv.layer(layer)) for page in pages]


@pytest.mark.parametrize("store", ["memory", "file"])
@pytest.mark.parametrize(("layout", "name"), PAIRS)
async def test_every_bit_comes_back(layout: HostLayout, name: str, store: str, tmp_path: Path) -> None:
    url = f"memory://{layout}-{name.replace(' ', '-')}" if store == "memory" else f"file://{tmp_path}"
    async with opened(SHAPES[name], layout, url) as cache:
        wanted = await compute(cache, 1)
        await cache.drain(30.0)
        await compute(cache, 2)  # nothing else is left on the device
        await cache.drain(30.0)
        assert await found(cache, 1) == (wanted, ASKED_PAGES * PAGE_TOKENS, 0)
        await cache.drain(30.0)
        await cache.reset()
        assert await found(cache, 1) == (wanted, 0, ASKED_PAGES * PAGE_TOKENS)
    async with opened(SHAPES[name], layout, url) as cache:
        assert await found(cache, 1) == (wanted, 0, ASKED_PAGES * PAGE_TOKENS)


@pytest.mark.parametrize("name", ["mha", "mla"])
@pytest.mark.parametrize(
    ("writer", "reader"), [("layer_first", "page_first_direct"), ("page_first_direct", "layer_first")]
)
async def test_whole_pages_and_layers_share_what_they_store(writer: HostLayout, reader: HostLayout, name: str) -> None:
    url = f"memory://shared-{writer}-{name.replace(' ', '-')}"
    async with opened(SHAPES[name], writer, url) as cache:
        wanted = await compute(cache, 1)
        await cache.drain(30.0)
    async with opened(SHAPES[name], reader, url) as cache:
        assert await found(cache, 1) == (wanted, 0, ASKED_PAGES * PAGE_TOKENS)


@pytest.mark.parametrize(("writer", "reader"), [("page_first", "layer_first"), ("layer_first", "page_first")])
async def test_other_layouts_store_other_objects(writer: HostLayout, reader: HostLayout) -> None:
    url = f"memory://apart-{writer}"
    async with opened(SHAPES["mha"], writer, url) as cache:
        await compute(cache, 1)
        await cache.drain(30.0)
    async with opened(SHAPES["mha"], reader, url) as cache:
        assert await found(cache, 1) == ([], 0, 0)
        storage = cache.snapshot().storage
        assert storage is not None
        assert (storage.corrupt_pages, storage.foreign_pages) == (0, 0)


async def test_raw_objects_are_staged_as_well() -> None:
    """SGLang's names and no header: its page of layers is K or V, layer, token, head, as a staging slot holds it."""
    shape, store = SHAPES["mha"], MemoryBackend()
    config = Config(
        page_size=PAGE_TOKENS,
        host=HostConfig(pages=24, layout="layer_first", header_bytes=0),
        model=ModelFacts(model_id="bits", weights="v1"),
        storage=StorageConfig(keys="raw", verify="off", prefetch_threshold_tokens=PAGE_TOKENS),
    )
    kv = KVTensors.make(shape, DEVICE_PAGES)
    async with HiCache.open(config, kv, device=TorchCpuDevice(), backend=store) as cache:
        wanted = await compute(cache, 1)
        async with cache.acquire(asked(1)) as lease:
            page = lease.pages[0]
            flat = torch.stack([torch.stack([kv.layer(layer)[kind][page] for layer in range(3)]) for kind in range(2)])
            first = as_bytes(flat)
        await cache.drain(30.0)
        await cache.reset()
        assert await found(cache, 1) == (wanted, 0, ASKED_PAGES * PAGE_TOKENS)
        await pools_whole(cache)
        names = store.keys()
        keys = [key async for key in names]
    buffers = [memoryview(bytearray(shape.page_bytes)) for _ in keys]
    assert list(await store.read(keys, buffers)) == [True] * ASKED_PAGES
    assert first in [bytes(buffer) for buffer in buffers]


async def test_staging_slots_are_booked_reported_and_shown() -> None:
    with host_memory_scope() as account:
        async with open_small(backend=MemoryBackend(), layout="layer_first", host_pages=32) as small:
            layout = small.cache.report.layout
            staging = small.cache.report.staging
            assert staging is not None
            assert (staging.read_pages, staging.write_pages) == (32, 32)
            assert account.taken == {"host pool": 32 * layout.payload_bytes, "staging": staging.bytes}
            assert "staging   32 slots to read through" in small.cache.report.text
            storage = small.cache.snapshot().storage
            assert storage is not None
            assert {name: each.total_pages for name, each in storage.staging.items()} == {"read": 32, "write": 32}


async def test_a_store_may_come_later_and_finds_its_slots() -> None:
    async with open_small(layout="layer_first") as small:
        assert small.cache.report.staging is not None
        first = await small.engine.answer(prompt(6))
        await small.cache.attach_storage(MemoryBackend(), deadline_s=10.0)
        await small.cache.drain(10.0)
        await small.cache.reset()
        again = await small.engine.answer(prompt(6))
        assert (again.account.storage, again.tokens) == (24, first.tokens)


async def test_pages_that_are_no_runs_are_not_shown_as_objects() -> None:
    async with open_small(backend=MemoryBackend(), layout="layer_first") as small:
        seen: list[BatchEnd] = []

        def observe(what: BatchEnd | CommitEnd) -> None:
            if isinstance(what, BatchEnd) and what.kind == "backup":
                assert what.source is not None
                with pytest.raises(UsageError, match="layer_first"):
                    small.cache.host_objects(what.source)
                seen.append(what)

        small.cache.observe(observe)
        await small.engine.answer(prompt(3))
        await small.cache.drain(10.0)
        assert seen


async def test_heads_cannot_go_first_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"host\.layout = 'page_head': MLA has no heads"):
        async with opened(SHAPES["mla"], "page_head", "memory://none"):
            raise AssertionError("it was opened")
