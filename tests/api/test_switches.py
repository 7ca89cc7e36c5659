"""Kill switches: a cache that keeps nothing, and one that serves nobody.  The engines do not know."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
import structlog
import torch

from hicache_actors import Config, HiCache, KVTensors, Prompt
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Hanging
from hicache_actors.cache.shadow_mode import ShadowSnapshot
from hicache_actors.cache.switches import DISABLED_VARIABLE, why_disabled
from hicache_actors.core.words import Match, Shortfall
from hicache_actors.errors import ConfigError, TransferError, UsageError
from hicache_actors.testing.engines import Answer, NoRoom, StepEngine
from hicache_actors.testing.pools import check_whole
from hicache_actors.testing.small import SHAPE, Small, evict_device, open_small, prompt, small_config
from hicache_actors.transfer.completions import Completion

LOOPS = pytest.mark.parametrize("anyio_backend", ["virtual:1", "virtual:2", "asyncio", "uvloop"], indirect=True)


def off(**settings: Any) -> Config:
    return msgspec.structs.replace(small_config(**settings), enabled=False)


def shadow(**settings: Any) -> Config:
    return msgspec.structs.replace(small_config(**settings), shadow=True)


# -- disabled -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("enabled", "value", "disabled"),
    [
        (True, None, False),
        (True, "0", False),
        (True, "", False),
        (False, "0", True),
        (True, "1", True),
        (False, "1", True),
    ],
)
def test_the_environment_can_only_switch_off(enabled: bool, value: str | None, disabled: bool) -> None:
    environment = {} if value is None else {DISABLED_VARIABLE: value}
    assert (why_disabled(Config(enabled=enabled), environment) is not None) is disabled


def test_an_unclear_switch_is_refused() -> None:
    with pytest.raises(ConfigError, match=DISABLED_VARIABLE):
        why_disabled(Config(), {DISABLED_VARIABLE: "yes"})


@LOOPS
async def test_every_verb_of_a_disabled_cache_works(anyio_backend: object) -> None:
    backend = MemoryBackend()
    async with open_small(config=off(), backend=backend) as small:
        cache, asked = small.cache, prompt(5)
        assert cache.state == "disabled"
        answers = [await small.engine.answer(asked, new_tokens=3) for _ in range(3)]
        assert {answer.tokens for answer in answers} == {answers[0].tokens}
        assert answers[2].account.reasons == {"open_page": 1, "disabled": 20}
        assert cache.match(asked) == Match(0, 0, 0)
        assert await cache.prefetch(asked, "r").wait() == 0
        lease = cache.lease(asked, "r")
        load = lease.load()
        assert not isinstance(load, Shortfall)
        assert (await load.verdict()).failed is None
        assert not isinstance(lease.allocate(21), Shortfall)
        committed = lease.commit(21)
        assert (committed.published_pages, committed.private_pages, committed.failed) == (0, 6, None)
        lease.release()
        assert (await cache.stored(asked, 1.0)).tokens == 0
        assert await cache.drain(1.0) == 0
        await cache.reset()
        at = cache.snapshot()
        assert (at.core.tree_pages, at.core.host.total_pages, at.storage) == (0, 0, None)
        assert sum(flow.seconds.count for flow in at.flows.values()) == 0
    assert backend.stats() == {"objects": 0}


async def test_the_environment_wins_and_nothing_outside_is_touched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(DISABLED_VARIABLE, "1")
    url = f"file://{tmp_path}/store"
    async with open_small(config=small_config(url=url, host_pages=10**9)) as small:  # more than any machine has
        await small.engine.answer(prompt(5))
        assert small.cache.state == "disabled"
        assert "device" in small.cache.report.text
    assert os.listdir(tmp_path) == []


async def test_a_step_engine_needs_no_branch() -> None:
    answers: dict[bool, dict[str, Answer]] = {}
    for enabled in (True, False):
        config = msgspec.structs.replace(small_config(), enabled=enabled)
        async with open_small(device_pages=14, config=config, driver="step") as small:
            engine = StepEngine(small.cache, small.model)
            prompts = [(f"r{at}", prompt(5, family=at % 2)) for at in range(6)]
            answers[enabled] = await anyio.to_thread.run_sync(engine.run, prompts)
            engine.close()
            if not enabled:
                check_whole(small.cache.core)
    assert {rid: answer.tokens for rid, answer in answers[True].items()} == {
        rid: answer.tokens for rid, answer in answers[False].items()
    }
    assert sum(answer.account.device for answer in answers[False].values()) == 0


# -- shadow mode --------------------------------------------------------------------------------------------------------


async def compared(small: Small) -> ShadowSnapshot:
    """After all comparisons have ended."""
    await small.cache.pipelines.idle()
    at = small.cache.snapshot().shadow
    assert at is not None
    return at


@LOOPS
async def test_what_every_tier_has_is_compared_and_nobody_is_served(anyio_backend: object) -> None:
    async with open_small(device_pages=24, config=shadow(), backend=MemoryBackend()) as small:
        asked = prompt(5)
        first = await small.engine.answer(asked)
        assert await compared(small) == ShadowSnapshot(0, 0, 0)
        again = await small.engine.answer(asked)
        assert again.tokens == first.tokens
        assert again.account.reasons == {"open_page": 1, "shadow": 20}
        assert small.cache.match(asked) == Match(0, 0, 0)
        assert await compared(small) == ShadowSnapshot(5, 0, 0)  # from the device
        await evict_device(small)
        await small.engine.answer(asked)
        assert await compared(small) == ShadowSnapshot(10, 0, 0)  # from the host
        await small.cache.drain(5.0)
        await small.cache.reset()
        await small.engine.answer(asked)
        assert await compared(small) == ShadowSnapshot(15, 0, 0)  # from storage
        assert small.cache.snapshot().core.fetches.fulfilled_pages == 5


async def test_a_difference_is_counted_each_time_and_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = structlog.testing.LogCapture()
    monkeypatch.setattr(
        "hicache_actors.cache.shadow_mode.bind_log",
        lambda **_: structlog.wrap_logger(None, processors=[told], wrapper_class=structlog.BoundLogger),
    )
    async with open_small(device_pages=24, config=shadow()) as small:
        asked = prompt(5)
        await small.engine.answer(asked)
        spoil(small.cache, page=small.cache.core.lease(asked, "look").pages[2])
        small.cache.core.release(small.cache.core.state.leases["look"])
        for _ in range(2):
            await small.engine.answer(asked)
        assert await compared(small) == ShadowSnapshot(8, 2, 0)
    assert [(line["event"], line["page_hash"]) for line in told.entries] == [
        ("shadow_page_differs", asked.page_hashes(4, 3)[2].hex())
    ]


def spoil(cache: HiCache, page: int) -> None:
    (keys, _) = cache.kv.layer(1)
    keys[page] += 1


async def test_not_a_number_equals_itself() -> None:
    """Bytes are compared, not numbers."""
    async with open_small(device_pages=24, config=shadow()) as small:
        asked = prompt(3)
        for _ in range(2):
            lease = small.cache.lease(asked, "r")
            lease.load()
            pages = lease.allocate(len(asked))
            assert not isinstance(pages, Shortfall)
            for layer in range(SHAPE.layers):
                for tensor in small.cache.kv.layer(layer):
                    tensor[torch.tensor(list(pages))] = float("nan")
            lease.commit(len(asked))
            lease.release()
        assert await compared(small) == ShadowSnapshot(3, 0, 0)


@LOOPS
async def test_nobody_is_refused_for_the_sake_of_a_comparison(anyio_backend: object) -> None:
    async with open_small(device_pages=7, config=shadow()) as small:
        asked = prompt(5)
        first = await small.engine.answer(asked)
        await small.cache.drain(5.0)  # so that its pages could go at once
        again = await small.engine.answer(asked)  # six pages of seven, and five are pinned to be compared
        assert again.tokens == first.tokens
        assert await compared(small) == ShadowSnapshot(0, 0, 5)
        with pytest.raises(NoRoom):
            await small.engine.answer(prompt(9))


async def test_chunks_and_late_events_are_compared_when_they_are_there() -> None:
    async with open_small(device_pages=24, config=shadow()) as small:
        asked = prompt(5)
        await small.engine.answer(asked)
        lease = small.cache.lease(asked, "r")
        pages = lease.allocate(len(asked))
        assert not isinstance(pages, Shortfall)
        small.model.forward(asked, pages, 0, 9)
        lease.commit(9)
        late = Completion()
        lease.commit(len(asked), after=late)  # the rest is not computed yet
        lease.release()
        await anyio.sleep(0.01)
        small.model.forward(asked, pages, 0, len(asked))
        late.finish()
        assert await compared(small) == ShadowSnapshot(5, 0, 0)


async def test_a_failed_load_leaves_pages_unchecked() -> None:
    async with open_small(device_pages=24, config=shadow()) as small:
        asked = prompt(5)
        first = await small.engine.answer(asked)
        await evict_device(small)
        small.device.fail_next(TransferError("planted"), stream="load")
        answer = await small.engine.answer(asked)
        assert (answer.tokens, answer.retries) == (first.tokens, 0)
        at = await compared(small)
        assert at.different_pages == 0
        assert at.unchecked_pages > 0


@LOOPS
async def test_cancelled_requests_leave_nothing_behind(anyio_backend: object) -> None:
    backend = Hanging(MemoryBackend(), ("exists",))
    async with open_small(device_pages=24, config=shadow(), backend=backend) as small:
        for patience_s in (0.0, 0.001, 0.02):
            with anyio.move_on_after(patience_s):
                async with small.cache.acquire(prompt(5), rid="r"):
                    raise AssertionError("the store hangs")
        assert small.cache.snapshot().core.leases == 0
        task = asyncio.ensure_future(small.engine.answer(prompt(5)))
        await anyio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        backend.release()


@LOOPS
async def test_requests_that_come_and_go_at_random_leave_whole_pools(anyio_backend: object) -> None:
    draw = random.Random(7)
    async with open_small(device_pages=30, config=shadow(host_pages=24), backend=MemoryBackend()) as small:

        async def request(asked: Prompt, patience_s: float) -> None:
            with anyio.move_on_after(patience_s), contextlib.suppress(NoRoom):
                await small.engine.answer(asked)

        for _ in range(10):
            async with anyio.create_task_group() as group:
                for _ in range(4):
                    asked = prompt(draw.randrange(1, 8), family=draw.randrange(3))
                    group.start_soon(request, asked, draw.choice([0.0001, 0.001, 0.01, 5.0]))
            if draw.random() < 0.2:
                await small.cache.reset()
        at = await compared(small)
        assert at.different_pages == 0
        assert at.equal_pages > 0


async def test_a_step_engine_in_shadow_mode() -> None:
    async with open_small(device_pages=40, config=shadow(), driver="step", backend=MemoryBackend()) as small:
        engine = StepEngine(small.cache, small.model)
        for turn in range(3):
            prompts = [(f"r{turn}.{at}", prompt(5, family=at)) for at in range(3)]
            answers = await anyio.to_thread.run_sync(engine.run, prompts)
        engine.close()
        assert len({answer.tokens for answer in answers.values()}) == 3
        assert sum(answer.account.computed for answer in answers.values()) == 9 * 21
        at = small.cache.snapshot().shadow
        assert at is not None
        assert at.different_pages == 0
        assert at.equal_pages == 2 * 3 * 5


async def test_a_request_that_is_refused_its_second_lease_keeps_no_first() -> None:
    async with open_small(config=shadow()) as small:
        other = small.cache.lease(prompt(2), "r (cached)")  # as the shadow would call it
        with pytest.raises(UsageError, match="lease"):
            small.cache.lease(prompt(2), "r")
        other.release()
        small.cache.lease(prompt(2), "r").release()


async def test_a_disabled_cache_has_no_shadow() -> None:
    config = msgspec.structs.replace(shadow(), enabled=False)
    async with HiCache.open(config, KVTensors.make(SHAPE, 8)) as cache:
        assert cache.snapshot().shadow is None
