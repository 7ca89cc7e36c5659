"""Field reports, section C: what is computed reaches the lower tiers, is found there, and is never listed where it is not.

Write_through only; the other policies are in `test_c_policies`.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from hicache_actors import Shortfall
from hicache_actors.backends.backend import Stored
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Access, Faulty, Hanging, Wrapper
from hicache_actors.cache.api import Stored as StoredTokens
from hicache_actors.errors import BackendError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.keys.scope import NO_SCOPE, Scope
from hicache_actors.memory.shapes import BATCH_PAGES
from hicache_actors.testing.small import Small, prompt, tokens
from hicache_actors.transfer.completions import fired

from .kit import (
    LOOPS,
    PAGE,
    VIRTUAL,
    clear_device,
    compute,
    ended,
    from_storage,
    on_device_and_host,
    opened,
    pins,
    quiet,
    until,
)


@LOOPS
async def test_b040_what_found_no_room_on_the_host_is_not_listed_there(anyio_backend: object) -> None:
    """Given a host pool in which every page is pinned.
    When 4 pages are computed, and then evicted from the device.
    Then they are a miss, counted; never listed as on the host."""
    slow = Hanging(MemoryBackend(), ["write"])
    async with opened(device_pages=16, host_pages=8, backend=slow) as small:
        await compute(small, prompt(8, family=1))
        await until(lambda: slow.hung == 1)
        asked = prompt(4)
        await compute(small, asked)
        await ended(small, "write_back", "drain")
        assert on_device_and_host(small, asked) == (4, 4)
        assert small.cache.core.usage().host.owned_pages == 8
        assert await small.cache.stored(asked, 5.0) == StoredTokens(0, "given_up")
        await clear_device(small)
        assert on_device_and_host(small, asked) == (0, 0)
        counts = small.cache.snapshot().counts
        assert (counts["write_back_refused_pages"], counts["dropped_pages"]) == (4, 4)
        slow.release()


@VIRTUAL
async def test_b044_saves_end_without_another_call(anyio_backend: object) -> None:
    """Given one finished request.
    When 2 seconds pass in silence, or with nothing but another request's decoding.
    Then all its pages are in the store and nothing is locked."""
    for decoding in (False, True):
        backend = MemoryBackend()
        async with opened(device_pages=32, host_pages=64, backend=backend) as small:
            other = small.cache.lease(prompt(0, family=1), "decoder")
            asked = prompt(6)
            await compute(small, asked)
            if decoding:
                for _ in range(20):
                    assert not isinstance(other.allocate(1), Shortfall)
                    await anyio.sleep(0.1)
            else:
                await anyio.sleep(2)
            assert backend.stats()["objects"] == 6
            usage = small.cache.core.usage()
            assert (usage.stored_pages, usage.jobs, usage.retries) == (6, {}, 0)
            assert usage.device.evictable_pages == usage.host.evictable_pages == 6
            other.release()


@VIRTUAL
async def test_b044_steps_alone_bring_saves_to_their_end(anyio_backend: object) -> None:
    """Given an engine that makes steps, and one finished request.
    When it makes empty steps for as long as it is asked to.
    Then all its pages are in the store and nothing is locked."""
    backend = MemoryBackend()
    async with opened(backend=backend, driver="step") as small:
        cache, asked = small.cache, prompt(6)
        await cache.begin_step_async()
        lease = cache.lease(asked, "r")
        assert not isinstance(lease.allocate(len(asked)), Shortfall)
        small.model.forward(asked, lease.pages, 0, len(asked))
        lease.commit(len(asked))
        lease.release()
        cache.end_step()
        while cache.needs_step:
            await cache.begin_step_async()
            cache.end_step()
            await anyio.sleep(0.01)
        assert backend.stats()["objects"] == 6
        assert pins(small) == 0


def _in_second_batch(access: Access) -> bool:
    return access.verb == "write" and BATCH_PAGES < access.object <= 2 * BATCH_PAGES


@pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)
async def test_b046_a_batch_that_failed_once_is_written_in_the_end(anyio_backend: object) -> None:
    """Given a store that fails the second of 5 batches once.
    When the save has ended, and the prefix has been dropped from device and host.
    Then all pages come back from the store."""

    def schedule(access: Access) -> Exception | None:
        return BackendError("planted") if _in_second_batch(access) and access.attempt == 1 else None

    pages = 5 * BATCH_PAGES
    asked, faulty = prompt(pages), Faulty(MemoryBackend(), schedule)
    async with opened(device_pages=pages + 10, host_pages=2 * pages, backend=faulty) as small:
        first = await compute(small, asked)
        assert await small.cache.stored(asked, 60.0) == StoredTokens(pages * PAGE)
        assert faulty.injected["write_error"] == 1
        assert small.cache.snapshot().counts["backup_failed_pages"] == pages - BATCH_PAGES
        await quiet(small)
        await small.cache.reset()
        again = await small.engine.answer(asked, deadline_s=30.0)
        assert (again.account.storage, again.tokens) == (pages * PAGE, first.tokens)


@pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)
async def test_b046_pages_that_were_never_written_count_as_absent(anyio_backend: object) -> None:
    """Given a store that fails the second of 5 batches of a prefix whenever its pages are written.
    When the save has been given up.
    Then what is beyond counts as absent and as failed, is not found, and a later write saves it."""
    pages, beyond = 5 * BATCH_PAGES, 4 * BATCH_PAGES
    backend, asked = MemoryBackend(), prompt(pages)
    bad_keys: set[str] = set()
    broken = True

    def schedule(access: Access) -> Exception | None:
        if _in_second_batch(access) and access.attempt == 1:
            bad_keys.add(access.key)
        return BackendError("planted") if broken and access.verb == "write" and access.key in bad_keys else None

    async with opened(device_pages=pages + 10, host_pages=2 * pages + 20, backend=Faulty(backend, schedule)) as small:
        await compute(small, asked)
        assert await small.cache.stored(asked, 120.0) == StoredTokens(BATCH_PAGES * PAGE, "given_up")
        counts = small.cache.snapshot().counts
        assert (counts["backup_failed_pages"], counts["backup_given_up_pages"]) == (4 * beyond, beyond)
        assert backend.stats()["objects"] == BATCH_PAGES
        await quiet(small)
        await small.cache.reset()
        assert await small.cache.prefetch(asked, "look", deadline_s=30.0).wait() == BATCH_PAGES * PAGE
        broken = False
        await compute(small, asked)
        assert await small.cache.stored(asked, 60.0) == StoredTokens(pages * PAGE)


@LOOPS
async def test_b047_what_the_host_drops_is_found_in_the_store(anyio_backend: object) -> None:
    """Given write_through and traffic of 4 times the device and twice the host.
    When all prefixes are replayed.
    Then the store gives what the host had dropped, and more than nothing."""
    async with opened(device_pages=8, host_pages=16, backend=MemoryBackend()) as small:
        prompts = [prompt(4, family=family) for family in range(8)]
        answers = []
        for asked in prompts:
            answers.append(await compute(small, asked))
            assert await small.cache.drain(60.0) == 0
        assert await from_storage(small, prompts, answers) >= 4 * 4 * PAGE


@LOOPS
async def test_b050_a_host_smaller_than_the_device_still_feeds_the_store(anyio_backend: object) -> None:
    """Given a host of half the device, and write_through.
    When prompts of 10 times the device have been served, with time to save each, and the first ones come again.
    Then the store holds every prefix, and fetches find room."""
    backend = MemoryBackend()
    async with opened(device_pages=16, host_pages=8, backend=backend) as small:
        prompts = [prompt(4, family=family) for family in range(40)]
        for asked in prompts:
            await compute(small, asked)
            assert await small.cache.drain(60.0) == 0
        assert backend.stats()["objects"] == 160
        for asked in prompts[:20]:
            again = await small.engine.answer(asked)
            assert again.account.storage == 4 * PAGE
        counts = small.cache.snapshot().counts
        assert counts.get("prefetch_host_capacity", 0) == counts.get("write_back_refused_pages", 0) == 0


class _Keys(Wrapper):
    """Keeps the keys that are written and asked for."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.written: list[str] = []
        self.asked: list[str] = []

    async def exists(self, keys: Sequence[str]) -> int:
        self.asked += keys
        return await super().exists(keys)

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        self.written += keys
        return await super().write(keys, buffers)


@pytest.mark.parametrize(
    ("first_token", "scope"),
    [(0, NO_SCOPE), (0, Scope(lora="adapter")), (0, Scope(lora="adapter", salt="tenant")), (1 << 40, NO_SCOPE)],
    ids=["plain", "lora", "salted", "wide ids"],
)
@pytest.mark.parametrize("turns", [(10,), (3, 7, 10)], ids=["at once", "in turns"])
async def test_b053_writer_and_reader_derive_the_same_keys(
    first_token: int, scope: Scope, turns: tuple[int, ...]
) -> None:
    """Given 10 pages of a prompt with each kind of key.
    When they have been stored, at once or in turns, and a later cache asks for them.
    Then all 10 are hit, and the keys asked for are those that were written."""
    keys = _Keys(MemoryBackend())
    asked = Prompt([first_token + token for token in tokens(10)], scope)
    async with opened(backend=keys) as small:
        for pages in turns:
            first = await compute(small, Prompt(asked.tolist()[: pages * PAGE + 1], scope))
            await quiet(small)
        assert await small.cache.drain(60.0) == 0
    written = list(keys.written)
    assert len(set(written)) == len(written) == 10
    async with opened(backend=keys) as small:
        keys.asked.clear()
        again = await small.engine.answer(Prompt(asked.tolist(), scope))
        assert (again.account.storage, again.tokens) == (10 * PAGE, first.tokens)
        assert keys.asked == written


@LOOPS
async def test_b059_pages_not_yet_saved_at_the_end_of_a_request_are_saved(anyio_backend: object) -> None:
    """Given a prompt of 100 pages, computed in 4 chunks, and one decoded token; no copy has run when the request ends.
    When the copies have run and the device has been flushed.
    Then all 100 pages are on the host and in the store, and all are found."""
    async with opened(device_pages=128, host_pages=128, backend=MemoryBackend()) as small:
        asked = prompt(100)
        with small.device.gate("write_back") as gate:
            token = await _in_chunks(small, asked, 25)
            await fired(gate.reached)
            assert on_device_and_host(small, asked) == (100, 100)
        assert await small.cache.stored(asked, 60.0) == StoredTokens(100 * PAGE)
        await clear_device(small)
        assert on_device_and_host(small, asked) == (0, 100)
        again = await compute(small, asked)
        assert (again.account.host, again.tokens) == (100 * PAGE, (token,))


async def _in_chunks(small: Small, asked: Prompt, pages: int) -> int:
    """Compute ``asked`` in chunks, decode one token and end -> the first token."""
    async with small.cache.acquire(asked, deadline_s=0.0) as lease:
        start, token = 0, 0
        while start < len(asked):
            end = min(start + pages * PAGE, len(asked))
            assert not isinstance(lease.allocate(end - start), Shortfall)
            token = await lease.run(small.model.forward, asked, lease.pages, start, end, None)
            lease.commit(end)
            start = end
        whole = Prompt([*asked.tolist(), token])
        assert not isinstance(lease.allocate(1), Shortfall)
        await lease.run(small.model.forward, whole, lease.pages, len(asked), len(whole), None)
    return token
