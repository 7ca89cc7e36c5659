"""The cache is closed, or reset, at random moments with everything in flight."""

from __future__ import annotations

import asyncio
import random

import anyio
import pytest

from hicache_actors import StoppedError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Slow
from hicache_actors.config import Deadlines
from hicache_actors.core.words import Match
from hicache_actors.keys.prompt import Prompt
from hicache_actors.memory.host import HostMemory
from hicache_actors.testing.lives import other_tasks, reference_token, request, run_checked, stopped_or
from hicache_actors.testing.pools import check_conservation, check_whole
from hicache_actors.testing.small import Small, open_small, prompt
from hicache_actors.testing.witness import Witness

from .kit import nothing_left, stepping

MANY_SEEDS = pytest.mark.parametrize("seed", range(12))
FEW_SEEDS = pytest.mark.parametrize("seed", range(4))
DEADLINES = Deadlines(load_s=0.5, write_back_s=0.5, backup_s=0.5)


def _some_prompt(rng: random.Random) -> Prompt:
    return prompt(rng.randint(1, 7), family=rng.randint(0, 3))


async def _client(small: Small, rng: random.Random, wanted: dict[tuple[int, ...], int]) -> None:
    """Asks for prompts that share prefixes, one after the other."""
    while True:
        asked = _some_prompt(rng)
        key = tuple(asked.tolist())
        if key not in wanted:
            wanted[key] = reference_token(small, asked)
        assert await request(small, asked, forward_s=rng.random() * 0.01) == wanted[key]
        await anyio.sleep(rng.random() * 0.005)


def _busy_store(seed: int) -> Slow:
    return Slow(MemoryBackend(), latency_s=0.002, jitter_s=0.01, seed=seed)


@MANY_SEEDS
def test_closing_at_a_random_moment(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        kept = HostMemory.mapped()
        async with open_small(
            backend=_busy_store(seed), deadlines=DEADLINES, check_pools=False, device_pages=32
        ) as small:
            small.device.throttle(latency_s=0.002)
            witness = Witness(small.cache, monkeypatch)
            wanted: dict[tuple[int, ...], int] = {}
            clients = [asyncio.ensure_future(stopped_or(_client(small, rng, wanted))) for _ in range(4)]
            waiting = [
                asyncio.ensure_future(stopped_or(small.cache.stored(prompt(9), 60.0))),
                asyncio.ensure_future(stopped_or(small.cache.drain(60.0))),
            ]
            await anyio.sleep(rng.random() * 0.2)
            closing_s = anyio.current_time()
        assert anyio.current_time() - closing_s < 3.0
        assert small.cache.state == "closed"
        assert await asyncio.gather(*clients) == [None] * 4
        await asyncio.gather(*waiting)
        with pytest.raises(StoppedError):
            small.cache.lease(prompt(1), "late")
        with pytest.raises(StoppedError):
            await small.cache.drain(1.0)
        with pytest.raises(StoppedError):
            await small.cache.reset()
        with pytest.raises(StoppedError):
            async with small.cache.acquire(prompt(1)):
                raise AssertionError("not reached")
        await anyio.sleep(1.0)
        assert not other_tasks()
        assert HostMemory.mapped() == kept
        assert small.cache.core.usage().leases == 0
        witness.check_closed()

    run_checked(main, seed)


@MANY_SEEDS
def test_what_is_cancelled_again_while_it_closes_closes_all_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Natively, which no shielded scope keeps out: a server that is told to stop twice."""

    async def main() -> None:
        rng = random.Random(seed)
        kept = HostMemory.mapped()
        opened: list[tuple[Small, Witness]] = []

        async def serve() -> None:
            async with open_small(backend=_busy_store(seed), deadlines=DEADLINES, check_pools=False) as small:
                opened.append((small, Witness(small.cache, monkeypatch)))
                await _client(small, rng, {})

        serving = asyncio.ensure_future(serve())
        await anyio.sleep(0.05 + rng.random() * 0.1)
        for _ in range(rng.randint(2, 6)):
            serving.cancel()
            for _ in range(rng.randrange(20)):
                await asyncio.sleep(rng.choice((0, 0.001)))
        await asyncio.wait({serving})
        assert serving.cancelled()
        ((small, witness),) = opened
        assert small.cache.state == "closed"
        await anyio.sleep(1.0)
        assert not other_tasks()
        assert HostMemory.mapped() == kept
        witness.check_closed()

    run_checked(main, seed)


@MANY_SEEDS
def test_resets_at_random_moments(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with open_small(backend=_busy_store(seed), deadlines=DEADLINES, device_pages=32) as small:
            small.device.throttle(latency_s=0.002)
            witness = Witness(small.cache, monkeypatch)
            wanted: dict[tuple[int, ...], int] = {}
            clients = [asyncio.ensure_future(_client(small, rng, wanted)) for _ in range(4)]
            for _ in range(8):
                await anyio.sleep(rng.random() * 0.05)
                await small.cache.reset()
                assert small.cache.match(_some_prompt(rng)) == Match(0, 0, 0)
                check_conservation(small.cache.core)
                small.cache.core.check()
            for client in clients:
                client.cancel()
            await asyncio.wait(clients)
            assert [client.cancelled() or client.exception() for client in clients] == [True] * 4
            clients.clear()  # their tracebacks hold leases
            del client
            await nothing_left(small)
            await small.cache.reset()
            await small.cache.pipelines.idle()
            check_whole(small.cache.core)
            witness.check()

    run_checked(main, seed)


@FEW_SEEDS
def test_a_running_request_survives_a_reset_and_publishes_nothing(seed: int) -> None:
    async def main() -> None:
        async with open_small(backend=_busy_store(seed)) as small:
            asked = prompt(5, extra=0)
            async with small.cache.acquire(asked) as lease:
                lease.allocate(len(asked))
                await small.cache.reset()
                token = await lease.run(small.model.forward, asked, lease.pages, 0, len(asked), None)
                assert token == reference_token(small, asked)
                committed = lease.commit(len(asked))
                assert (committed.published_pages, committed.failed) == (0, "reset")
            assert small.cache.match(asked) == Match(0, 0, 0)

    run_checked(main, seed)


@FEW_SEEDS
def test_a_reset_keeps_the_storage(seed: int) -> None:
    async def main() -> None:
        async with open_small(backend=_busy_store(seed)) as small:
            await request(small, prompt(5))
            assert await small.cache.drain(10.0) == 0
            await small.cache.reset()
            async with small.cache.acquire(prompt(5), deadline_s=5.0) as lease:
                assert lease.account.storage == 20

    run_checked(main, seed)


@FEW_SEEDS
@pytest.mark.parametrize("lease_open", [False, True])
def test_a_cache_in_step_mode_is_closed_by_its_loop(seed: int, lease_open: bool) -> None:
    """The engine has stopped stepping: what it left behind is brought to its end by `close`."""

    async def main() -> None:
        async with open_small(backend=_busy_store(seed), driver="step") as small:
            cache = small.cache
            async with stepping(cache):
                async with cache.acquire(prompt(4)) as lease:
                    pass
                assert lease.rid
            await cache.begin_step_async()
            asked = prompt(4, extra=0)
            lease = cache.lease(asked, "r")
            lease.allocate(len(asked))
            small.model.forward(asked, tuple(lease.pages), 0, len(asked))
            lease.commit(len(asked))
            cache.end_step()
            if not lease_open:
                lease.release()
            closing_s = anyio.current_time()
        assert anyio.current_time() - closing_s < 3.0
        assert not other_tasks()
        usage = small.cache.core.usage()
        assert not usage.jobs
        assert usage.leases == lease_open
        storage = small.cache.snapshot().storage
        assert storage is not None
        assert storage.written_pages == 4

    run_checked(main, seed)


@FEW_SEEDS
def test_drain_and_stored_in_step_mode_need_no_other_work(seed: int) -> None:
    """An engine that has nothing to do steps only while it is told so: a waiter tells it."""

    async def main() -> None:
        async with open_small(backend=_busy_store(seed), driver="step") as small:
            cache = small.cache

            async def idle_engine() -> None:
                while True:
                    if cache.needs_step:
                        await cache.begin_step_async()
                        cache.end_step()
                    await anyio.sleep(0.001)

            async with anyio.create_task_group() as group:
                group.start_soon(idle_engine)
                with anyio.fail_after(10.0):
                    assert await cache.drain(5.0) == 0
                    assert (await cache.stored(prompt(2), 1.0)).reason == "not_committed"
                    await cache.reset()
                    async with cache.acquire(prompt(2)) as lease:
                        assert lease.usable_tokens == 0
                    while cache.core.usage().leases:  # noqa: ASYNC110
                        await anyio.sleep(0.001)
                assert not cache.needs_step
                group.cancel_scope.cancel()

    run_checked(main, seed)


def test_an_error_of_the_block_passes_through_the_close() -> None:
    async def body() -> None:
        async with open_small(backend=MemoryBackend(), check_pools=False) as small:
            await request(small, prompt(4))
            raise ZeroDivisionError("of the engine")

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await body()
        assert not other_tasks()

    run_checked(main, None)


@FEW_SEEDS
def test_a_block_that_is_cancelled_is_closed_all_the_same(seed: int) -> None:
    async def main() -> None:
        opened = asyncio.Event()
        caches = []

        async def block() -> None:
            async with open_small(backend=_busy_store(seed), check_pools=False) as small:
                caches.append(small.cache)
                opened.set()
                while True:
                    await request(small, prompt(4))

        task = asyncio.ensure_future(block())
        await opened.wait()
        await anyio.sleep(0.02 * (seed + 1))
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert caches[0].state == "closed"
        assert not other_tasks()

    run_checked(main, seed)
