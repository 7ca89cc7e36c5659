"""The face of the engine: streams, refusals, endings, cancellation, errors."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hicache_actors import ConfigError, HiCache, HiCacheError, UsageError
from hicache_actors.cache.assembly import DriverKind
from hicache_actors.integrations.serving import (
    Generation,
    Piece,
    Refused,
    RequestRefused,
    ServedModel,
    ServingConfig,
    ServingEngine,
    sampled,
)
from hicache_actors.integrations.serving.request import Pass
from hicache_actors.integrations.transformers import kv_shape_of
from hicache_actors.keys.scope import Scope
from hicache_actors.memory.kv import KVTensors

from .kit import PAGE_SIZE, answer, eventually, model_of, serving, tokens

DRIVERS = ("auto", "step")


def submitted(engine: ServingEngine, ids: Sequence[int], n: int, **settings: Any) -> Generation:
    generation = engine.submit(ids, max_new_tokens=n, **settings)
    assert isinstance(generation, Generation)
    return generation


class Gated:
    """Holds a model's passes until `open`."""

    def __init__(self, served: ServedModel) -> None:
        self.entered, self._open = threading.Event(), threading.Event()
        self._forward = served.forward
        served.forward = self._wait  # type: ignore[method-assign]

    def _wait(self, pieces: Sequence[Piece], **settings: Any) -> torch.Tensor:
        self.entered.set()
        assert self._open.wait(30)
        return self._forward(pieces, **settings)

    def open(self) -> None:
        self._open.set()

    def shut(self) -> None:
        self._open.clear()


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_stop_token_is_the_last_one(driver: DriverKind) -> None:
    async with serving(model_of("llama"), pages=32, driver=driver) as s:
        whole = await answer(s.engine, tokens(1, 12), 10)
        stop = whole[4]
        generation = submitted(s.engine, tokens(1, 12), 10, stop_tokens=[stop])
        assert [token async for token in generation] == whole[: whole.index(stop) + 1]
        assert (await generation.finished()).reason == "stop"


async def test_refusals_are_values_with_a_reason() -> None:
    config = ServingConfig(max_running=1, max_waiting=2)
    async with serving(model_of("llama"), pages=8, config=config) as s:
        assert s.engine.submit(tokens(1, 60), max_new_tokens=5) == Refused("too_long", 65, 64)
        with pytest.raises(RequestRefused, match="too_long"):
            await answer(s.engine, tokens(1, 60), 5)
        gate = Gated(s.served)
        first = submitted(s.engine, tokens(1, 9), 2)
        await until(gate.entered)
        others = [submitted(s.engine, tokens(seed, 9), 2) for seed in (2, 3)]
        assert s.engine.submit(tokens(4, 9), max_new_tokens=2) == Refused("queue_full", 3, 2)
        assert s.engine.snapshot().refused == 3
        gate.open()
        assert [len([token async for token in each]) for each in (first, *others)] == [2, 2, 2]
    assert s.engine.submit(tokens(4, 9), max_new_tokens=2) == Refused("closing")


async def test_bad_requests_are_refused_before_anything_happens() -> None:
    async with serving(model_of("llama"), pages=8) as s:
        with pytest.raises(UsageError, match="empty prompt"):
            s.engine.submit([], max_new_tokens=1)
        with pytest.raises(UsageError, match="max_new_tokens = 0"):
            s.engine.submit([3], max_new_tokens=0)
        with pytest.raises(ValueError, match="token 251 is none of the model's 251"):
            s.engine.submit([3, 251], max_new_tokens=1)
        with pytest.raises(ValueError, match="-1"):
            s.engine.submit([-1], max_new_tokens=1)
        generation = submitted(s.engine, [3, 4], 2, rid="twice")
        with pytest.raises(UsageError, match="'twice' is running already"):
            s.engine.submit([3, 4], max_new_tokens=2, rid="twice")
        assert (await generation.finished()).reason == "length"
        assert (await submitted(s.engine, [3, 4], 2, rid="twice").finished()).reason == "length"


def test_settings_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_running = 9.*max_step_tokens = 8"):
        ServingConfig(max_running=9, max_step_tokens=8)
    with pytest.raises(ConfigError, match="max_waiting = 0"):
        ServingConfig(max_waiting=0)
    model = model_of("llama")
    with pytest.raises(ConfigError, match="another shape than the model's"):
        ServedModel(model, KVTensors.make(kv_shape_of(model_of("deepseek"), page_size=PAGE_SIZE), 4))
    model.config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(ConfigError, match="sliding_attention"):
        ServedModel(model, KVTensors.make(kv_shape_of(model, page_size=PAGE_SIZE), 4))


async def test_a_served_model_refuses_other_calls_until_it_is_detached() -> None:
    model = model_of("llama")
    served = ServedModel(model, KVTensors.make(kv_shape_of(model, page_size=PAGE_SIZE), 4))
    with pytest.raises(UsageError, match="detach"):
        model(torch.tensor([[3, 4]]))
    served.detach()
    assert model(torch.tensor([[3, 4]])).logits.shape == (1, 2, 251)


async def test_an_engine_wants_the_tensors_of_its_cache() -> None:
    async with serving(model_of("llama"), pages=4) as s:
        other = ServedModel(model_of("llama"), KVTensors.make(s.cache.kv.shape, 4))
        with pytest.raises(UsageError, match="other KV tensors"):
            async with ServingEngine.open(s.cache, other):
                raise AssertionError("not reached")


@pytest.mark.parametrize("driver", DRIVERS)
async def test_scopes_share_nothing(driver: DriverKind) -> None:
    async with serving(model_of("llama"), pages=32, driver=driver) as s:
        devices = []
        for salt in ("a", "b", "a"):
            generation = submitted(s.engine, tokens(1, 20), 2, scope=Scope(salt=salt))
            account = (await generation.finished()).account
            assert account is not None
            devices.append(account.device)
    assert devices == [0, 0, 16]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_draw_depends_on_its_seed_and_position_alone(driver: DriverKind) -> None:
    async with serving(model_of("llama"), pages=64, driver=driver) as s:

        async def draw(seed: int) -> list[int]:
            return await answer(s.engine, tokens(1, 12), 12, sampler=sampled(0.7, seed=seed, top_k=20))

        alone = await draw(1)
        other, again = await draw(2), await draw(1)
    assert again[0] == alone[0]
    assert len({tuple(alone), tuple(other)}) == 2


# -- leaving early ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("how", ["break", "drop", "cancel"])
async def test_leaving_a_stream_ends_its_request(driver: DriverKind, how: str) -> None:
    async with serving(model_of("llama"), pages=64, driver=driver) as s:
        gate = Gated(s.served)
        gate.open()
        if how == "break":
            async for _ in s.engine.generate(tokens(1, 12), max_new_tokens=400):
                gate.shut()  # it shall not come to its end meanwhile
                break
        elif how == "drop":
            generation = submitted(s.engine, tokens(2, 12), 400)
            await anext(generation)
            gate.shut()
            del generation
            gc.collect()
        else:
            reader = asyncio.ensure_future(answer(s.engine, tokens(3, 12), 400))
            await eventually(lambda: s.engine.snapshot().generated_tokens > 0)
            gate.shut()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        await eventually(lambda: s.engine.snapshot().aborted == 1)
        assert s.engine.snapshot().running == 0
        gate.open()


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_cancelled_reader_loses_no_token(driver: DriverKind) -> None:
    async with serving(model_of("llama"), pages=64, driver=driver) as s:
        whole = await answer(s.engine, tokens(1, 12), 20)
        generation = submitted(s.engine, tokens(1, 12), 20)
        got: list[int] = []

        async def read() -> None:
            async for token in generation:
                got.append(token)
                await asyncio.sleep(0)

        while len(got) < 20:
            reader = asyncio.ensure_future(read())
            for _ in range(3):
                await asyncio.sleep(0)
            reader.cancel()
            await asyncio.wait([reader])
        assert got == whole


@pytest.mark.parametrize("driver", DRIVERS)
async def test_pages_of_an_aborted_request_stay_taken_while_its_pass_is_computed(driver: DriverKind) -> None:
    async with serving(model_of("llama"), pages=8, driver=driver) as s:
        gate = Gated(s.served)
        generation = submitted(s.engine, tokens(1, 20), 4)
        await until(gate.entered)
        generation.abort()
        assert (await generation.finished()).reason == "aborted"
        assert s.cache.core.usage().device.free_pages <= 5
        gate.open()


@pytest.mark.parametrize("driver", DRIVERS)
async def test_closing_ends_what_runs(driver: DriverKind) -> None:
    async with serving(model_of("llama"), pages=32, driver=driver) as s:
        gate = Gated(s.served)
        generations = [submitted(s.engine, tokens(seed, 9), 100) for seed in range(3)]
        await until(gate.entered)
        gate.open()
    assert [each.ending is not None and each.ending.reason for each in generations] == ["aborted"] * 3


# -- errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_pass_that_raises_ends_its_requests_and_no_others(driver: DriverKind) -> None:
    async with serving(model_of("llama"), pages=32, driver=driver) as s:
        forward = s.served.forward

        def broken(pieces: Sequence[Piece], **settings: Any) -> torch.Tensor:
            if any(66 in piece.tokens for piece in pieces):
                raise ArithmeticError("planted")
            return forward(pieces, **settings)

        s.served.forward = broken  # type: ignore[method-assign]
        generation = submitted(s.engine, [66, 67], 5)
        with pytest.raises(ArithmeticError, match="planted"):
            await generation.finished()
        assert generation.ending is not None
        assert generation.ending.reason == "error"
        assert len(await answer(s.engine, [70, 71], 5)) in range(1, 6)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_sampler_that_fails_ends_its_request_and_no_others(driver: DriverKind) -> None:
    async with serving(model_of("llama"), pages=32, driver=driver) as s:

        def raises(logits: torch.Tensor, position: int) -> int:
            if position == 14:
                raise ArithmeticError("planted")
            return 5

        whole = await answer(s.engine, tokens(1, 12), 10)
        others = asyncio.ensure_future(answer(s.engine, tokens(1, 12), 10))
        generation = submitted(s.engine, tokens(2, 12), 10, sampler=raises)
        assert [await anext(generation), await anext(generation)] == [5, 5]
        with pytest.raises(ArithmeticError, match="planted"):
            await generation.finished()
        with pytest.raises(ValueError, match="chose 251"):
            await answer(s.engine, tokens(2, 12), 10, sampler=lambda logits, position: 251)
        assert len(await others) == len(whole)


async def test_several_may_wait_for_one_generation() -> None:
    async with serving(model_of("llama"), pages=32) as s:
        generation = submitted(s.engine, tokens(1, 12), 10)
        endings = asyncio.gather(generation.finished(), generation.finished())
        assert len([token async for token in generation]) == 10
        assert [ending.reason for ending in await endings] == ["length"] * 2


async def test_an_engine_that_breaks_ends_everybody_and_says_why() -> None:
    with pytest.raises(HiCacheError, match="planted"):  # noqa: PT012  the engine is open meanwhile
        async with serving(model_of("llama"), pages=32) as s:

            def broken(under_way: Sequence[Pass]) -> Pass | None:
                raise HiCacheError("planted")

            generation = submitted(s.engine, tokens(1, 9), 50)
            await anext(generation)
            s.engine._scheduler.plan = broken  # type: ignore[method-assign]
            with pytest.raises(HiCacheError, match="planted"):
                await generation.finished()
            with pytest.raises(HiCacheError, match="failed"):
                s.engine.submit(tokens(1, 9), max_new_tokens=1)


async def test_serving_survives_a_degraded_cache() -> None:
    async with serving(model_of("llama"), pages=32) as s:
        whole = await answer(s.engine, tokens(1, 20), 30)
        generation = submitted(s.engine, tokens(1, 20), 30)
        assert await anext(generation) == whole[0]
        await s.cache.reset()
        assert [token async for token in generation] == whole[1:]
        assert isinstance(s.cache, HiCache)
