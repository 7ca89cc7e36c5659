"""Prefetch: the three stop policies, the threshold, the budget, partial grants, and several fetches at once."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import msgspec
import pytest

from hicache_actors import HiCacheError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Slow
from hicache_actors.keys.prompt import Prompt
from hicache_actors.memory.shapes import BATCH_PAGES
from hicache_actors.testing.lives import reference_token, request, run_checked
from hicache_actors.testing.pools import check_whole
from hicache_actors.testing.small import Small, open_small, prompt, small_config
from hicache_actors.tiers.storage import Store

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2, 3])
LONG = 4 * BATCH_PAGES
READ_S = 0.1  #: per batch


async def _stored(asked: Prompt, *more: Prompt) -> MemoryBackend:
    """A store that holds all pages of these prompts."""
    store = MemoryBackend()
    async with open_small(device_pages=LONG + 8, host_pages=LONG * (1 + len(more)), backend=store) as small:
        for each in (asked, *more):
            await request(small, each)
            assert await small.cache.drain(30.0) == 0
    return store


def _open(store: MemoryBackend, latency_s: float = READ_S, **settings: Any) -> Any:
    settings = {"device_pages": LONG + 8, "host_pages": 4 * LONG, "read_concurrency": 1, **settings}
    return open_small(backend=Slow(store, latency_s=latency_s), **settings)


async def _timed(small: Small, asked: Prompt, deadline_s: float | None) -> tuple[int, float]:
    """-> (tokens that came from the storage, seconds that it took)."""
    started_s = anyio.current_time()
    async with small.cache.acquire(asked, deadline_s=deadline_s) as lease:
        return lease.account.storage, anyio.current_time() - started_s


@SEEDS
def test_wait_complete_waits_for_all_of_it(seed: int | None) -> None:
    async def main() -> None:
        store = await _stored(prompt(LONG))
        async with _open(store, prefetch_policy="wait_complete") as small:
            tokens, took_s = await _timed(small, prompt(LONG), None)
            assert tokens == 4 * LONG
            assert 5 * READ_S <= took_s < 6 * READ_S  # a query and four batches, one at a time
            assert await request(small, prompt(LONG)) == reference_token(small, prompt(LONG))

    run_checked(main, seed)


@SEEDS
def test_timeout_takes_what_has_arrived(seed: int | None) -> None:
    async def main() -> None:
        store = await _stored(prompt(LONG))
        limits = {"prefetch_timeout_base_s": 0.35, "prefetch_timeout_per_ki_token_s": 0.0}
        async with _open(store, **limits) as small:
            tokens, took_s = await _timed(small, prompt(LONG), None)
            assert tokens == 4 * 2 * BATCH_PAGES
            assert 0.35 <= took_s < 0.36
            assert await request(small, prompt(LONG)) == reference_token(small, prompt(LONG))

    run_checked(main, seed)


@SEEDS
@pytest.mark.parametrize("policy", ["timeout", "wait_complete", "best_effort"])
def test_a_callers_deadline_is_kept_under_any_policy(policy: str, seed: int | None) -> None:
    async def main() -> None:
        store = await _stored(prompt(LONG))
        async with _open(store, prefetch_policy=policy) as small:
            tokens, took_s = await _timed(small, prompt(LONG), 0.25)
            assert took_s < 0.26
            assert tokens == 4 * BATCH_PAGES

    run_checked(main, seed)


@SEEDS
def test_best_effort_stops_as_soon_as_the_request_could_run(seed: int | None) -> None:
    """For `acquire`: at the first apply after HIT.  Reads that are under way end, their slots are free again, nothing is wrong."""

    async def main() -> None:
        store = await _stored(prompt(LONG))
        async with _open(store, prefetch_policy="best_effort") as small:
            other = asyncio.ensure_future(_applies(small))
            tokens, took_s = await _timed(small, prompt(LONG), None)
            assert tokens < 4 * LONG
            assert took_s < 3 * READ_S
            assert await request(small, prompt(LONG)) == reference_token(small, prompt(LONG))
            other.cancel()

    run_checked(main, seed)


async def _applies(small: Small) -> None:
    """Something that ends now and then."""
    while True:
        await request(small, prompt(1, family=99))
        await anyio.sleep(READ_S / 4)


@SEEDS
@pytest.mark.parametrize(("threshold_tokens", "fetched"), [(4 * 8, True), (4 * 8 + 1, False), (0, True)])
def test_a_span_shorter_than_the_threshold_is_not_looked_up(
    threshold_tokens: int, fetched: bool, seed: int | None
) -> None:
    async def main() -> None:
        store = await _stored(prompt(8))
        plain = small_config(host_pages=64)
        storage = msgspec.structs.replace(plain.storage, prefetch_threshold_tokens=threshold_tokens)
        async with open_small(config=msgspec.structs.replace(plain, storage=storage), backend=store) as small:
            handle = small.cache.prefetch(prompt(8), "r")
            assert await handle.wait() == (32 if fetched else 0)
            async with small.cache.acquire(prompt(8), rid="r") as lease:
                assert lease.account.storage == (32 if fetched else 0)
                if not fetched:
                    assert lease.account.reasons["below_threshold"] == 32

    run_checked(main, seed)


@SEEDS
def test_fetches_get_at_most_half_of_the_host(seed: int | None) -> None:
    async def main() -> None:
        store = await _stored(prompt(40))
        async with open_small(device_pages=60, host_pages=40, backend=store) as small:
            handle = small.cache.prefetch(prompt(40), "r")
            assert await handle.wait() == 4 * 20
            lease = small.cache.lease(prompt(40), "r")
            lease.load()
            assert lease.account.storage == 80
            assert lease.account.reasons["host_capacity"] == 80
            lease.release()
            assert await request(small, prompt(40)) == reference_token(small, prompt(40))

    run_checked(main, seed)


@SEEDS
def test_several_fetches_share_the_budget_and_none_is_wrong(seed: int | None) -> None:
    async def main() -> None:
        asked = [prompt(12, family=family) for family in range(6)]
        store = await _stored(*asked)
        async with open_small(device_pages=90, host_pages=64, backend=Slow(store, latency_s=0.01)) as small:
            wanted = [reference_token(small, each) for each in asked]
            handles = [small.cache.prefetch(each, f"r{number}") for number, each in enumerate(asked)]
            tokens = [await handle.wait() for handle in handles]
            assert all(handle.settled and handle.agreed_tokens == n for handle, n in zip(handles, tokens, strict=True))
            assert 4 * 24 <= sum(tokens) <= 4 * 32  # two whole ones, and a part of a third
            got = await asyncio.gather(*(request(small, each) for each in asked))
            assert list(got) == wanted

    run_checked(main, seed)


@SEEDS
def test_requests_for_one_prompt_share_its_fetch(seed: int | None) -> None:
    async def main() -> None:
        store = await _stored(prompt(12))
        slow = Slow(store, latency_s=0.05)
        async with open_small(device_pages=60, host_pages=64, backend=slow) as small:
            wanted = reference_token(small, prompt(12))
            got = await asyncio.gather(*(request(small, prompt(12)) for _ in range(5)))
            assert set(got) == {wanted}
            storage = small.cache.snapshot().storage
            assert storage is not None
            assert storage.read_pages == 12
            assert storage.calls["read"] == 1

    run_checked(main, seed)


@SEEDS
def test_a_fetch_that_is_stopped_by_all_who_wanted_it_ends_between_batches(seed: int | None) -> None:
    async def main() -> None:
        store = await _stored(prompt(LONG))
        async with _open(store, prefetch_policy="wait_complete") as small:
            first = small.cache.prefetch(prompt(LONG), "first")
            second = small.cache.prefetch(prompt(LONG), "second")
            await anyio.sleep(2.5 * READ_S)
            first.stop()
            first.stop()
            await anyio.sleep(READ_S)
            assert second.arrived_tokens == 4 * 2 * BATCH_PAGES
            assert not second.settled
            second.stop()
            assert await second.wait() == await first.wait() == 4 * 2 * BATCH_PAGES
            assert anyio.current_time() < 10 * READ_S
            await small.cache.pipelines.idle()  # the read that was under way has ended
            assert small.cache.core.usage().host.limbo_pages == 0
            assert small.cache.match(prompt(LONG)).host == 4 * 2 * BATCH_PAGES

    run_checked(main, seed)


@SEEDS
@pytest.mark.parametrize("steps_before", range(1, 7))
def test_a_grant_may_come_when_its_pipeline_is_dead(steps_before: int, seed: int | None) -> None:
    """In step mode a round may be under way, with its HIT, when the task group dies: the grant is agreed all the same."""

    async def body() -> None:
        store = await _stored(prompt(8))
        async with open_small(backend=store, driver="step", check_pools=False) as small:
            cache = small.cache

            async def bug() -> None:
                raise KeyError("planted")

            await cache.begin_step_async()
            handle = cache.prefetch(prompt(8), "r")
            for _ in range(steps_before):
                cache.end_step()
                await anyio.sleep(0.01)
                await cache.begin_step_async()
            cache.end_step()
            cache._parts.system.spawn("bug", bug)
            await anyio.sleep(0.01)
            while cache.needs_step:
                await cache.begin_step_async()
                cache.end_step()
                await anyio.sleep(0.001)
            assert cache.state == "degraded"
            assert handle.settled
            assert cache.pipelines.open_jobs == 0
            await cache.begin_step_async()
            cache.core.reset()
            cache.end_step()
            check_whole(cache.core)

    async def main() -> None:
        with pytest.raises(HiCacheError, match="planted"):
            await body()

    run_checked(main, seed)


@SEEDS
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_bug_between_two_batches_is_the_pipelines(
    seed: int | None, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read begins in the answer of another one, which must neither swallow what is raised there nor be blamed for it."""
    read, calls = Store.read, 0

    def broken(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise KeyError("planted")
        return read(*args, **options)

    async def body() -> None:
        store = await _stored(prompt(LONG))
        async with _open(store, prefetch_policy="wait_complete", check_pools=False) as small:
            monkeypatch.setattr(Store, "read", broken)
            begun_s = anyio.current_time()
            async with small.cache.acquire(prompt(LONG)) as lease:
                assert lease.account.storage == 0
            assert anyio.current_time() - begun_s < (nth + 1) * READ_S, "nobody waits for what will not come"
            assert small.cache.core.degraded
            await small.cache.pipelines.idle()
            assert small.cache.core.usage().host.limbo_pages == 0

    async def main() -> None:
        with pytest.raises(HiCacheError, match="planted"):
            await body()

    run_checked(main, seed)
