"""Field reports, section D: what must be told apart in a store is, and what is the same is found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hicache_actors.config import Config, ModelFacts
from hicache_actors.keys.prompt import Prompt
from hicache_actors.keys.scope import NO_SCOPE, Scope
from hicache_actors.testing.shards import PAGES, close, deployment, files, whole_model
from hicache_actors.testing.small import prompt, small_config

from .kit import LOOPS, PAGE, compute, opened, quiet


def with_weights(weights: str, url: str) -> Config:
    return msgspec.structs.replace(
        small_config(url=url, host_pages=64), model=ModelFacts(model_id="served", weights=weights)
    )


async def hit_tokens(config: Config, asked: Prompt) -> int:
    """What a fresh cache gets of ``asked`` from the store."""
    async with opened(config=config, device_pages=48) as small, small.cache.acquire(asked, deadline_s=10.0) as lease:
        return lease.account.storage


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_b063_other_weights_under_the_same_name_are_another_model(anyio_backend: object, tmp_path: Path) -> None:
    """Given two caches on one folder, of models with the same name and other weights.
    When the first has stored 31 pages, and both ask for them.
    Then the second hits nothing, and the first all of them again."""
    url, asked = f"file://{tmp_path}", prompt(31)
    async with opened(config=with_weights("sha256:a", url), device_pages=48) as small:
        await compute(small, asked)
        assert await small.cache.drain(30.0) == 0
    assert await hit_tokens(with_weights("sha256:b", url), asked) == 0
    assert await hit_tokens(with_weights("sha256:a", url), asked) == 31 * PAGE


SCOPES = {
    "none": NO_SCOPE,
    "salt a": Scope(salt="a"),
    "salt b": Scope(salt="b"),
    "adapter a": Scope(lora="a"),
    "adapter and salt": Scope(lora="a", salt="b"),
}


@LOOPS
@pytest.mark.parametrize("stored", SCOPES)
async def test_b065_what_the_tree_keeps_apart_the_store_does_as_well(stored: str, anyio_backend: object) -> None:
    """Given equal tokens under no namespace, under salts and under adapters.
    When they have been stored under one, and are asked for under each after device and host have been dropped.
    Then only that one hits, and wholly."""
    async with opened(url="memory://", host_pages=64) as small:
        await compute(small, prompt(6, scope=SCOPES[stored]))
        for name, scope in SCOPES.items():
            await quiet(small)
            await small.cache.reset()
            async with small.cache.acquire(prompt(6, scope=scope), deadline_s=10.0) as lease:
                assert lease.account.storage == (6 * PAGE if name == stored else 0), name


def test_b067_contents_behind_equal_placeholders_have_names_of_their_own() -> None:
    """Given 100,000 pictures behind the same text, each placeholder token replaced by 64 bits of the picture's digest.
    When their pages are named.
    Then no two names are equal, nor those of two digests that end alike."""
    names: set[bytes] = set()
    for number in range(100_000):
        content = (number * 0x9E3779B97F4A7C15 + 1) % 2**63
        names.update(Prompt([7, content, 8, 9]).page_hashes(4, 1))
    assert len(names) == 100_000
    alike = [Prompt([7, high << 32 | 0xABCD, 8, 9]).page_hashes(4, 1)[0] for high in range(1000)]
    assert len(set(alike)) == 1000


_NAMES = """
from hicache_actors.keys import Namespace, Prompt, Rank, Scope, Shard, SuffixKeys, UnifiedKeys
facts = dict(model_id="m", weights="w", dtype="bfloat16", page_size=4, total_kv_heads=8, replicated=False)
suffix = SuffixKeys(Namespace(**facts, layout="page_first", head_group=4, layer_partition=2), Rank(tp_rank=1, tp_size=2))
unified = UnifiedKeys(Namespace(**facts, layout="page_unified", head_group=1, layer_partition=2), Shard(0, 4, 8))
for scope in (Scope(), Scope(None, None), Scope(salt="s"), Scope(lora="l")):
    hashes = Prompt([1, 2, 3, 4, 5, 6, 2**40, 8], scope).page_hashes(4, 2)
    print(*suffix.keys(hashes), *unified.keys(hashes))
"""


def names_made(hash_seed: str) -> tuple[str, ...]:
    """What a fresh process makes: a line for each scope."""
    said = subprocess.run(
        [sys.executable, "-c", _NAMES], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
    ).stdout
    return tuple(line for line in said.splitlines() if re.match(r"[0-9a-f]{64}_", line))  # the log may speak as well


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_b068_every_process_makes_the_same_names(anyio_backend: object, tmp_path: Path) -> None:
    """Given the same tokens and options, fields that are None among them.
    When four fresh processes with different hash seeds make keys, and a cache is opened again on a folder.
    Then all keys are equal, and the cache hits wholly."""
    made = [names_made(seed) for seed in ("0", "1", "4711", "random")]
    assert len(set(made)) == 1
    lines = made[0]
    assert len(lines) == 4
    assert lines[0] == lines[1]
    assert len(set(lines)) == 3
    config = with_weights("w", f"file://{tmp_path}")
    async with opened(config=config) as small:
        await compute(small, prompt(9))
        assert await small.cache.drain(30.0) == 0
    assert await hit_tokens(config, prompt(9)) == 9 * PAGE


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
@pytest.mark.parametrize("mla", [False, True])
async def test_b069_ranks_do_not_overwrite_one_another(mla: bool, anyio_backend: object, tmp_path: Path) -> None:
    """Given four tensor ranks that store their bytes of the same tokens in one folder, once all different, once (MLA) all the same.
    When all have been restarted and read.
    Then each gets its own bytes, and there are four files a page, or one."""
    settings = {"keys": "suffix", "layer_partition": None}
    model = whole_model(mla=mla)
    ranks = deployment(model, 4, (7,), tmp_path, **settings)
    for rank in ranks:
        await rank.save()
    await close(ranks)
    assert len(files(tmp_path)) == PAGES * (1 if mla else 4)
    again = deployment(model, 4, (7,), tmp_path, **settings)
    assert [await rank.load() for rank in again] == [PAGES] * 4
    await close(again)


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_b069_context_ranks_hold_other_bytes_under_other_names(anyio_backend: object, tmp_path: Path) -> None:
    """Given two context ranks of an MLA model, which hold other bytes each.
    When both have stored them, and read.
    Then each gets its own."""
    ranks = []
    for cp_rank in (0, 1):
        rank = deployment(whole_model(mla=True, seed=cp_rank), 1, (7,), tmp_path, keys="suffix", layer_partition=None)[
            0
        ]
        rank.store.keys = type(rank.store.keys)(  # type: ignore[call-arg]
            rank.store.keys.namespace, msgspec.structs.replace(rank.rank, cp_rank=cp_rank, cp_size=2)
        )
        ranks.append(rank)
    for rank in ranks:
        await rank.save()
    assert len(files(tmp_path)) == 2 * PAGES
    assert [await rank.load() for rank in ranks] == [PAGES] * 2
    await close(ranks)


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
@pytest.mark.parametrize("named", [True, False])
async def test_b071_pages_of_old_weights_are_gone_at_once_and_for_ever(
    named: bool, anyio_backend: object, tmp_path: Path
) -> None:
    """Given pages that were stored under weights v0.
    When the weights are updated while the cache is open, with a name for the new ones or without, the prompt is repeated, and
    again after a restart.
    Then nothing of v0 is hit on any tier, what is stored since is, and v0 itself is there for who still runs with it."""
    url, asked = f"file://{tmp_path}", prompt(8)
    async with opened(config=with_weights("v0", url)) as small:
        await compute(small, asked)
        assert await small.cache.drain(30.0) == 0
        weights = await small.cache.advance_epoch("v1" if named else None)
        small.model.weights = 1
        assert (small.cache.match(asked).device, small.cache.match(asked).host) == (0, 0)
        async with small.cache.acquire(asked, deadline_s=10.0) as lease:
            assert lease.account.storage == 0
    assert (weights == "v1") == named
    assert await hit_tokens(with_weights(weights, url), asked) == 0
    async with opened(config=with_weights(weights, url)) as small:
        small.model.weights = 1
        await compute(small, asked)
        assert await small.cache.drain(30.0) == 0
    assert await hit_tokens(with_weights(weights, url), asked) == 8 * PAGE
    assert await hit_tokens(with_weights("v0", url), asked) == 8 * PAGE
