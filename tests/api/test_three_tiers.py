"""One prompt's KV through device, host and storage and back, with every byte checked by the toy model."""

from __future__ import annotations

import pytest

from hicache_actors import HiCache, Shortfall, UsageError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.core.words import Match
from hicache_actors.keys.scope import Scope
from hicache_actors.testing.small import evict_device, open_small, prompt

LOOPS = pytest.mark.parametrize("anyio_backend", ["virtual:1", "virtual:2", "asyncio", "uvloop"], indirect=True)


@LOOPS
async def test_a_prompt_comes_back_from_every_tier(anyio_backend: object) -> None:
    backend = MemoryBackend()
    async with open_small(device_pages=12, host_pages=24, backend=backend) as small:
        asked = prompt(8)
        first = await small.engine.answer(asked)
        assert (first.account.computed, first.account.device) == (len(asked), 0)
        again = await small.engine.answer(asked)
        assert again.tokens == first.tokens
        assert again.account.device == 32
        assert await small.cache.stored(asked, 5.0) == _all_of(asked)
        await evict_device(small)
        from_host = await small.engine.answer(asked)
        assert from_host.tokens == first.tokens
        assert (from_host.account.host, from_host.account.device) == (32, 0)
        await small.cache.drain(5.0)
        await small.cache.reset()
        assert small.cache.match(asked) == Match(0, 0, 0)
        from_storage = await small.engine.answer(asked)
        assert from_storage.tokens == first.tokens
        assert (from_storage.account.storage, from_storage.account.computed) == (32, 1)


@LOOPS
async def test_a_restarted_cache_finds_what_the_last_one_stored(anyio_backend: object) -> None:
    backend = MemoryBackend()
    asked = prompt(6)
    async with open_small(backend=backend) as small:
        first = await small.engine.answer(asked, 3)
        assert await small.cache.drain(5.0) == 0
    async with open_small(backend=backend) as small:
        again = await small.engine.answer(asked, 3)
        assert again.tokens == first.tokens
        assert again.account.storage == 24


@LOOPS
async def test_who_may_not_wait_is_called_when_a_fetch_and_a_load_are_settled(anyio_backend: object) -> None:
    async with open_small(backend=MemoryBackend()) as small:
        asked = prompt(6)
        await small.engine.answer(asked)
        await small.cache.drain(5.0)
        await small.cache.reset()
        told: list[object] = []
        fetch = small.cache.prefetch(asked, "r")
        fetch.when_settled(lambda: told.append(fetch.agreed_tokens))
        assert told == []
        assert await fetch.wait() == 24
        assert told == [24]
        fetch.when_settled(lambda: told.append("at once"))
        small.cache.prefetch(asked, "r").when_settled(lambda: told.append("nothing to fetch"))
        assert told == [24, "at once", "nothing to fetch"]
        async with small.cache.lease(asked, "r") as lease:
            load = lease.load()
            assert not isinstance(load, Shortfall)
            load.when_settled(lambda: told.append(load.result()))
            verdict = await load.verdict()
            assert (verdict.failed, told[3:]) == (None, [verdict])


async def test_scopes_share_nothing_on_any_tier() -> None:
    async with open_small(backend=MemoryBackend()) as small:
        plain, tenant = prompt(4), prompt(4, scope=Scope(salt="tenant"))
        await small.engine.answer(plain)
        await small.cache.drain(5.0)
        assert small.cache.match(tenant) == Match(0, 0, 0)
        assert (await small.engine.answer(tenant)).account.computed == len(tenant)
        await small.cache.drain(5.0)
        await small.cache.reset()
        assert (await small.engine.answer(tenant)).account.storage == 16


async def test_decode_continues_a_leased_prompt_and_the_next_turn_finds_it() -> None:
    async with open_small(backend=MemoryBackend()) as small:
        asked = prompt(3)
        async with small.cache.acquire(asked) as lease:
            assert not isinstance(lease.allocate(len(asked) + 7), Shortfall)
            token = await lease.run(small.model.forward, asked, lease.pages, 0, len(asked), None)
            lease.commit(len(asked))
            for _ in range(7):
                asked.append([token])
                end = len(asked)
                token = await lease.run(small.model.forward, asked, lease.pages, end - 1, end, None)
            assert lease.commit(len(asked)).published_pages == 2
        assert small.cache.match(asked).device == 16  # one token is always left to compute


async def test_a_refused_load_waits_all_the_same_for_what_it_has_joined() -> None:
    async with open_small(device_pages=8, host_pages=32) as small:
        asked = prompt(6)
        await small.engine.answer(asked)
        await small.cache.drain(5.0)
        await evict_device(small)
        first, second, other = (small.cache.lease(asked, rid) for rid in ("first", "second", "other"))
        assert not isinstance(other.allocate(4 * 4), Shortfall)
        with small.device.gate("load"):
            assert not isinstance(first.load(12), Shortfall)
            refused = second.load()
            assert isinstance(refused, Shortfall)
            assert (second.usable_tokens, second.ready_tokens) == (12, 0)
            assert second.loading is not None  # what it may use is still on its way
            assert not second.loading.wait(0, 0.0)
        assert (await second.loading.verdict()).failed is None
        for lease in (first, second, other):
            lease.release()


async def test_a_small_pool_gives_a_shorter_lease_and_says_why() -> None:
    async with open_small(device_pages=8, host_pages=32, backend=MemoryBackend()) as small:
        await small.engine.answer(prompt(7, extra=0))
        await evict_device(small, family=1)
        busy = small.cache.lease(prompt(7, family=1, extra=0), "busy")
        assert busy.ready_tokens >= 16
        async with small.cache.acquire(prompt(7, extra=0)) as lease:
            assert lease.usable_tokens < 24
            assert lease.account.reasons["device_capacity"] > 0
            refused = lease.allocate(100)
            assert isinstance(refused, Shortfall)
            assert refused.reason == "device_capacity"
        busy.release()


async def test_calls_out_of_place_change_nothing() -> None:
    async with open_small() as small:
        lease = small.cache.lease(prompt(2), "r1")
        with pytest.raises(UsageError, match="r1"):
            small.cache.lease(prompt(2), "r1")
        with pytest.raises(UsageError, match="commit"):
            lease.commit(9)
        with pytest.raises(UsageError, match="step"):
            small.cache.begin_step()
        lease.release()
        lease.release()
        with pytest.raises(UsageError, match="released"):
            lease.allocate(1)


async def test_an_empty_prompt_matches_nothing() -> None:
    async with open_small() as small:
        assert small.cache.match(prompt(0, extra=0)) == Match(0, 0, 0)
        answer = await small.engine.answer(prompt(0, extra=1))
        assert answer.account.computed == 1


def _all_of(asked: object) -> object:
    from hicache_actors.cache.api import Stored

    return Stored(len(asked) // 4 * 4)  # type: ignore[arg-type]


def test_the_facade_is_small() -> None:
    verbs = {name for name in vars(HiCache) if not name.startswith("_")}
    assert len(verbs) < 30


async def test_what_is_held_says_what_it_is() -> None:
    async with open_small(backend=MemoryBackend()) as small:
        cache = small.cache
        assert repr(cache) == "<HiCache open: 3 layers, 16 device pages of 4 tokens>"
        for _ in range(2):
            async with cache.acquire(prompt(3), rid="r") as lease:
                assert not isinstance(lease.allocate(len(prompt(3)) - lease.usable_tokens), Shortfall)
                small.model.forward(prompt(3), lease.pages, lease.usable_tokens, len(prompt(3)))
                lease.commit(len(prompt(3)))
        assert repr(lease) == "<Lease 'r' released: 4 pages, 12 tokens usable>"
        assert repr(cache.prefetch(prompt(3), "p")) == "<Prefetch 'p': 0 tokens arrived>"
        async with cache.room(8, deadline_s=1.0) as room:
            assert repr(room) == "<Room of 2 pages>"
    assert repr(cache).startswith("<HiCache closed")
