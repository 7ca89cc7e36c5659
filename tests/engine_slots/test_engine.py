"""The toy engine that owns its blocks, on all tiers, with every byte checked."""

from __future__ import annotations

import random

import anyio.to_thread
import msgspec
import pytest

from hicache_actors import ConfigError, HiCache, Shortfall, UsageError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.config import HostLayout
from hicache_actors.core.news import LoadEnd, SaveEnd, StepNews
from hicache_actors.keys.scope import Scope
from hicache_actors.memory.kv import KVTensors
from hicache_actors.testing.block_engine import BlockEngine
from hicache_actors.testing.small import SHAPE, open_small, prompt, small_config
from hicache_actors.transfer.completions import Completion

from .kit import engine, reference, run


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
async def test_an_engine_with_its_own_blocks_is_served_by_host_and_storage(layout: HostLayout) -> None:
    backend = MemoryBackend()
    asked = [(f"r{family}", prompt(5, family=family)) for family in range(4)]
    async with engine(device_pages=12, host_pages=48, backend=backend, layout=layout) as (small, toy, _):
        first = dict(await run(toy, asked, 6))
        assert {rid: answer.tokens for rid, answer in first.items()} == {
            rid: reference(small, each, 6) for rid, each in asked
        }
        again = await run(toy, asked, 6)
        assert all(again[rid].tokens == first[rid].tokens for rid in first)
        assert sum(answer.loaded_tokens for answer in again.values()) > 0
        assert small.cache.core.usage().served.storage == 0
    async with engine(device_pages=12, host_pages=48, backend=backend, layout=layout) as (small, toy, _):
        later = await run(toy, asked, 6)
        assert all(later[rid].tokens == first[rid].tokens for rid in first)
        assert small.cache.core.usage().served.storage > 0


async def test_what_the_engine_has_itself_is_not_loaded() -> None:
    async with engine(device_pages=40, host_pages=48) as (small, toy, _):
        await run(toy, [("a", prompt(5))])
        longer = await run(toy, [("b", prompt(8))])
        assert (longer["b"].local_tokens, longer["b"].loaded_tokens) == (20, 0)
        served = small.cache.core.usage().served
        assert served.device == 20


async def test_scopes_share_no_blocks() -> None:
    async with engine(device_pages=40, host_pages=48) as (_, toy, _):
        await run(toy, [("a", prompt(5))])
        other = await run(toy, [("b", prompt(5, scope=Scope(salt="tenant")))])
        assert (other["b"].local_tokens, other["b"].loaded_tokens) == (0, 0)


@pytest.mark.parametrize("seed", range(4))
async def test_aborts_at_any_moment_leave_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)

    def abort_some(toy: BlockEngine, step: int) -> None:
        for rid in toy.open_rids():
            if rng.random() < 0.08:
                toy.abort(rid)

    asked = [(f"r{at}", prompt(rng.randrange(1, 8), family=rng.randrange(5))) for at in range(60)]
    async with engine(
        device_pages=24, host_pages=24, backend=MemoryBackend(), on_step=abort_some, close_timeout_s=5.0
    ) as (small, toy, _):
        answers = await run(toy, asked, 3)
        assert toy.stats["aborted"] > 5
        assert toy.stats["aborted_in_flight"] > 0
        assert len(answers) + toy.stats["aborted"] == len(asked)
        for rid, each in asked[::5]:
            if rid in answers:
                assert answers[rid].tokens == reference(small, each, 3)


async def test_begin_step_names_what_was_agreed() -> None:
    async with open_small(driver="step", slots="engine", device_pages=20) as small:
        cache, asked = small.cache, prompt(4)

        def act() -> None:
            assert cache.begin_step() == StepNews()
            small.model.forward(asked, range(5), 0, len(asked))
            save_id = cache.save_from(asked, "r", [0, 1, 2, 3], 0, after=None)
            cache.end_step()
            saves: list[SaveEnd] = []
            ended: list[str] = []
            while cache.needs_step:
                news = cache.begin_step()
                saves += news.saves
                ended += news.ended
                cache.end_step()
            assert [(end.id, end.rid, end.saved_pages, end.reason) for end in saves] == [(save_id, "r", 4, None)]
            assert ended == [save_id]
            cache.begin_step()
            assert cache.lookup(asked, "r") == 16
            load = cache.load_into("r", [10, 11, 12, 13], 0, after=None)
            assert not isinstance(load, Shortfall)
            cache.end_step()
            assert all(load.wait(layer, 5.0) for layer in range(SHAPE.layers))
            loads: list[LoadEnd] = []
            ended = []
            while cache.needs_step:
                news = cache.begin_step()
                loads += news.loads
                ended += news.ended
                cache.end_step()
            (end,) = loads
            assert (end.id, end.rids, end.result.valid_tokens, end.result.failed) == (load.id, ("r",), 16, None)
            assert load.result() == end.result
            assert ended == [load.id]
            small.model.forward(asked, [10, 11, 12, 13, 14], 16, len(asked))
            cache.finish("r")  # outside a step: queued
            cache.begin_step()
            assert not cache.core.state.pins.all
            cache.end_step()

        await anyio.to_thread.run_sync(act)


async def test_a_step_in_which_lookups_wait_is_an_empty_one() -> None:
    async with open_small(driver="step", slots="engine", backend=MemoryBackend()) as small:
        cache = small.cache
        await cache.begin_step_async()
        assert cache.lookup(prompt(4), "r") is None
        cache.end_step()
        assert cache.driver.pace_s > 0  # type: ignore[attr-defined]  # a step driver
        await cache.begin_step_async()
        cache.finish("r")
        cache.end_step()


async def test_calls_belong_into_steps_and_on_their_thread() -> None:
    async with open_small(driver="step", slots="engine") as small:
        cache = small.cache
        with pytest.raises(UsageError, match="begin_step"):
            cache.lookup(prompt(2), "r")
        await cache.begin_step_async()
        with pytest.raises(UsageError, match="request id"):
            cache.lookup(prompt(2), "")
        with pytest.raises(UsageError, match="event"):
            cache.save_from(prompt(2), "r", [0], 0, after=object())  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="owns its blocks"):
            cache.lease(prompt(2), "r")
        cache.end_step()
        with pytest.raises(UsageError, match="thread"):
            await anyio.to_thread.run_sync(cache.lookup, prompt(2), "r")
        await anyio.to_thread.run_sync(cache.finish, "r")  # any thread


async def test_a_finish_with_an_event_waits_for_it() -> None:
    async with open_small(driver="step", slots="engine", device_pages=20) as small:
        cache, asked, last_pass = small.cache, prompt(4), Completion()

        def act() -> None:
            cache.begin_step()
            small.model.forward(asked, range(5), 0, len(asked))
            cache.save_from(asked, "r", [0, 1, 2, 3], 0, after=None)
            cache.end_step()
            while cache.needs_step:
                cache.begin_step()
                cache.end_step()
            cache.begin_step()
            assert cache.lookup(asked, "r") == 16
            cache.finish("r", after=last_pass)
            cache.end_step()
            cache.begin_step()
            assert cache.core.usage().host.evictable_pages == 0
            cache.end_step()
            last_pass.finish()
            while cache.needs_step:
                cache.begin_step()
                cache.end_step()
            assert cache.core.usage().host.evictable_pages == 4

        await anyio.to_thread.run_sync(act)


@pytest.mark.parametrize(
    ("slots", "driver", "settings", "field"),
    [
        ("engine", "auto", {}, "slots"),
        ("mine", "step", {}, "slots"),
        ("engine", "step", {"shadow": True}, "shadow"),
    ],
)
async def test_what_does_not_fit_is_refused(slots: str, driver: str, settings: dict[str, object], field: str) -> None:
    config = msgspec.structs.replace(small_config(), **settings)
    with pytest.raises(ConfigError) as caught:
        async with HiCache.open(config, KVTensors.make(SHAPE, 4), slots=slots, driver=driver):  # type: ignore[arg-type]
            raise AssertionError("it opened")
    assert caught.value.field == field
    assert caught.value.fix


async def test_owned_slots_have_their_own_verbs() -> None:
    async with open_small() as small:
        with pytest.raises(UsageError, match='slots="engine"'):
            small.cache.lookup(prompt(2), "r")
