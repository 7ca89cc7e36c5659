"""Loads that are late or fail, stores that fail: later tokens, never wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_actors import Prompt, TransferError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Fault, Faulty, Slow, Verb, at_random
from hicache_actors.cache.assembly import DriverKind
from hicache_actors.integrations.serving import Generation, ScheduleRecorder, ServingEngine

from .kit import Serving, answer, eventually, model_of, replayed, serving, tokens

DRIVERS = ("auto", "step")


async def evict(s: Serving, seed: int = 90) -> None:
    await answer(s.engine, tokens(seed, 8 * s.served.kv.pages - 16), 8, rid=f"evict-{seed}")


def submitted(engine: ServingEngine, ids: list[int], n: int, rid: str) -> Generation:
    generation = engine.submit(ids, max_new_tokens=n, rid=rid)
    assert isinstance(generation, Generation)
    return generation


@pytest.mark.parametrize("driver", DRIVERS)
async def test_b101_who_found_no_room_for_its_fetch_asks_again(driver: DriverKind) -> None:
    """Given four stored prompts, each of which needs all the host memory that fetches may have.
    When all are asked for at once.
    Then each is served from storage: who finds the memory in the hands of others asks again when they are done."""
    model = model_of("llama")
    memory, prompts = MemoryBackend(), [tokens(seed, 32 * 8 + 1) for seed in range(1, 5)]
    async with serving(model, pages=160, host_pages=200, backend=memory, driver=driver) as s:
        wanted = [await answer(s.engine, prompt, 2) for prompt in prompts]
        for prompt in prompts:
            assert (await s.cache.stored(Prompt(prompt), 30.0)).tokens == 32 * 8
    async with serving(model, pages=160, host_pages=64, backend=Slow(memory, 0.02), driver=driver) as s:
        generations = [submitted(s.engine, prompt, 2, f"r{n}") for n, prompt in enumerate(prompts)]
        assert [[token async for token in generation] for generation in generations] == wanted
        accounts = [(await generation.finished()).account for generation in generations]
        assert [account.storage for account in accounts if account] == [32 * 8] * 4


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("layer", [0, 1])
async def test_a_failed_load_is_computed_again(driver: DriverKind, layer: int, tmp_path: Path) -> None:
    model = model_of("llama")
    with ScheduleRecorder(tmp_path / "schedule") as record:
        async with serving(model, pages=12, driver=driver, recorder=record) as s:
            first = await answer(s.engine, tokens(1, 44), 8, rid="first")
            await evict(s)
            s.device.fail_next(TransferError("planted"), after=layer, stream="load")
            generation = submitted(s.engine, tokens(1, 44), 8, "again")
            again = [token async for token in generation]
            ending = await generation.finished()
    assert again == first
    assert ending.retries == 1
    assert ending.account is not None
    assert ending.account.host == 0
    found = replayed(model, tmp_path / "schedule")
    assert found["again"].tokens == first
    assert not any(each.different for each in found.values())


@pytest.mark.parametrize("driver", DRIVERS)
async def test_no_token_comes_before_the_verdict(driver: DriverKind) -> None:
    async with serving(model_of("llama"), pages=12, driver=driver) as s:
        first = await answer(s.engine, tokens(1, 44), 8)
        await evict(s)
        gate = s.device.gate("load")
        gate.allow(1)
        generation = submitted(s.engine, tokens(1, 44), 8, "gated")
        await eventually(lambda: s.engine.snapshot().steps_in_flight > 0)
        assert generation.ending is None  # layer 0 has been read, layer 1 is waited for
        # Somebody who needs nothing of it is served once that pass is over; the gated one gives no token before it.
        assert s.engine.snapshot().running == 1
        gate.open()
        assert [token async for token in generation] == first


@pytest.mark.parametrize("driver", DRIVERS)
async def test_others_do_not_wait_for_a_load(driver: DriverKind) -> None:
    async with serving(model_of("llama"), pages=24, driver=driver) as s:
        first = await answer(s.engine, tokens(1, 44), 8)
        await evict(s)
        busy = submitted(s.engine, tokens(2, 10), 60, "busy")
        await anext(busy)
        gate = s.device.gate("load")
        late = submitted(s.engine, tokens(1, 44), 8, "late")
        assert len([token async for token in busy]) == 59
        assert late.ending is None
        gate.open()
        assert [token async for token in late] == first


@pytest.mark.parametrize("driver", DRIVERS)
async def test_an_abort_during_a_load_takes_nothing_along(driver: DriverKind) -> None:
    async with serving(model_of("llama"), pages=12, driver=driver) as s:
        first = await answer(s.engine, tokens(1, 44), 8)
        await evict(s)
        gate = s.device.gate("load")
        generation = submitted(s.engine, tokens(1, 44), 8, "gated")
        await eventually(lambda: s.engine.snapshot().running > 0)
        generation.abort()
        assert (await generation.finished()).reason == "aborted"
        gate.open()
        assert await answer(s.engine, tokens(1, 44), 8) == first


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_store_that_fails_costs_reuse_only(driver: DriverKind, tmp_path: Path) -> None:
    model = model_of("qwen3")
    rates: dict[tuple[Verb, Fault | type[Exception]], float] = {
        ("read", Fault.FLIP): 0.3,
        ("read", OSError): 0.2,
        ("write", OSError): 0.2,
        ("exists", OSError): 0.2,
    }
    backend = Faulty(MemoryBackend(), at_random(1, rates))
    with ScheduleRecorder(tmp_path / "schedule") as record:
        async with serving(model, pages=10, host_pages=14, backend=backend, driver=driver, recorder=record) as s:
            texts = {}
            for turn in range(3):
                for seed in range(4):
                    rid = f"{seed}/{turn}"
                    texts[rid] = await answer(s.engine, tokens(seed, 40), 6, rid=rid)
            await s.cache.stored(Prompt(tokens(0, 40)), 1.0)
    found = replayed(model, tmp_path / "schedule")
    assert {rid: each.tokens for rid, each in found.items()} == texts
    assert not any(each.different for each in found.values())
