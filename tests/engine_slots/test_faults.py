"""Copies that hang, and engines that break the rules: blocks are the engine's again only when their id is named ended."""

from __future__ import annotations

import pytest

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Fault, Faulty, at_random
from hicache_actors.config import Deadlines
from hicache_actors.errors import BackendError
from hicache_actors.testing.block_engine import BlockEngine
from hicache_actors.testing.small import Small, prompt
from hicache_actors.testing.toy_model import WrongBytes

from .kit import HeldModel, engine, reference, run

QUICK = Deadlines(load_s=0.05, write_back_s=0.05)


async def hang_a_load(small: Small, toy: BlockEngine) -> None:
    """A request's load hangs past its deadline, the request goes away, and another uses the blocks that are free by then."""
    a = prompt(5, family=1)
    await run(toy, [("a", a)])
    await run(toy, [("all", prompt(toy.pool.total - 1, family=3))])  # so that a is on the host only
    gate = small.device.gate("load")

    def watch(_: BlockEngine, step: int) -> None:
        if toy.stats["loads_failed"] and "a2" in toy.open_rids():
            toy.abort("a2")
        if "b" in toy.answers:
            gate.open()

    toy._on_step = watch
    gate.shut()
    await run(toy, [("a2", a), ("b", prompt(8, family=4))])
    assert toy.stats["loads_failed"] == toy.stats["aborted"] == 1
    # The copy has ended by now, wherever it has written.
    again = await run(toy, [("b2", prompt(9, family=4)), ("a3", prompt(6, family=1))])
    assert again["b2"].local_tokens == 32
    assert again["b2"].tokens == reference(small, prompt(9, family=4))
    assert again["a3"].tokens == reference(small, prompt(6, family=1))


async def test_blocks_of_a_hung_load_are_not_used_before_it_has_ended() -> None:
    async with engine(device_pages=18, host_pages=48, deadlines=QUICK) as (small, toy, _):
        await hang_a_load(small, toy)


async def test_blocks_that_are_used_again_at_the_verdict_hold_wrong_bytes() -> None:
    with pytest.raises(WrongBytes):
        async with engine(device_pages=12, host_pages=48, deadlines=QUICK, reuse="result", whole=False) as (
            small,
            toy,
            _,
        ):
            await hang_a_load(small, toy)


async def load_into_blocks_in_use(small: Small, toy: BlockEngine, model: HeldModel) -> list[bool]:
    """Passes of aborted requests still write blocks that the next one's load gets -> was it agreed before they ended?"""
    a, short = prompt(5, family=1), [prompt(0, family=family, extra=3) for family in (2, 3)]
    await run(toy, [("a", a)])
    model.held = {each.tolist()[0] for each in short}
    agreed: list[bool] = []

    def act(_: BlockEngine, step: int) -> None:
        if step > 3:
            for rid in toy.open_rids():
                if rid.startswith("short"):
                    toy.abort(rid)
        loading = [request for request in toy._running if request.load is not None]
        if loading:
            agreed.append(loading[0].load_agreed)
            if agreed[-1] or (toy._after_loads and len(agreed) > 20):
                model.go.set()

    toy._on_step = act
    answers = await run(toy, [("short1", short[0]), ("short2", short[1]), ("a2", a)])
    assert answers["a2"].tokens == reference(small, a)
    assert answers["a2"].loaded_tokens == 20
    return agreed


async def test_a_load_waits_for_the_pass_that_uses_its_blocks() -> None:
    async with engine(device_pages=6, host_pages=48) as (small, toy, model):
        agreed = await load_into_blocks_in_use(small, toy, model)
        assert not any(agreed[:20])


async def test_a_load_that_does_not_wait_brings_wrong_bytes() -> None:
    with pytest.raises(WrongBytes):
        async with engine(device_pages=6, host_pages=48, after_loads=False, whole=False) as (small, toy, model):
            await load_into_blocks_in_use(small, toy, model)


async def test_a_hung_save_keeps_its_blocks() -> None:
    held: list[tuple[int, int]] = []

    async with engine(device_pages=6, host_pages=48, deadlines=QUICK) as (small, toy, _):
        gate = small.device.gate("write_back")

        def watch(_: BlockEngine, step: int) -> None:
            if toy.stats["save_save_failed"]:
                held.append((toy.pool.free, len(toy._held)))
                gate.open()

        toy._on_step = watch
        gate.shut()
        asked = prompt(5)
        answers = await run(toy, [("a", asked)])
        assert answers["a"].tokens == reference(small, asked)
        assert held[0] == (1, 1), "five blocks are not the engine's yet"
        await run(toy, [("b", prompt(5, family=2))])
        assert (await run(toy, [("a2", asked)]))["a2"].tokens == reference(small, asked)


async def test_a_bad_store_costs_only_time() -> None:
    rates = {("read", Fault.FLIP): 0.2, ("read", BackendError): 0.2, ("write", Fault.FAIL): 0.3}
    backend = Faulty(MemoryBackend(), at_random(7, rates))  # type: ignore[arg-type]  # literals
    asked = [(f"r{at}", prompt(4, family=at % 4)) for at in range(12)]
    async with engine(device_pages=12, host_pages=12, backend=backend, prefetch_timeout_max_s=1.0) as (small, toy, _):
        answers = await run(toy, asked, 2)
        assert {rid: answers[rid].tokens for rid, _ in asked} == {rid: reference(small, each, 2) for rid, each in asked}
        assert sum(backend.injected.values()) > 0
