"""A transformers model on the real cache: bit-equal from every tier, waiting per layer, and nothing from a failed load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hicache_actors import (
    Account,
    Config,
    HiCache,
    HostConfig,
    KVTensors,
    Lease,
    Load,
    Prompt,
    Shortfall,
    StorageConfig,
    TransferError,
)
from hicache_actors.cuda_ext import ControlledDevice, open_cpu_device
from hicache_actors.integrations.transformers import LoadFailed, PagedCache, PagedModel, kv_shape_of, model_facts
from hicache_actors.testing.shadow import Digest, ShadowStore

PAGE_SIZE = 8
LAYERS = 4
VOCABULARY = 251


def toy_llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    return model


def tokens(seed: int, n: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % (VOCABULARY - 3) for i in range(n)]


class Served(NamedTuple):
    ids: list[int]
    logits: torch.Tensor
    answer: list[int]
    account: Account
    reused: list[Digest]


def decode(engine: PagedModel, cache: Any, logits: torch.Tensor, n: int) -> list[int]:
    answer = [int(logits.argmax())]
    while len(answer) < n:
        answer.append(int(engine.forward(answer[-1:], cache).argmax()))
    return answer


async def serve(cache: HiCache, engine: PagedModel, shadow: ShadowStore, ids: Sequence[int], new: int = 4) -> Served:
    """Prefill and decode ``new`` tokens; commits prompt and turn.  Raises `LoadFailed`."""
    prompt = Prompt(list(ids))
    async with cache.acquire(prompt, deadline_s=5.0) as lease:
        assert not isinstance(lease.allocate(len(ids) + new - lease.usable_tokens), Shortfall)
        pages: PagedCache = engine.new_cache(lease)
        logits = await lease.run(engine.prefill, ids, pages, 16)
        if lease.loading is not None:
            assert (await lease.loading.verdict()).failed is None
        await lease.run(pages.flush)
        lease.commit(len(ids))
        account = lease.account
        reused = shadow.check_device(lease.pages[: pages.prefix_tokens // cache.page_size])
        answer = await lease.run(decode, engine, pages, logits, new)
        prompt.append(answer)
        await lease.run(pages.flush)
        lease.commit(len(prompt) - 1)
    await cache.stored(Prompt([*ids, *answer[:-1]]), deadline_s=5.0)
    return Served(list(ids), logits, answer, account, reused)


def replay(engine: PagedModel, shadow: ShadowStore, served: Served) -> tuple[torch.Tensor, list[int]]:
    """The same request on a plain cache that is filled from the shadow."""
    plain = DynamicCache(config=engine.model.config)
    if served.reused:
        for layer, (keys, values) in enumerate(shadow.dense_prefix(served.reused)):
            plain.update(keys, values, layer)
    logits = engine.prefill(served.ids, plain, 16)
    return logits, decode(engine, plain, logits, len(served.answer))


class Setting:
    def __init__(self, folder: Path) -> None:
        self.model = toy_llama()
        self.shadow = ShadowStore()
        self.config = Config(
            model=model_facts(self.model, model_id="toy", weights="v1"),
            page_size=PAGE_SIZE,
            host=HostConfig(pages=24),
            storage=StorageConfig(url=folder.as_uri(), prefetch_threshold_tokens=PAGE_SIZE),
        )

    @asynccontextmanager
    async def life(self, pages: int = 8) -> AsyncIterator[tuple[HiCache, PagedModel, ControlledDevice[Any]]]:
        """A cache that is empty but for what is stored."""
        kv = KVTensors.make(kv_shape_of(self.model, page_size=PAGE_SIZE), pages)
        engine = PagedModel(self.model, kv, capacity_tokens=128)
        device = open_cpu_device()
        async with HiCache.open(self.config, kv, device=device) as cache:
            cache.observe(self.shadow.watch(kv))
            yield cache, engine, device
        engine.detach()


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Setting(tmp_path)
    torch.set_num_threads(threads)


async def test_every_tier_gives_back_the_bits_that_were_computed(setting: Setting) -> None:
    a, b = tokens(1, 42), tokens(2, 45)
    async with setting.life() as (cache, engine, _):
        first = await serve(cache, engine, setting.shadow, a)
        again = await serve(cache, engine, setting.shadow, [*a, *first.answer, 7, 8, 9])
        await serve(cache, engine, setting.shadow, b)
        back = await serve(cache, engine, setting.shadow, [*a, *first.answer, 9, 9, 9])
    async with setting.life() as (cache, engine, _):
        restarted = await serve(cache, engine, setting.shadow, [*b, 4, 5, 6])
        served = [first, again, back, restarted]
        for each in served:
            logits, answer = replay(engine, setting.shadow, each)
            assert torch.equal(logits, each.logits)
            assert answer == each.answer
    accounts = [each.account for each in served]
    assert [(x.device, x.host, x.storage) for x in accounts] == [(0, 0, 0), (40, 0, 0), (0, 40, 0), (0, 0, 40)]
    assert [x.computed for x in accounts] == [42, 9, 9, 8]
    assert setting.shadow.mismatches == []
    assert setting.shadow.verified_pages == 10


class Watched:
    """A lease whose load says which layers a forward pass has come to."""

    def __init__(self, lease: Lease) -> None:
        assert lease.loading is not None
        self.pages, self.usable_tokens, self.loading = lease.pages, lease.usable_tokens, self
        self._load: Load = lease.loading
        self._loop = asyncio.get_running_loop()
        self.reached = [asyncio.Event() for _ in range(LAYERS)]

    def wait(self, layer: int, timeout_s: float) -> bool:
        self._loop.call_soon_threadsafe(self.reached[layer].set)
        return self._load.wait(layer, timeout_s)


async def test_the_forward_pass_waits_where_the_copy_stands(setting: Setting) -> None:
    a, b = tokens(1, 42), tokens(2, 45)
    async with setting.life() as (cache, engine, device):
        await serve(cache, engine, setting.shadow, a)
        await serve(cache, engine, setting.shadow, b)
        gate = device.gate("load")
        gate.allow(2)
        async with cache.acquire(Prompt(a)) as lease:
            assert lease.usable_tokens == 40
            lease.allocate(2)
            watched = Watched(lease)
            pages = engine.new_cache(watched)
            forward = asyncio.ensure_future(lease.run(engine.prefill, a, pages))
            await watched.reached[2].wait()
            assert [layer.n_tokens for layer in pages.paged_layers] == [42, 42, 40, 40]
            assert not watched.reached[3].is_set()
            assert lease.loading is not None
            assert lease.loading.result() is None
            assert not forward.done()
            gate.open()
            logits = await forward
            assert (await lease.loading.verdict()).failed is None
            reused = setting.shadow.check_device(lease.pages[:5])
            assert pages.wait_s > 0
            served = Served(a, logits, [int(logits.argmax())], lease.account, reused)
        assert torch.equal(replay(engine, setting.shadow, served)[0], logits)
    assert setting.shadow.mismatches == []


@pytest.mark.parametrize("layer", range(LAYERS))
async def test_no_token_comes_from_a_load_that_fails(setting: Setting, layer: int) -> None:
    a = tokens(1, 42)
    async with setting.life(pages=24) as (cache, engine, device):
        first = await serve(cache, engine, setting.shadow, a)
        await cache.reset()
        device.fail_next(TransferError("planted"), after=layer, stream="load")
        with pytest.raises(LoadFailed):
            await serve(cache, engine, setting.shadow, a)
        await cache.pipelines.idle()  # until its verdict is agreed a new lease would join the failing load
        served = await serve(cache, engine, setting.shadow, a)
        assert served.account.device == 0
        logits, answer = replay(engine, setting.shadow, served)
        assert torch.equal(logits, served.logits)
        assert served.answer == answer == first.answer
    assert setting.shadow.mismatches == []
