"""Whole caches whose objects are named and cut in other ways: unified keys, and SGLang's raw files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch

from hicache_actors import Config, HiCache, HostConfig, KVTensors, ModelFacts
from hicache_actors.backends.backend import Backend
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Hanging, Wrapper
from hicache_actors.command import cli
from hicache_actors.cuda_ext import open_device
from hicache_actors.errors import ConfigError, UsageError
from hicache_actors.testing.engines import LoopEngine
from hicache_actors.testing.small import PAGE_SIZE, SHAPE, open_small, prompt, small_config, tokens
from hicache_actors.testing.toy_model import ToyModel

LOOPS = pytest.mark.parametrize("anyio_backend", ["virtual:1", "asyncio"], indirect=True)
THREADS = pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)


def settings(keys: str, url: str | None = None, **storage: Any) -> Config:
    base = small_config(url=None, host_pages=32)
    host = {
        "unified": HostConfig(pages=32, layout="page_unified"),
        "raw": HostConfig(pages=32, layout="page_first", header_bytes=0),
    }
    if keys == "raw":
        storage = {"verify": "off", **storage}
    return msgspec.structs.replace(
        base,
        model=ModelFacts(model_id="org/toy", weights="v1"),
        host=host[keys],
        storage=msgspec.structs.replace(base.storage, url=url, keys=keys, **storage),
    )


# -- unified ------------------------------------------------------------------------------------------------------------


@THREADS
async def test_a_cache_with_unified_keys_stores_a_page_as_chunks_and_finds_it(
    anyio_backend: object, tmp_path: Path
) -> None:
    config = settings("unified", f"file://{tmp_path}", head_group=1, layer_partition=2)
    for life in range(2):
        async with open_small(config=config) as small:
            answer = await small.engine.answer(prompt(5))
            assert await small.cache.drain(10.0) == 0
            assert answer.account.storage == (5 * PAGE_SIZE if life else 0)
    names = [name for _, _, found in os.walk(tmp_path / "objects") for name in found]
    assert len(names) == 5 * 4
    assert all(re.fullmatch(r"[0-9a-f]{64}_hku1-[0-9a-f]{32}_L(0-2|2-3)_H[01]\.kv", name) for name in names)


@LOOPS
async def test_unified_pages_go_through_all_tiers(anyio_backend: object) -> None:
    config = settings("unified", "memory://", head_group=1, layer_partition=1)
    async with open_small(config=config, device_pages=8) as small:
        asked = [prompt(5, family=family) for family in range(6)]
        first = [(await small.engine.answer(each)).tokens for each in asked]
        again = [await small.engine.answer(each) for each in asked]
        assert [answer.tokens for answer in again] == first
        assert sum(answer.account.host for answer in again) > 0
        assert await small.cache.drain(10.0) == 0
        await small.cache.reset()
        fetched = [await small.engine.answer(each) for each in asked]
        assert [answer.tokens for answer in fetched] == first
        assert sum(answer.account.storage for answer in fetched) > 0


@THREADS
async def test_chunks_are_copied_by_the_device_that_is_opened_by_default(anyio_backend: object) -> None:
    config = settings("unified", "memory://", head_group=1, layer_partition=2)
    kv = KVTensors.make(SHAPE, 16)
    async with HiCache.open(config, kv, device=open_device("cpu")) as cache:
        model = ToyModel(kv)
        engine = LoopEngine(cache, model)
        first = await engine.answer(prompt(6))
        assert await cache.drain(10.0) == 0
        await cache.reset()
        again = await engine.answer(prompt(6))
        assert (again.account.storage, again.tokens) == (6 * PAGE_SIZE, first.tokens)


def test_unified_settings_that_do_not_fit_are_refused_at_start() -> None:
    from hicache_actors.cache.planning import plan

    for storage, field in (({"head_group": 3}, "layout.head_group"), ({"tp_lcm_size": 4}, "storage.tp_lcm_size")):
        with pytest.raises(ConfigError) as caught:
            plan(
                settings("unified", "memory://", **storage), KVTensors.make(SHAPE, 4), slots="owned", driver="auto",
                device=None, backend=None,
            )  # fmt: skip
        assert caught.value.field == field


# -- raw ----------------------------------------------------------------------------------------------------------------


def sglang_hashes(ids: list[int]) -> list[str]:
    """As SGLang names pages, written down once more."""
    hashes, parent = [], b""
    for at in range(0, len(ids) - PAGE_SIZE + 1, PAGE_SIZE):
        page = ids[at : at + PAGE_SIZE]
        parent = sha256(parent + struct.pack(f"<{PAGE_SIZE}I", *page)).digest()
        hashes.append(parent.hex())
    return hashes


def sglang_pages(pages: int) -> dict[str, bytes]:
    """File name -> content, of a prompt's pages under page_first: [2][token][layer][head][dim], flat, no header."""
    asked = prompt(pages)
    kv = KVTensors.make(SHAPE, pages + 1)
    ToyModel(kv).forward(asked, range(pages + 1), 0, len(asked))
    files = {}
    for page, name in enumerate(sglang_hashes(tokens(pages))):
        stacked = torch.stack([torch.stack([tensor[page] for tensor in kv.layer(n)]) for n in range(SHAPE.layers)])
        files[f"{name}_org-toy_0_1.bin"] = stacked.permute(1, 2, 0, 3, 4).contiguous().numpy().tobytes()
    return files


@THREADS
async def test_files_that_sglang_has_written_are_read(anyio_backend: object, tmp_path: Path) -> None:
    for name, content in sglang_pages(6).items():
        (tmp_path / name).write_bytes(content)
    async with open_small(config=settings("raw", f"sglang-file://{tmp_path}")) as small:
        answer = await small.engine.answer(prompt(6))  # the model looks at every byte
        assert answer.account.storage == 6 * PAGE_SIZE


@THREADS
async def test_files_are_written_as_sglang_reads_them(anyio_backend: object, tmp_path: Path) -> None:
    async with open_small(config=settings("raw", f"sglang-file://{tmp_path}")) as small:
        await small.engine.answer(prompt(6))
        assert await small.cache.drain(10.0) == 0
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == sglang_pages(6)


@THREADS
async def test_raw_objects_go_to_any_store(anyio_backend: object, tmp_path: Path) -> None:
    """Also to one that would verify and seal them itself."""
    for life in range(2):
        async with open_small(config=settings("raw", f"file://{tmp_path}")) as small:
            answer = await small.engine.answer(prompt(6))
            assert answer.account.storage == (6 * PAGE_SIZE if life else 0)
            assert await small.cache.drain(10.0) == 0
    found = {file.stem: file.read_bytes() for file in tmp_path.glob("objects/*/*.kv")}  # noqa: ASYNC240
    assert found == {Path(name).stem: content for name, content in sglang_pages(6).items()}


@THREADS
async def test_a_raw_page_of_another_length_ends_the_hit(anyio_backend: object, tmp_path: Path) -> None:
    files = sglang_pages(6)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    third = list(files)[2]
    (tmp_path / third).write_bytes(files[third][:-1])
    async with open_small(config=settings("raw", f"sglang-file://{tmp_path}")) as small:
        answer = await small.engine.answer(prompt(6))
        assert answer.account.storage == 2 * PAGE_SIZE


@LOOPS
async def test_raw_names_refuse_an_update_of_the_weights(anyio_backend: object) -> None:
    async with open_small(config=settings("raw", "memory://")) as small:
        with pytest.raises(UsageError, match="weights apart"):
            await small.cache.advance_epoch("v2")
        await small.cache.detach_storage(1.0)
        assert await small.cache.advance_epoch("v2") == "v2"


# -- weights ------------------------------------------------------------------------------------------------------------


@LOOPS
async def test_a_store_that_is_attached_later_is_named_by_the_weights_of_then(anyio_backend: object) -> None:
    async with open_small(host_pages=32) as small:
        await small.engine.answer(prompt(3))
        assert await small.cache.advance_epoch("v7") == "v7"
        await small.cache.attach_storage("memory://")
        assert small.store.keys.namespace.weights == "v7"
        small.model.weights = 7
        first = await small.engine.answer(prompt(3))
        assert first.account.host + first.account.device == 0
        assert await small.cache.drain(10.0) == 0
        await small.cache.reset()
        assert (await small.engine.answer(prompt(3))).account.storage == 3 * PAGE_SIZE


@LOOPS
async def test_an_update_without_a_name_gets_one_that_nobody_has(anyio_backend: object) -> None:
    async with open_small(url="memory://") as small:
        names = {await small.cache.advance_epoch() for _ in range(5)}
        assert len(names) == 5
        assert all(re.fullmatch(r"v1\+[0-9a-f]{16}", name) for name in names)
        with pytest.raises(ConfigError):
            await small.cache.advance_epoch(" ")


class _Slow(Wrapper):
    """Opens when it is told to."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def open(self) -> None:
        self.asked.set()
        await self.may.wait()
        await super().open()


@LOOPS
async def test_weights_that_change_while_a_store_is_opened_are_those_it_gets(anyio_backend: object) -> None:
    async with open_small(host_pages=32) as small:
        store = _Slow(MemoryBackend())
        attaching = asyncio.ensure_future(small.cache.attach_storage(store))
        await store.asked.wait()
        await small.cache.advance_epoch("v5")
        store.may.set()
        await attaching
        assert small.store.keys.namespace.weights == "v5"


@THREADS
async def test_what_is_under_way_to_the_store_keeps_its_old_name(anyio_backend: object) -> None:
    """A backup that is being written when the weights change must not file old pages under the new name."""
    inner = MemoryBackend()
    hanging = Hanging(inner, ("write",))
    async with open_small(backend=hanging, host_pages=32) as small:
        old = small.store.keys
        await small.engine.answer(prompt(4))
        with anyio.fail_after(10):
            while not hanging.hung:  # noqa: ASYNC110
                await anyio.sleep(0.001)
        await small.cache.advance_epoch("v2")
        hanging.release()
        assert await small.cache.drain(10.0) == 0
        hashes = prompt(4).page_hashes(PAGE_SIZE, 4)
        with anyio.fail_after(10):
            while await inner.exists(old.keys(hashes)) < 4:  # noqa: ASYNC110
                await anyio.sleep(0.001)
        assert await inner.exists(small.store.keys.keys(hashes)) == 0
        small.model.weights = 2
        assert (await small.engine.answer(prompt(4))).account.computed == len(prompt(4))


@pytest.mark.parametrize("tp", [2, 4])
def test_a_plan_counts_the_headers_of_all_chunks(tp: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cache.toml"
    file.write_text(
        '[host]\nlayout = "page_unified"\npages = 100\n[storage]\nkeys = "unified"\ntp_lcm_size = 4\nlayer_partition = 8\n'
    )
    shape = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--tp", str(tp)]
    assert cli.main(["plan", "--config", str(file), *shape, "--device-gb", "4", "--json"]) == 0
    host = json.loads(capsys.readouterr().out)["tiers"]["host"]
    chunks = 4 * 4 // tp
    assert host["header_bytes"] == 100 * chunks * 4096
