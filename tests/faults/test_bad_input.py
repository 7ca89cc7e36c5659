"""What a caller may get wrong: refused before anything starts or changes, in words that say what to do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hicache_actors import Config, ConfigError, HiCache, Shortfall, UsageError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.config import DeviceConfig, HostConfig, ModelFacts, ShapeConfig
from hicache_actors.core.words import Match
from hicache_actors.cuda_ext import open_cpu_device
from hicache_actors.keys.prompt import Prompt
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.shapes import KVShape
from hicache_actors.testing.small import PAGE_SIZE, SHAPE, open_small, prompt, small_config

Settings = dict[str, Any]


def _config(**changes: Any) -> Config:
    return msgspec.structs.replace(small_config(), **changes)


def _storage(**settings: Any) -> Callable[[], Config]:
    return lambda: small_config(**settings)


OWN = ShapeConfig(layers=2, heads=2, head_dim=4, dtype="float32")
KV = KVTensors.make(SHAPE, 4)

REFUSED: dict[str, tuple[str, Callable[[], Config], Settings]] = {
    "slots of the engine": ("slots", _config, {"kv": KV, "slots": "engine"}),
    "unknown driver": ("driver", _config, {"kv": KV, "driver": "later"}),
    "page size of other tensors": ("page_size", lambda: _config(page_size=8), {"kv": KV}),
    "page size of nothing": ("page_size", lambda: _config(page_size=0), {"kv": KV}),
    "page size as a text": ("page_size", lambda: _config(page_size="64"), {"kv": KV}),
    "pages of other tensors": ("device.pages", lambda: _config(device=DeviceConfig(pages=9)), {"kv": KV}),
    "neither tensors nor shape": ("shape", _config, {}),
    "a shape and no pages": ("device.pages", lambda: _config(shape=OWN), {}),
    "an unknown dtype": (
        "shape.dtype",
        lambda: _config(shape=msgspec.structs.replace(OWN, dtype="float33"), device=DeviceConfig(pages=4)),
        {},
    ),
    "no host": ("host.pages", lambda: _config(host=HostConfig(pages=0)), {"kv": KV}),
    "a host larger than the machine": ("host.size_gb", lambda: _config(host=HostConfig(size_gb=1e9)), {"kv": KV}),
    "an unknown layout": ("host.layout", lambda: _config(host=HostConfig(layout="flat")), {"kv": KV}),  # type: ignore[arg-type]
    "a path in place of a URL": ("storage.url", _storage(url="/var/cache"), {"kv": KV}),
    "an unknown scheme": ("storage.url", _storage(url="ftp://there"), {"kv": KV}),
    "an unknown policy": ("storage.prefetch_policy", _storage(prefetch_policy="maybe"), {"kv": KV}),
    "no readers": ("storage.read_concurrency", _storage(read_concurrency=0), {"kv": KV}),
    "a negative time": ("storage.prefetch_timeout_base_s", _storage(prefetch_timeout_base_s=-1.0), {"kv": KV}),
    "not a number": ("storage.prefetch_timeout_base_s", _storage(prefetch_timeout_base_s=float("nan")), {"kv": KV}),
    "storage without a model": (
        "model.model_id",
        lambda: msgspec.structs.replace(small_config(url="memory://"), model=ModelFacts()),
        {"kv": KV},
    ),
    "storage without a header": (
        "host.header_bytes",
        lambda: msgspec.structs.replace(small_config(url="memory://"), host=HostConfig(pages=4, header_bytes=0)),
        {"kv": KV},
    ),
    "an unknown write policy": ("write_policy", lambda: _config(write_policy="never"), {"kv": KV}),
    "an unknown eviction": ("eviction", lambda: _config(eviction="random"), {"kv": KV}),
    "no time to close": ("close_timeout_s", lambda: _config(close_timeout_s=0), {"kv": KV}),
}


@pytest.mark.parametrize("wrong", REFUSED)
async def test_a_wrong_configuration_is_refused_before_anything_starts(wrong: str) -> None:
    field, make, settings = REFUSED[wrong]
    before = set(threading.enumerate())
    with pytest.raises(ConfigError) as refused:
        async with HiCache.open(make(), **settings):
            raise AssertionError("not reached")
    assert set(threading.enumerate()) <= before
    error = refused.value
    assert error.field == field
    assert str(error).startswith(f"{field} = ")
    assert error.problem
    assert error.fix, str(error)
    assert error.allowed or error.value is None, str(error)


async def test_a_backend_and_a_url_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"storage\.url"):
        async with HiCache.open(small_config(url="memory://"), KV, backend=MemoryBackend()):
            raise AssertionError("not reached")


async def test_a_backend_without_facts_of_the_model_is_refused() -> None:
    config = msgspec.structs.replace(small_config(), model=ModelFacts())
    with pytest.raises(ConfigError, match="model_id"):
        async with HiCache.open(config, KV, backend=MemoryBackend()):
            raise AssertionError("not reached")


def test_tensors_of_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        keys, values = torch.zeros(4, PAGE_SIZE, 2, 4), torch.zeros(4, PAGE_SIZE, 2, 4)
    with pytest.raises(ConfigError, match="inference"):
        KVTensors.from_tensors([keys], [values])


BAD_TOKENS: tuple[Any, ...] = (
    [1, 2.5],
    [1, "2"],
    [1, None],
    [True, False],
    [-1],
    [1, -7, 3],
    [1 << 64],
    "text",
    b"bytes",
    5,
    None,
    [[1, 2], [3, 4]],
    {1: 2},
    np.array([1.5]),
    np.array([[1, 2]]),
    np.array([-3]),
    np.array([True]),
    torch.tensor([0.5]),
    torch.tensor([[1], [2]]),
    torch.tensor([-1]),
)


@pytest.mark.parametrize("tokens", BAD_TOKENS, ids=repr)
def test_tokens_that_are_none_are_refused(tokens: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        Prompt(tokens)
    assert len(str(refused.value)) > 20
    good = Prompt([1, 2, 3])
    with pytest.raises((TypeError, ValueError)):
        good.append(tokens)
    assert good.tolist() == [1, 2, 3]  # nothing of it was taken


async def test_an_empty_prompt_is_an_empty_match() -> None:
    async with open_small(url="memory://") as small:
        empty = Prompt([])
        assert small.cache.match(empty) == Match(0, 0, 0)
        async with small.cache.acquire(empty) as lease:
            assert (lease.usable_tokens, list(lease.pages)) == (0, [])
            assert lease.account.computed == 0
            assert lease.commit(0).published_pages == 0
            load = lease.load()
            assert not isinstance(load, Shortfall)
            assert (await load.verdict()).failed is None
        assert await small.cache.prefetch(empty, "r").wait() == 0
        assert (await small.cache.stored(empty, 1.0)).tokens == 0


@pytest.mark.parametrize("rid", ["", None, 7])
async def test_a_request_without_a_name_is_refused(rid: Any) -> None:
    async with open_small() as small:
        with pytest.raises(UsageError, match="rid"):
            small.cache.lease(prompt(1), rid)
        with pytest.raises(UsageError, match="rid"):
            small.cache.prefetch(prompt(1), rid)


async def test_calls_of_a_lease_out_of_place_change_nothing() -> None:
    async with open_small() as small:
        async with small.cache.acquire(prompt(2)) as lease:
            for wrong in (-1, 10**9):
                with pytest.raises(UsageError):
                    lease.commit(wrong)
            with pytest.raises(UsageError):
                lease.allocate(-1)
            with pytest.raises(UsageError):
                small.cache.lease(prompt(2), lease.rid)
            usage = small.cache.core.usage()
        for late in (lambda: lease.allocate(1), lambda: lease.commit(0), lease.load):
            with pytest.raises(UsageError, match="released"):
                late()
        lease.release()
        assert usage.device.free_pages == small.cache.core.usage().device.free_pages == 16
        assert small.cache.state == "open"


async def test_a_lease_beside_a_pending_acquire_of_its_name_harms_nobody() -> None:
    async with open_small(url="memory://pending") as small:
        await small.engine.answer(prompt(4))
        await small.cache.drain(5.0)
        await small.cache.reset()
        acquire = small.cache.acquire(prompt(4), rid="r", deadline_s=5.0)
        entering = asyncio.ensure_future(acquire.__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="pending"):
            small.cache.lease(prompt(4), "r")
        lease = await entering
        assert lease.usable_tokens == 16
        await acquire.__aexit__(None, None, None)
        assert small.cache.state == "open"


async def test_tensors_that_do_not_fit_are_refused() -> None:
    other = KVTensors.make(KVShape(layers=3, kv=2, heads=2, head_dim=4, dtype="float32", page_size=8), 4)
    device = open_cpu_device()
    with pytest.raises(ConfigError, match="page_size"):
        async with HiCache.open(small_config(), other, device=device):
            raise AssertionError("not reached")
    assert device.close(1.0)
