"""Many requests at once: chunks mixed with decoding, shared prefixes, preemption, and texts that a replay confirms."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.cache.assembly import DriverKind
from hicache_actors.integrations.serving import (
    Generation,
    Piece,
    ScheduleRecorder,
    ServedModel,
    ServingConfig,
    ServingEngine,
)
from hicache_actors.integrations.serving.schedule import Stepped, read_schedule
from hicache_actors.integrations.transformers import kv_shape_of
from hicache_actors.memory.kv import KVTensors

from .kit import FAMILIES, PAGE_SIZE, answer, model_of, replayed, serving, tokens

DRIVERS = ("auto", "step")


def submitted(engine: ServingEngine, ids: list[int], n: int, rid: str) -> Generation:
    generation = engine.submit(ids, max_new_tokens=n, rid=rid)
    assert isinstance(generation, Generation)
    return generation


async def text(generation: Generation) -> list[int]:
    return [token async for token in generation]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_chunks_compute_what_the_model_computes(family: str) -> None:
    model = model_of(family)
    ids = [tokens(1, 21), tokens(2, 13), tokens(3, 40)]
    with torch.inference_mode():
        wanted = [model(torch.tensor([each])).logits[0, -1] for each in ids]
    served = ServedModel(model, KVTensors.make(kv_shape_of(model, page_size=PAGE_SIZE), 32))
    pages = ((3, 9, 1), (2, 4), (5, 6, 7, 8, 10))
    start = [0, 0, 0]
    found: dict[int, torch.Tensor] = {}
    for chunks in ((8, 12, 5), (12, 1, 20), (1, 0, 15)):
        parts = [at for at in range(3) if chunks[at]]
        pieces = [Piece(ids[at][start[at] : start[at] + chunks[at]], start[at], pages[at]) for at in parts]
        found.update(zip(parts, served.forward(pieces), strict=True))
        start = [before + more for before, more in zip(start, chunks, strict=True)]
    served.detach()
    for at in range(3):
        torch.testing.assert_close(found[at], wanted[at], atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        assert torch.equal(model(torch.tensor([ids[0]])).logits[0, -1], wanted[0])


@pytest.mark.parametrize("driver", DRIVERS)
async def test_prompts_are_cut_and_mixed_with_decoding(driver: DriverKind, tmp_path: Path) -> None:
    model = model_of("llama")
    config = ServingConfig(max_step_tokens=16, max_running=8)
    with ScheduleRecorder(tmp_path / "schedule") as record:
        async with serving(model, pages=64, driver=driver, config=config, recorder=record) as s:
            early = submitted(s.engine, tokens(1, 10), 12, "early")
            late = submitted(s.engine, tokens(2, 60), 5, "late")
            texts = {"early": await text(early), "late": await text(late)}
    steps = [record for record in read_schedule(tmp_path / "schedule") if isinstance(record, Stepped)]
    assert max(sum(map(len, step.tokens)) for step in steps) == 16
    assert any(sorted(map(len, step.tokens)) == [1, 15] for step in steps)
    found = replayed(model, tmp_path / "schedule")
    assert {rid: each.tokens for rid, each in found.items()} == texts
    assert not any(each.different for each in found.values())


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_prefix_that_is_being_computed_is_waited_for_and_shared(driver: DriverKind) -> None:
    model = model_of("llama")
    shared = tokens(1, 48)
    async with serving(model, pages=64, driver=driver, config=ServingConfig(max_step_tokens=24, max_running=8)) as s:
        generations = [submitted(s.engine, shared + tokens(seed, 9), 3, f"r{seed}") for seed in range(2, 6)]
        other = submitted(s.engine, tokens(9, 20), 3, "other")
        accounts = {each.rid: (await each.finished()).account for each in (*generations, other)}
        assert s.engine.snapshot().computed_tokens < 48 + 4 * 12 + 23 + 10
    assert [(account.device, account.computed) for account in accounts.values() if account] == [
        (0, 57),
        (48, 9),
        (48, 9),
        (48, 9),
        (0, 20),
    ]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_the_next_turn_finds_what_was_generated(driver: DriverKind) -> None:
    model = model_of("llama")
    async with serving(model, pages=64, driver=driver) as s:
        history = tokens(1, 20)
        device = []
        for turn in range(4):
            generation = submitted(s.engine, history, 13, f"turn-{turn}")
            history += [*await text(generation), *tokens(turn, 3)]
            ending = await generation.finished()
            assert ending.account is not None
            device.append(ending.account.device)
    # after each turn prompt + 12 tokens have KV, in whole pages
    assert device == [0, 32, 48, 64]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_preempted_request_is_one_user_of_its_pages(driver: DriverKind) -> None:
    """Four requests that share nothing, in a pool for two: each comes back to its own pages, and nobody else uses them."""
    model = model_of("llama")
    async with serving(model, pages=14, host_pages=64, driver=driver, write_policy="write_through_selective") as s:
        generations = [submitted(s.engine, tokens(seed, 20), 40, f"r{seed}") for seed in range(4)]
        for generation in generations:
            await text(generation)
        shown = s.engine.snapshot()
        assert shown.preemptions > 0
        assert max(node.hits for node in s.cache.core.state.tree.table.values()) == 1
        assert s.cache.snapshot().flows["write_back"].pages == 0
        again = submitted(s.engine, [*tokens(0, 20), 7], 2, "another")
        assert (await again.finished()).account is not None


@pytest.mark.parametrize("driver", DRIVERS)
async def test_the_youngest_gives_way_when_the_pool_is_full(driver: DriverKind, tmp_path: Path) -> None:
    model = model_of("llama")
    with ScheduleRecorder(tmp_path / "schedule") as record:
        async with serving(model, pages=14, host_pages=64, driver=driver, recorder=record) as s:
            generations = [submitted(s.engine, tokens(seed, 20), 40, f"r{seed}") for seed in range(4)]
            texts = {each.rid: await text(each) for each in generations}
            endings = [await each.finished() for each in generations]
            assert s.engine.snapshot().preemptions > 0
    assert endings[0].preemptions == 0
    assert all(ending.reason == "length" for ending in endings)
    found = replayed(model, tmp_path / "schedule")
    assert {rid: each.tokens for rid, each in found.items()} == texts
    assert not any(each.different for each in found.values())


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("depth", [1, 2])
async def test_chats_with_aborts_leave_every_pool_whole(driver: DriverKind, depth: int, tmp_path: Path) -> None:
    model, backend = model_of("qwen3"), MemoryBackend()
    chance = random.Random(depth)
    config = ServingConfig(max_step_tokens=24, max_running=6, steps_in_flight=1 if depth == 1 else 2)
    texts: dict[str, list[int]] = {}

    async def chat(engine: ServingEngine, seed: int) -> None:
        history = tokens(seed % 3, 17) + tokens(seed, 6)
        for turn in range(3):
            generation = submitted(engine, history, 10, f"{seed}/{turn}")
            if chance.random() < 0.5:
                for _ in range(chance.randrange(40)):
                    await asyncio.sleep(0.0002)
                generation.abort()
            got = await text(generation)
            if generation.ending is not None and generation.ending.reason == "length":
                texts[generation.rid] = got
            history += [*got, *tokens(turn, 2)]

    with ScheduleRecorder(tmp_path / "schedule") as record:
        async with serving(
            model, pages=24, host_pages=40, backend=backend, driver=driver, config=config, recorder=record
        ) as s:
            await asyncio.gather(*(chat(s.engine, seed) for seed in range(8)))
            figures = s.engine.snapshot()
            assert figures.finished + figures.aborted == 24
    assert len(texts) >= 8
    found = replayed(model, tmp_path / "schedule")
    assert {rid: found[rid].tokens for rid in texts} == texts
    assert not any(each.different for each in found.values())


async def test_one_request_can_fill_the_whole_pool() -> None:
    async with serving(model_of("llama"), pages=6, host_pages=16) as s:
        first = await answer(s.engine, tokens(1, 30), 18)
        assert len(first) == 18
        again = await answer(s.engine, tokens(1, 30), 18)
        assert len(again) == 18
