"""Field reports, section C: the tree stays a tree of usable prefixes, whatever is fetched, split and evicted.

One rank, full KV, write_through; other write policies are in `test_c_policies`, with B056.  Left out until its subject exists: B054
(side pools: there is one kind of state per page so far).
"""

from __future__ import annotations

import random

import anyio
import anyio.lowlevel
import pytest

from hicache_actors import Shortfall
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Fault, Faulty, Hanging
from hicache_actors.cache.handles import Lease
from hicache_actors.errors import TransferError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.testing.small import Small, prompt, tokens

from .kit import (
    LOOPS,
    PAGE,
    branch,
    clear_device,
    compute,
    ended,
    on_device_and_host,
    opened,
    pins,
    quiet,
    store,
    take,
    until,
)

VIRTUAL_ONCE = pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)


@pytest.mark.parametrize("meanwhile", ["split", "replaced", "nothing"])
@pytest.mark.parametrize("saves_fail", [False, True])
@LOOPS
async def test_b039_a_fetched_suffix_hangs_on_an_unbroken_chain_or_nowhere(
    anyio_backend: object, meanwhile: str, saves_fail: bool
) -> None:
    """Given A on the device only, its save has failed, and a fetch of A + B whose reads are under way.
    When A is split or evicted and computed again, the fetch ends, and all device pages are evicted; later saves fail or work.
    Then no error; B is reachable through A or gone, the pages add up, and the answer is right."""
    backend = MemoryBackend()
    a, ab = prompt(4), prompt(8)
    (first,) = await store(backend, ab)
    slow = Hanging(backend)
    async with opened(device_pages=16, host_pages=20, backend=slow) as small:
        small.device.fail_next(TransferError("planted"), stream="write_back")
        await compute(small, a)
        await ended(small, "write_back", "drain")
        assert small.cache.core.usage().host.owned_pages == 0
        fetch = small.cache.prefetch(ab, "staged")
        await until(lambda: slow.hung == 1)
        if saves_fail or meanwhile != "nothing":
            small.device.fail_next(TransferError("planted"), works=1000 if saves_fail else 1, stream="write_back")
        if meanwhile == "split":
            await compute(small, branch(2, 4))
        elif meanwhile == "replaced":
            await clear_device(small)
            assert on_device_and_host(small, a) == (0, 0)
            await compute(small, a)
        await ended(small, "write_back", "drain")
        slow.release()
        assert await fetch.wait() in (0, 4 * PAGE)
        await ended(small, "write_back", "drain")
        small.cache.core.check()
        await clear_device(small)
        small.cache.core.check()
        device_pages, cached_pages = on_device_and_host(small, ab)
        # Publishing below A has asked for A's save; where that fails, B goes with A.
        assert (device_pages, cached_pages) == (0, 0 if saves_fail else 8)
        await quiet(small)
        again = await compute(small, ab)
        assert (again.account.host, again.tokens) == (cached_pages * PAGE, first.tokens)


@LOOPS
async def test_b042_eviction_climbs_from_children_to_parents(anyio_backend: object) -> None:
    """Given chains A-B-C of 4 pages each, in one node or kept apart by side branches, with nothing locked.
    When all pages are asked for in one call.
    Then all are had in that call."""
    for branches in (False, True):
        async with opened(device_pages=16, host_pages=16) as small:
            await compute(small, prompt(12))
            if branches:
                await compute(small, branch(4, 5))
                await compute(small, branch(8, 9, other=600))
            await quiet(small)
            usage = small.cache.core.usage()
            assert usage.device.owned_pages == usage.device.evictable_pages == (14 if branches else 12)
            assert usage.nodes == (5 if branches else 1)
            take(small, 16).release()
            assert small.cache.core.usage().device.free_pages == 16


@LOOPS
async def test_b048_a_grant_shorter_than_the_hit_cuts_the_key_as_well(anyio_backend: object) -> None:
    """Given a hit of 10 pages in the store and room for 6 on the host.
    When the fetch has ended.
    Then exactly the first 6 pages are in the tree, page 7 and what follows are misses."""
    backend = MemoryBackend()
    asked = prompt(10)
    await store(backend, asked)
    slow = Hanging(backend, ["write"])
    async with opened(device_pages=40, host_pages=20, backend=slow) as small:
        await compute(small, prompt(14, family=1))
        await until(lambda: slow.hung == 1)  # their backup pins 14
        before = small.cache.core.usage().tree_pages
        assert await small.cache.prefetch(asked, "r").wait() == 6 * PAGE
        assert small.cache.core.usage().tree_pages - before == 6
        for pages in range(11):
            assert on_device_and_host(small, prompt(pages)) == (0, min(pages, 6))
        slow.release()


@LOOPS
async def test_b051_a_fetch_makes_room_on_a_full_host(anyio_backend: object) -> None:
    """Given a host pool full of unlocked pages.
    When a fetch of 4 pages is asked for.
    Then it succeeds, and 4 old pages have gone, the oldest."""
    backend = MemoryBackend()
    asked = prompt(4, family=9)
    await store(backend, asked)
    async with opened(device_pages=16, host_pages=12, backend=backend) as small:
        old, newer, newest = (prompt(4, family=family) for family in range(3))
        for each in (old, newer, newest):
            await compute(small, each)
            await quiet(small)
        await clear_device(small)
        assert small.cache.core.usage().host.free_pages == 0
        assert await small.cache.prefetch(asked, "r").wait() == 4 * PAGE
        assert small.cache.snapshot().counts["evicted_host_pages"] == 4
        assert [on_device_and_host(small, each)[1] for each in (old, newer, newest, asked)] == [0, 4, 4, 4]


@pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
async def test_b052_prompts_around_the_length_of_a_page(length: int) -> None:
    """Given prompts of 0, 1, page - 1, page, page + 1 and 2 pages of tokens.
    When they are committed, matched, stored, and looked up in the store by a later cache.
    Then no error, and whole pages alone are cached; a hit leaves one token to compute."""
    backend = MemoryBackend()
    asked, longer = Prompt(tokens(2, extra=0)[:length]), Prompt([*tokens(2, extra=0)[:length], 7])
    whole_pages, hit_pages = length // PAGE, max(0, length - 1) // PAGE
    async with opened(backend=backend) as small:
        lease = small.cache.lease(asked, "r")
        assert not isinstance(lease.allocate(length), Shortfall)
        if length:
            small.model.forward(asked, lease.pages, 0, length)
        assert lease.commit(length).published_pages == whole_pages
        lease.release()
        assert on_device_and_host(small, asked) == (hit_pages, hit_pages)
        assert on_device_and_host(small, longer) == (whole_pages, whole_pages)
        assert (await small.cache.stored(asked, 5.0)).tokens == whole_pages * PAGE
        assert backend.stats()["objects"] == whole_pages
    async with opened(backend=backend) as small:
        assert await small.cache.prefetch(asked, "r").wait() == hit_pages * PAGE
        async with small.cache.acquire(longer) as lease:
            assert lease.usable_tokens == whole_pages * PAGE


@VIRTUAL_ONCE
async def test_b057_eviction_leaves_usable_prefixes(anyio_backend: object) -> None:
    """Given chains whose pages were last used in any order, on both tiers, then on the host alone.
    When pages are evicted one by one.
    Then at each step every page that remains is part of a prefix that `match` finds."""
    dice = random.Random(57)
    async with opened(device_pages=40, host_pages=40) as small:
        chains = [prompt(4, family=family) for family in range(6)]
        for chain in chains:
            await compute(small, chain)
        await quiet(small)
        for turn in range(12):  # lookups of shorter prefixes keep nodes apart
            small.cache.lease(prompt(dice.randint(1, 4), family=dice.randrange(6)), f"t{turn}").release()
        takers: list[Lease] = []
        while small.cache.core.usage().device.evictable_pages:
            takers.append(take(small, small.cache.core.usage().device.free_pages + 1, f"taker{len(takers)}"))
            found = sum(on_device_and_host(small, chain)[0] for chain in chains)
            assert found == small.cache.core.usage().device.evictable_pages
        assert len(takers) > 6
        for taker in takers:
            taker.release()
        steps, family = 0, 100
        while any(on_device_and_host(small, chain)[1] for chain in chains):
            await compute(small, prompt(1, family=family))  # wants one host page
            await quiet(small)
            small.cache.core.check()
            family, steps = family + 1, steps + 1
            found = sum(on_device_and_host(small, chain)[1] for chain in chains)
            fillers = sum(on_device_and_host(small, prompt(1, family=n))[1] for n in range(100, family))
            assert found + fillers == small.cache.core.usage().tree_pages
        assert steps > 16


@pytest.mark.parametrize("upper", ["on the host", "on the device", "split on the host", "split on the device"])
@LOOPS
async def test_b060_a_fetched_suffix_is_filed_behind_its_prefix(anyio_backend: object, upper: str) -> None:
    """Given pages 1-4 on the host or the device, in one node or split, and pages 5-8 in the store alone.
    When the prompt of 8 pages is fetched and loaded.
    Then page i has the bytes of page i for all 8."""
    backend = MemoryBackend()
    asked = prompt(8)
    (first,) = await store(backend, asked)
    async with opened(device_pages=24, host_pages=40, backend=backend) as small:
        await compute(small, prompt(4))
        await quiet(small)
        if upper.startswith("split"):
            await compute(small, branch(2, 5))
            await quiet(small)
        if upper.endswith("host"):
            await clear_device(small)
        answer = await small.engine.answer(asked)
        account = answer.account
        on_device = 4 * PAGE if upper.endswith("device") else 0
        assert (account.device, account.host, account.storage) == (on_device, 4 * PAGE - on_device, 4 * PAGE)
        assert answer.tokens == first.tokens
        await clear_device(small)
        assert (await compute(small, asked)).account.host == 8 * PAGE


@pytest.mark.parametrize("on_device", range(5))
@VIRTUAL_ONCE
async def test_b062_tiers_may_hold_prefixes_of_any_length(anyio_backend: object, on_device: int) -> None:
    """Given 0-4 pages of a prompt on the device, 0-4 on the host and 0-4 in the store, in every combination.
    When the prompt of 4 pages is matched, computed, saved and matched again.
    Then no error, the longest usable prefix is taken, and afterwards each tier has 4 pages."""
    for on_host in range(5):
        for in_store in range(5):
            await _try_lengths(on_device, on_host, in_store)


async def _try_lengths(on_device: int, on_host: int, in_store: int) -> None:
    backend, asked = MemoryBackend(), prompt(4)
    if in_store:
        await store(backend, prompt(in_store))
    refusing = True
    faulty = Faulty(backend, lambda access: Fault.FAIL if refusing and access.verb == "write" else None)
    async with opened(device_pages=16, host_pages=16, backend=faulty) as small:
        if on_host:
            await compute(small, prompt(on_host))
            await ended(small, "write_back", "backup")
        await _shape_device(small, on_device, on_host)
        refusing = False
        cached = max(on_device, on_host)
        assert on_device_and_host(small, asked) == (on_device, cached), (on_device, on_host, in_store)
        account = (await small.engine.answer(asked)).account
        assert (account.device, account.host, account.storage) == (
            on_device * PAGE,
            (cached - on_device) * PAGE,
            max(0, in_store - cached) * PAGE,
        ), (on_device, on_host, in_store)
        assert (await small.cache.stored(asked, 60.0)).tokens == 4 * PAGE, (on_device, on_host, in_store)
        assert on_device_and_host(small, asked) == (4, 4)
        await clear_device(small)
        assert on_device_and_host(small, asked) == (0, 4), (on_device, on_host, in_store)
        assert backend.stats()["objects"] == 4
        await quiet(small)
        assert pins(small) == 0


async def _shape_device(small: Small, on_device: int, on_host: int) -> None:
    if on_device < on_host:
        await clear_device(small)
        lease = small.cache.lease(prompt(on_host), "shape")
        load = lease.load(on_device * PAGE)
        assert not isinstance(load, Shortfall)
        await load.verdict()
        lease.release()
        await ended(small, "load")
    elif on_device > on_host:
        small.device.fail_next(TransferError("planted"), stream="write_back")
        await compute(small, prompt(on_device))
        await ended(small, "write_back")
    await anyio.lowlevel.checkpoint()
