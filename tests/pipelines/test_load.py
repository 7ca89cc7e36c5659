"""A load that fails, whole or half-way: nobody's token rests on it, and its slots are nobody's until the copies have ended."""

from __future__ import annotations

import asyncio

import anyio.lowlevel
import pytest

from hicache_actors import HiCacheError, Shortfall, TransferError
from hicache_actors.cache.api import HiCache
from hicache_actors.cache.handles import Lease, Load
from hicache_actors.config import Deadlines
from hicache_actors.keys.prompt import Prompt
from hicache_actors.runtime import Workers
from hicache_actors.testing.lives import reference_token, request, run_checked
from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.small import Small, evict_device, open_small, prompt
from hicache_actors.transfer.completions import fired

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2, 3])
LOOPS = pytest.mark.parametrize("anyio_backend", ["virtual:1", "asyncio", "uvloop"], indirect=True)


async def _on_host(small: Small, pages: int = 4) -> Prompt:
    """A prompt of which the host has all pages and the device none."""
    asked = prompt(pages)
    await small.engine.answer(asked)
    await small.cache.drain(5.0)
    await evict_device(small)
    await small.cache.pipelines.idle()  # a drain still holds pages
    assert small.cache.match(asked).device == 0
    assert small.cache.match(asked).host == 4 * pages
    return asked


def _load_of(lease: Lease) -> Load:
    assert lease.loading is not None
    return lease.loading


@SEEDS
def test_no_token_rests_on_a_load_that_fails_after_its_first_layer(seed: int | None) -> None:
    async def main() -> None:
        async with open_small() as small:
            asked = await _on_host(small)
            gate = small.device.gate("load")
            small.device.fail_next(TransferError("planted"), after=1, stream="load")
            async with small.cache.acquire(asked) as owner, small.cache.acquire(asked) as joined:
                gate.allow(1)
                await _load_of(owner).ready(0)
                async with small.cache.acquire(asked) as late:  # sees a load of which one layer is there
                    await _load_of(late).ready(0)
                    gate.open()
                    for lease in (owner, joined, late):
                        assert lease.usable_tokens == 16
                        assert lease.ready_tokens == 0
                        with pytest.raises(TransferError):
                            await _load_of(lease).ready(1)
                        with pytest.raises(TransferError):
                            await _load_of(lease).ready(0)  # it fails as a whole
                        verdict = await _load_of(lease).verdict()
                        assert (verdict.failed, verdict.valid_tokens) == ("load_failed", 0)
                        assert lease.failed == "load_failed"
                        assert lease.ready_tokens == 0
                        assert not isinstance(lease.allocate(1), Shortfall)
                        committed = lease.commit(len(asked))
                        assert (committed.published_pages, committed.failed) == (0, "load_failed")
                        assert lease.account.host == 0
                        assert lease.account.reasons["load_failed"] == 16
            assert small.cache.match(asked).device == 0
            assert await request(small, asked) == reference_token(small, asked)
            assert small.cache.snapshot().counts["loads_failed"] == 1

    run_checked(main, seed)


@LOOPS
async def test_two_requests_whose_load_fails_try_again_and_are_right(anyio_backend: object) -> None:
    async with open_small() as small:
        asked = await _on_host(small)
        wanted = reference_token(small, asked)
        gate = small.device.gate("load")
        small.device.fail_next(TransferError("planted"), after=1, stream="load")
        answers = [asyncio.ensure_future(small.engine.answer(asked)) for _ in range(2)]
        await fired(gate.reached)
        while small.cache.core.usage().leases < 2:  # both wait for the same copies
            await anyio.lowlevel.checkpoint()
        gate.open()
        for answer in await asyncio.gather(*answers):
            assert answer.tokens == (wanted,)
            assert answer.retries == 1


@LOOPS
async def test_a_hung_copy_lets_its_waiters_go_and_keeps_its_slots(anyio_backend: object) -> None:
    async with open_small(deadlines=Deadlines(load_s=0.2)) as small:
        cache = small.cache
        asked = await _on_host(small)
        workers = Workers("waiter", 1)
        gate = small.device.gate("load")
        async with cache.acquire(asked) as lease:
            load = _load_of(lease)
            waited = None if _threadless() else asyncio.ensure_future(workers.run(load.wait, 0, 10.0))
            with pytest.raises(TransferError, match="deadline"):
                await load.ready(0)
            if waited is not None:
                assert await waited is False
            assert (await load.verdict()).failed == "load_failed"
            assert load.result() == await load.verdict()
        # Nobody holds them any more, but a copy may still write into them.
        usage = cache.core.usage()
        assert (usage.leases, usage.device.limbo_pages, dict(usage.jobs)) == (0, 4, {"load.limbo": 1})
        check_conservation(cache.core)
        everything = await _take_all_free_pages(cache)
        assert len(everything) == cache.kv.pages - 4
        gate.open()
        await cache.pipelines.idle()
        assert cache.core.usage().device.limbo_pages == 0
        workers.close()


async def _take_all_free_pages(cache: HiCache) -> list[int]:
    """What the device pool can give now."""
    async with cache.acquire(prompt(0, family=5)) as lease:
        pages = 0
        while not isinstance(lease.allocate(cache.page_size), Shortfall):
            pages += 1
        assert pages
        return list(lease.pages)


def _threadless() -> bool:
    return bool(getattr(asyncio.get_running_loop(), "threadless", False))


@SEEDS
def test_a_copy_that_was_submitted_before_the_next_was_refused_keeps_its_slots(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with open_small() as small:
            cache = small.cache
            asked = await _on_host(small)
            gate = small.device.gate("load")
            stream = small.device.stream("load")
            submit, calls = stream.submit, 0

            def refuse_the_second(work: object) -> object:
                nonlocal calls
                calls += 1
                if calls == 2:
                    raise KeyError("planted")
                return submit(work)

            monkeypatch.setattr(stream, "submit", refuse_the_second)
            async with cache.acquire(asked) as lease:
                with pytest.raises(TransferError):
                    await _load_of(lease).ready(0)
            await anyio.sleep(1.0)
            assert cache.core.usage().device.limbo_pages == 4
            gate.open()
            await cache.pipelines.idle()
            assert cache.core.usage().device.limbo_pages == 0

    async def main() -> None:
        with pytest.raises(HiCacheError, match="planted"):
            await body()

    run_checked(main, seed)


@pytest.mark.parametrize("seed", [None, 1, 2, 3, 4, 5])
def test_a_request_may_join_a_load_at_any_moment_of_its_life(seed: int | None) -> None:
    async def main() -> None:
        async with open_small() as small:
            small.device.throttle(latency_s=0.0)
            asked = await _on_host(small)
            wanted = reference_token(small, asked)
            for turns in range(24):
                await evict_device(small)
                first = asyncio.ensure_future(request(small, asked))
                for _ in range(turns):
                    await asyncio.sleep(0)
                second = asyncio.ensure_future(request(small, asked))
                assert {await first, await second} == {wanted}
                with anyio.fail_after(5.0):
                    await small.cache.pipelines.idle()

    run_checked(main, seed)
