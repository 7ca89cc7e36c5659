"""Small random models of four families, and engines over tiny pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

pytest.importorskip("transformers")

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hicache_actors import Config, HiCache, HostConfig, KVTensors, StorageConfig
from hicache_actors.backends.backend import Backend
from hicache_actors.cache.assembly import DriverKind
from hicache_actors.config import HostLayout, WritePolicy
from hicache_actors.cuda_ext import ControlledDevice, open_cpu_device
from hicache_actors.integrations.serving import (
    Replayed,
    ScheduleRecorder,
    ServedModel,
    ServingConfig,
    ServingEngine,
    replay,
)
from hicache_actors.integrations.serving.schedule import Admitted, read_schedule
from hicache_actors.integrations.transformers import kv_shape_of, model_facts
from hicache_actors.testing.pools import check_conservation, check_whole

PAGE_SIZE = 8
VOCABULARY = 251
FAMILIES = ("llama", "qwen3", "gemma3", "deepseek")


def model_of(family: str, *, layers: int = 2) -> Any:
    """A random model of ``family`` in float32, always the same one."""
    torch.manual_seed(7)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
        "initializer_range": 0.3,  # logits far apart: texts are varied
        "tie_word_embeddings": False,
    }
    model: Any
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=2))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**common, num_key_value_heads=2, head_dim=8))
    elif family == "gemma3":
        full = ["full_attention"] * layers
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                **common,
                num_key_value_heads=1,
                head_dim=8,
                query_pre_attn_scalar=8,
                layer_types=full,
                sliding_window=64,
            )
        )
    else:
        latent: dict[str, Any] = {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        }
        experts: dict[str, Any] = {
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        }
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**common, num_key_value_heads=4, **latent, **experts))
    model.train(False)
    return model


def tokens(seed: int, n: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i * seed) % (VOCABULARY - 3) for i in range(n)]


class Serving(NamedTuple):
    cache: HiCache
    served: ServedModel
    engine: ServingEngine
    device: ControlledDevice[Any]


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny models are slower with two threads, and bits depend on the number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@asynccontextmanager
async def serving(
    model: Any,
    *,
    pages: int,
    host_pages: int = 64,
    backend: Backend | None = None,
    driver: DriverKind = "auto",
    write_policy: WritePolicy = "write_through",
    layout: HostLayout = "page_first_direct",
    config: ServingConfig | None = None,
    recorder: ScheduleRecorder | None = None,
) -> AsyncIterator[Serving]:
    """An engine over a cache of its own.  When the block ends well, every pool must be whole."""
    settings = Config(
        model=model_facts(model, model_id="random", weights="seed-7"),
        page_size=PAGE_SIZE,
        write_policy=write_policy,
        host=HostConfig(pages=host_pages, layout=layout),
        storage=StorageConfig(prefetch_threshold_tokens=PAGE_SIZE),
        close_timeout_s=2.0,
    )
    kv = KVTensors.make(kv_shape_of(model, page_size=PAGE_SIZE), pages)
    served = ServedModel(model, kv)
    device = open_cpu_device()
    try:
        async with HiCache.open(settings, kv, driver=driver, device=device, backend=backend) as cache:
            async with ServingEngine.open(cache, served, config or ServingConfig(), recorder=recorder) as engine:
                yield Serving(cache, served, engine, device)
            await settle(cache)
            check_conservation(cache.core)
            await reset(cache)
            await settle(cache)
            check_whole(cache.core)
    finally:
        served.detach()


async def settle(cache: HiCache) -> None:
    """Let all jobs end, whoever has to make the steps."""
    while cache.core.needs_step:
        if cache.core.next_due_ms is not None and not cache.core.state.jobs.open:
            break
        if hasattr(cache.driver, "begin_step"):
            await cache.begin_step_async()
            cache.end_step()
        else:
            await cache.pipelines.idle()


async def reset(cache: HiCache) -> None:
    if hasattr(cache.driver, "begin_step"):
        await cache.begin_step_async()
        cache.core.reset()
        cache.end_step()
    else:
        await cache.reset()


async def answer(engine: ServingEngine, ids: Sequence[int], n: int, **settings: Any) -> list[int]:
    return [token async for token in engine.generate(ids, max_new_tokens=n, **settings)]


def replayed(model: Any, path: Path) -> dict[str, Replayed]:
    """A closed record, computed again without a cache."""
    served = ServedModel(model, KVTensors.make(kv_shape_of(model, page_size=PAGE_SIZE), 1))
    try:
        return replay(path, served)
    finally:
        served.detach()


async def eventually(holds: Callable[[], bool]) -> None:
    """Let the loop turn until something holds that nobody announces."""
    with anyio.fail_after(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.0005)


class Computed(NamedTuple):
    """What the passes of one request were, and what they gave."""

    starts: list[int]
    counts: list[int]
    sampled: list[int | None]
    logits: list[int]


def computed(path: Path, rid: str) -> Computed:
    """The record of a request that was admitted once."""
    found = Computed([], [], [], [])
    attempt = 0
    for record in read_schedule(path):
        if isinstance(record, Admitted):
            if record.rid == rid:
                assert not attempt
                attempt = record.attempt
        elif attempt in record.attempts:
            at = record.attempts.index(attempt)
            found.starts.append(record.starts[at])
            found.counts.append(len(record.tokens[at]))
            found.sampled.append(record.sampled[at])
            found.logits.append(record.logits[at])
    assert attempt
    return found
