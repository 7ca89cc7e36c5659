"""An engine that owns its blocks, under each policy that it may choose; what it may not is refused."""

from __future__ import annotations

import msgspec
import pytest

from hicache_actors import ConfigError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.core.config import PrefetchPolicy
from hicache_actors.core.order import EVICTIONS, Eviction
from hicache_actors.policy_config import WritePolicy
from hicache_actors.storage_config import PREFETCH_POLICIES
from hicache_actors.testing.small import open_small, prompt, small_config

from .kit import engine, reference, run


@pytest.mark.parametrize("eviction", EVICTIONS)
async def test_each_order_of_eviction(eviction: Eviction) -> None:
    config = msgspec.structs.replace(small_config(host_pages=20), eviction=eviction)
    asked = [(f"r{family}", prompt(5, family=family)) for family in range(6)]
    async with engine(device_pages=12, config=config, backend=MemoryBackend()) as (small, toy, _):
        for _ in range(2):
            answers = await run(toy, asked, 4)
            assert {rid: answer.tokens for rid, answer in answers.items()} == {
                rid: reference(small, each, 4) for rid, each in asked
            }
        assert small.cache.snapshot().counts["evicted_host_pages"] > 0
        assert small.cache.core.usage().fetches.fulfilled_pages > 0, "nothing came back from storage"


@pytest.mark.parametrize("policy", PREFETCH_POLICIES)
async def test_each_way_to_end_a_fetch(policy: PrefetchPolicy) -> None:
    backend, asked = MemoryBackend(), [("a", prompt(6))]
    async with engine(device_pages=12, backend=backend, prefetch_policy=policy) as (_, toy, _):
        first = await run(toy, asked)
    async with engine(device_pages=12, backend=backend, prefetch_policy=policy) as (small, toy, _):
        again = await run(toy, asked)
        assert again["a"].tokens == first["a"].tokens == reference(small, asked[0][1])
        assert (again["a"].loaded_tokens > 0) or policy == "best_effort"  # which takes what has come by then


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
async def test_policies_of_saving_are_the_engines(policy: WritePolicy) -> None:
    config = msgspec.structs.replace(small_config(), write_policy=policy)
    with pytest.raises(ConfigError, match="decides what is saved"):
        async with open_small(config=config, slots="engine", driver="step"):
            raise AssertionError("it was opened")
