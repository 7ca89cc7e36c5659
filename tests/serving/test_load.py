"""The engine under load: many chats at once, half of them aborted at any instant, and some loads fail.

Pools stay whole, memory does not grow, and what survives is what a run without a cache computes.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from hicache_actors import TransferError
from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Wrapper
from hicache_actors.cache.assembly import DriverKind
from hicache_actors.cuda_ext import ControlledDevice
from hicache_actors.integrations.serving import Generation, ScheduleRecorder, ServingConfig, ServingEngine

from .kit import model_of, replayed, serving, tokens

CHATS = 64
MIB = 1 << 20


class Load:
    """``CHATS`` chats of up to four turns on shared system prompts, until ``requests`` have been made; every second is aborted."""

    def __init__(self, engine: ServingEngine, device: ControlledDevice[Any], requests: int, seed: int) -> None:
        self.engine, self.device = engine, device
        self.texts: dict[str, list[int]] = {}
        self.made = self.aborted = 0
        self.rss: list[tuple[int, int]] = []  # (requests made, bytes)
        self._requests = requests
        self._chance = random.Random(seed)
        self._process = psutil.Process()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for chat in range(CHATS):
                group.create_task(self._chat(chat))

    async def _chat(self, chat: int) -> None:
        life = 0
        while self.made < self._requests:
            history = tokens(chat % 4, 24) + tokens(1000 * chat + life, self._chance.randrange(2, 20))
            for turn in range(self._chance.randrange(1, 5)):
                if self.made >= self._requests:
                    return
                answer = await self._turn(f"{chat}/{life}/{turn}", history)
                history += [*answer, *tokens(chat + turn, 3)]
            life += 1

    async def _turn(self, rid: str, history: list[int]) -> list[int]:
        self.made += 1
        if self.made % 200 == 0:
            gc.collect()
            self.rss.append((self.made, self._process.memory_info().rss))
        if self.made % 50 == 0:
            self.device.fail_next(TransferError("planted"), stream="load")
        n = 48 if self._chance.random() < 0.15 else self._chance.randrange(2, 12)
        generation = self.engine.submit(history, max_new_tokens=n, rid=rid)
        assert isinstance(generation, Generation)
        abort = self.made % 2 == 0
        if not abort:
            answer = [token async for token in generation]
            self.texts[rid] = answer
            if len(self.texts) > 400:  # a sample from all of the run
                del self.texts[self._chance.choice(list(self.texts))]
            return answer
        return await self._aborted(generation)

    async def _aborted(self, generation: Generation) -> list[int]:
        """Stop after some tokens, or after some turns of the loop: while it waits, fetches, loads, computes."""
        answer: list[int] = []
        self.aborted += 1
        if self._chance.random() < 0.5:
            wanted = self._chance.randrange(1, 4)
            async for token in generation:
                answer.append(token)
                if len(answer) == wanted:
                    break
        else:
            for _ in range(self._chance.randrange(200)):
                await asyncio.sleep(0)
        generation.abort()
        await generation.finished()
        return answer

    def slope_mib(self) -> float:
        """Growth per 1,000 requests over the second half of the run (least squares)."""
        points = self.rss[len(self.rss) // 2 :]
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        rise = sum((x - mean_x) * (y - mean_y) for x, y in points)
        return 1000 * rise / sum((x - mean_x) ** 2 for x, _ in points) / MIB


async def under_load(model: Any, path: Path, requests: int, driver: DriverKind) -> Load:
    config = ServingConfig(max_step_tokens=96, max_running=24, max_waiting=CHATS)
    with ScheduleRecorder(path) as record:
        async with serving(
            model,
            pages=128,
            host_pages=160,
            backend=Bounded(MemoryBackend(), 600),
            driver=driver,
            config=config,
            recorder=record,
        ) as s:
            load = Load(s.engine, s.device, requests, seed=1)
            await load.run()
            figures = s.engine.snapshot()
            assert figures.finished + figures.aborted == load.made == requests
            assert figures.waiting == figures.running == 0
            print(f"\n{figures}\n{s.cache.snapshot().counts}")
    return load


class Bounded(Wrapper):
    """A store that forgets what was written first: else it would be what grows."""

    def __init__(self, inner: Backend, objects: int) -> None:
        super().__init__(inner)
        self._limit = objects
        self._kept: dict[str, None] = {}

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        outcomes = await super().write(keys, buffers)
        self._kept.update(dict.fromkeys(keys))
        excess = list(self._kept)[: max(0, len(self._kept) - self._limit)]
        for key in excess:
            del self._kept[key]
        await self.delete(excess)
        return outcomes


def check_texts(model: Any, path: Path, texts: dict[str, list[int]]) -> None:
    found = replayed(model, path)
    assert {rid: found[rid].tokens for rid in texts} == texts
    assert not any(each.different for each in found.values())
    assert sum(each.reused_pages for each in found.values()) > len(texts)


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "schedule"
    (tmp_path / "schedule").unlink()


@pytest.mark.parametrize("driver", ["auto", "step"])
async def test_200_requests(driver: DriverKind, record: Path) -> None:
    model = model_of("llama")
    load = await under_load(model, record, 200, driver)
    assert load.aborted == 100
    assert len(load.texts) == 100
    check_texts(model, record, load.texts)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["auto", "step"])
async def test_5000_requests(driver: DriverKind, record: Path) -> None:
    model = model_of("llama")
    load = await under_load(model, record, 5000, driver)
    assert len(load.texts) >= 100
    check_texts(model, record, load.texts)
    print(
        f"RSS grows by {load.slope_mib():.2f} MiB per 1,000 requests; {load.rss[0][1] // MIB} to {load.rss[-1][1] // MIB}"
    )
    assert load.slope_mib() < 1
