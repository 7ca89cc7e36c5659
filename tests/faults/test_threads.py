"""Everything at once on real threads: copies, disk, forward passes, clients who leave, and faults in between."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from hicache_actors import TransferError
from hicache_actors.backends.file import FileBackend
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Fault, Faulty, Schedule, Slow, at_random
from hicache_actors.errors import BackendError
from hicache_actors.runtime import Workers
from hicache_actors.testing.engines import NoRoom, StepEngine
from hicache_actors.testing.lives import reference_token
from hicache_actors.testing.pools import check_conservation, check_whole
from hicache_actors.testing.small import Small, open_small, prompt

from .kit import nothing_left

LOOPS = pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)
CLIENTS = 6
REQUESTS = 8


def _schedule(seed: int) -> Schedule:
    return at_random(
        seed,
        {
            ("read", Fault.FLIP): 0.05,
            ("read", Fault.MISS): 0.05,
            ("read", BackendError): 0.02,
            ("write", Fault.FAIL): 0.05,
            ("write", Fault.TORN): 0.05,
            ("exists", Fault.LIE): 0.1,
        },
    )


async def _client(small: Small, rng: random.Random, leave_rate: float) -> int:
    """Serve some requests, leave in the middle of others -> how many were served."""
    served = 0
    for _ in range(REQUESTS):
        asked = prompt(rng.randint(1, 6), family=rng.randint(0, 4))
        answer = asyncio.ensure_future(small.engine.answer(asked, max_retries=20))
        if rng.random() < leave_rate:
            await anyio.sleep(rng.random() * 0.005)
            answer.cancel()
        try:
            assert (await answer).tokens == (reference_token(small, asked),)
            served += 1
        except (asyncio.CancelledError, NoRoom):
            await anyio.lowlevel.checkpoint()
        if rng.random() < 0.1:
            await small.cache.reset()
        if rng.random() < 0.2:
            small.device.fail_next(TransferError("planted"), after=rng.randint(0, 3))
    return served


@LOOPS
@pytest.mark.parametrize("seed", [1, 2])
async def test_clients_come_and_go_while_copies_and_disk_fail(anyio_backend: object, seed: int, tmp_path: Path) -> None:
    threads = Workers("disk", 4)
    backend = Faulty(FileBackend(f"file://{tmp_path}", threads), _schedule(seed))
    async with open_small(device_pages=32, host_pages=40, backend=backend, check_pools=False) as small:
        rng = random.Random(seed)
        clients = [_client(small, random.Random(rng.random()), 0.3) for _ in range(CLIENTS)]
        served = await asyncio.gather(*clients)
        assert sum(served) > CLIENTS
        assert small.cache.state == "open"
        await small.cache.reset()  # nothing is tried again
        await nothing_left(small)
        small.cache.core.check()
        check_whole(small.cache.core)
    threads.close(5.0)


@LOOPS
async def test_a_step_engine_in_its_own_thread_beside_failing_copies_and_store(anyio_backend: object) -> None:
    backend = Faulty(Slow(MemoryBackend(), latency_s=0.0005), _schedule(3))
    async with open_small(device_pages=9, host_pages=24, backend=backend, driver="step") as small:
        engine = StepEngine(small.cache, small.model)
        small.device.fail_next(TransferError("planted"), works=3, after=4)
        wanted = {family: reference_token(small, prompt(5, family=family)) for family in range(4)}
        for turn in range(4):
            small.device.fail_next(TransferError("planted"), after=turn, stream="load")
            prompts = [(f"{turn}.{family}", prompt(5, family=family)) for family in range(4)]
            answers = await anyio.to_thread.run_sync(engine.run, prompts)
            assert {rid: answers[rid].tokens for rid, _ in prompts} == {
                rid: (wanted[family],) for family, (rid, _) in enumerate(prompts)
            }
        engine.close()
        check_conservation(small.cache.core)
        assert small.cache.state == "open"
