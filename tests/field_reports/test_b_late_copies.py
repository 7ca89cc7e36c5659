"""Field reports, section B: copies, reads and writes that end late must find their pages untouched, and touch nobody else's.

Reuse that comes too early shows as wrong bytes: the toy model compares every byte it reads, and pages that were handed out are
filled with a pattern.  B033, a store whose leases run out, is in `test_b_leases`.
"""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from hicache_actors import Shortfall
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Hanging
from hicache_actors.cache.handles import Lease, Load
from hicache_actors.config import Deadlines
from hicache_actors.errors import TransferError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.testing.small import Small, prompt
from hicache_actors.transfer.completions import Completion, fired

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
    scribble,
    scribbled,
    store,
    take,
    until,
)


@LOOPS
async def test_b014_a_fetch_that_was_given_up_writes_into_nobody_elses_pages(anyio_backend: object) -> None:
    """Given a store whose reads end long after the time limit of a fetch.
    When a fetch of 6 pages has been given up and others fill what is left of the host pool.
    Then the late read damages none of them, its pages are in limbo until it has ended, and nothing is lost."""
    backend = MemoryBackend()
    asked = prompt(6, family=1)
    (first,) = await store(backend, asked)
    slow = Hanging(backend)
    async with opened(device_pages=8, host_pages=12, backend=slow) as small:
        async with small.cache.acquire(asked, deadline_s=0.1) as lease:
            assert lease.usable_tokens == 0
            assert lease.account.reasons["fetch_incomplete"] == 6 * PAGE
        assert small.cache.core.usage().host.limbo_pages == 6
        others = [prompt(6, family=2), prompt(6, family=3)]
        answers = []
        for other in others:
            answers.append(await compute(small, other))
            await ended(small, "write_back", "backup")
        assert small.cache.core.usage().host.limbo_pages == 6
        slow.release()
        await quiet(small)
        usage = small.cache.core.usage().host
        assert (usage.limbo_pages, usage.free_pages + usage.evictable_pages) == (0, 12)
        await clear_device(small)
        again = await compute(small, others[1])
        assert again.account.host == 6 * PAGE
        assert again.tokens == answers[1].tokens
        assert (await small.engine.answer(asked)).tokens == first.tokens


@LOOPS
async def test_b020_pages_that_are_being_loaded_are_not_evicted_from_the_host(anyio_backend: object) -> None:
    """Given a full host pool and a held host-to-device copy of 4 of its pages.
    When a new prompt wants 8 host pages.
    Then it gets those of others, the 4 stay, and the loaded bytes are the original ones."""
    async with opened(device_pages=20, host_pages=8) as small:
        loaded, other, new = prompt(4, family=1), prompt(4, family=2), prompt(8, family=3)
        first = await compute(small, loaded)
        await compute(small, other)
        await quiet(small)
        await clear_device(small)
        answers = []

        async def load() -> None:
            answers.append(await compute(small, loaded))

        async with anyio.create_task_group() as group:
            with small.device.gate("load") as gate:
                group.start_soon(load)
                await fired(gate.reached)
                await compute(small, new)
                await ended(small, "write_back")
                assert on_device_and_host(small, other) == (0, 0)
                assert small.cache.match(loaded).host == 4 * PAGE
                assert small.cache.snapshot().counts["write_back_refused_pages"] == 4
        assert answers[0].account.host == 4 * PAGE
        assert answers[0].tokens == first.tokens
        await clear_device(small)
        assert (await compute(small, loaded)).account.host == 4 * PAGE


@LOOPS
async def test_b021_device_pages_are_not_reused_before_their_copy_has_ended(anyio_backend: object) -> None:
    """Given a held device-to-host copy of 4 pages whose request has gone.
    When all device pages are asked for, and what is had is overwritten.
    Then the 4 are not had, and the host copy is the original."""
    async with opened(device_pages=12, host_pages=12) as small:
        asked = prompt(4)
        with small.device.gate("write_back") as gate:
            first = await compute(small, asked)
            await fired(gate.reached)
            taker = small.cache.lease(prompt(0), "taker")
            refused = taker.allocate(12 * PAGE)
            assert isinstance(refused, Shortfall)
            assert (refused.missing_pages, refused.freeing_pages) == (4, 4)
            assert not isinstance(taker.allocate(8 * PAGE), Shortfall)
            scribble(small, taker)
        await quiet(small)
        assert scribbled(small, taker)
        taker.release()
        await clear_device(small)
        again = await compute(small, asked)
        assert (again.account.host, again.tokens) == (4 * PAGE, first.tokens)


@LOOPS
async def test_b023_no_page_is_saved_before_it_has_been_computed(anyio_backend: object) -> None:
    """Given pages that are committed before their forward pass has run.
    When its event comes late, 20 times.
    Then each copy has waited for it, and host and storage hold the final bytes."""
    async with opened(device_pages=8, host_pages=200, backend=MemoryBackend()) as small:
        write_backs = small.device.stream("write_back")
        for family in range(20):
            await quiet(small)
            asked = prompt(4, family=family)
            submitted = write_backs.counts().submitted
            lease, computed = small.cache.lease(asked, "r"), Completion()
            assert not isinstance(lease.allocate(len(asked)), Shortfall)
            scribble(small, lease)  # what an early copy would take
            lease.commit(len(asked), after=computed)
            lease.release()
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            assert write_backs.counts().submitted == submitted
            token = small.model.forward(asked, lease.pages, 0, len(asked))
            computed.finish()
            assert (await small.cache.stored(asked, 10.0)).tokens == 4 * PAGE
            await clear_device(small)
            from_host = await compute(small, asked)
            assert (from_host.account.host, from_host.tokens) == (4 * PAGE, (token,))
        await small.cache.reset()
        assert (await small.engine.answer(prompt(4, family=7))).account.storage == 4 * PAGE


@LOOPS
async def test_b027_a_split_during_a_storage_write_keeps_the_source(anyio_backend: object) -> None:
    """Given a node of 8 pages whose write to the store reads its buffers late.
    When a prompt that differs at page 4 splits the node, and then 8 host pages are wanted.
    Then all 8 stored objects have the original bytes."""
    slow = Hanging(MemoryBackend(), ["write"])
    async with opened(device_pages=32, host_pages=12, backend=slow) as small:
        asked, other = prompt(8), branch(4, 8)
        first = await compute(small, asked)
        await until(lambda: slow.hung == 1)
        await compute(small, other)
        await ended(small, "write_back")
        assert small.cache.match(asked).host == 8 * PAGE
        await compute(small, prompt(8, family=2))
        assert small.cache.snapshot().counts["write_back_refused_pages"] == 8  # nothing could be taken
        slow.release()
        await quiet(small)
        await small.cache.reset()
        again = await small.engine.answer(asked)
        # Half of the host may be staged at a time.
        assert (again.account.storage, again.tokens) == (6 * PAGE, first.tokens)
        again = await small.engine.answer(asked)
        assert again.account.computed <= PAGE + 1


async def _load(small: Small, asked: Prompt, rid: str) -> tuple[Lease, Load]:
    lease = small.cache.lease(asked, rid)
    load = lease.load()
    assert not isinstance(load, Shortfall)
    return lease, load


@LOOPS
async def test_b036_a_failed_part_of_a_load_does_not_free_the_page_under_its_other_parts(anyio_backend: object) -> None:
    """Given a load of several copies: the first fails at once, the others end long after the deadline.
    When the load has been reported, and all device pages are asked for and overwritten.
    Then the loading pages are not had before all copies have ended, and the request is computed."""
    async with opened(device_pages=12, host_pages=12, deadlines=Deadlines(load_s=0.05)) as small:
        asked = prompt(4)
        first = await compute(small, asked)
        await quiet(small)
        await clear_device(small)
        small.device.fail_next(TransferError("planted"), stream="load")
        with small.device.gate("load") as gate:
            gate.allow(1)
            lease, load = await _load(small, asked, "r")
            with pytest.raises(TransferError):
                await load.ready(0)
            assert small.device.stream("load").counts().finished == 0
            verdict = await load.verdict()
            assert (verdict.valid_tokens, verdict.failed) == (0, "load_failed")
            lease.release()
            assert small.cache.core.usage().device.limbo_pages == 4
            taker = take(small, 8)
            refused = taker.allocate(PAGE)
            assert isinstance(refused, Shortfall)
            assert refused.freeing_pages == 4
            scribble(small, taker)
        await quiet(small)
        assert scribbled(small, taker)
        assert not isinstance(taker.allocate(4 * PAGE), Shortfall)
        taker.release()
        small.device.fail_next(TransferError("planted"), stream="load")
        again = await compute(small, asked)
        assert (again.retries, again.tokens) == (1, first.tokens)


@LOOPS
async def test_b038_a_page_is_not_saved_before_its_own_load_has_landed(anyio_backend: object) -> None:
    """Given 4 pages that are being loaded, and 4 more committed below them, all wanted by the write policy.
    When the copy ends late.
    Then nothing is saved before, and afterwards host and storage hold the final bytes of all 8."""
    async with opened(device_pages=16, host_pages=32, backend=MemoryBackend()) as small:
        await compute(small, prompt(4))
        await quiet(small)
        await clear_device(small)
        asked, computed = prompt(8), Completion()
        write_backs = small.device.stream("write_back")
        submitted = write_backs.counts().submitted
        with small.device.gate("load") as gate:
            lease, load = await _load(small, asked, "r")
            assert lease.usable_tokens == 4 * PAGE
            assert not isinstance(lease.allocate(len(asked) - lease.usable_tokens), Shortfall)
            lease.commit(len(asked), after=computed)
            await fired(gate.reached)
            assert write_backs.counts().submitted == submitted
        for layer in range(small.cache.kv.shape.layers):
            await load.ready(layer)
        token = small.model.forward(asked, lease.pages, lease.usable_tokens, len(asked))
        computed.finish()
        assert (await load.verdict()).failed is None
        lease.release()
        assert (await small.cache.stored(asked, 10.0)).tokens == 8 * PAGE
        await clear_device(small)
        from_host = await compute(small, asked)
        assert (from_host.account.host, from_host.tokens) == (8 * PAGE, (token,))
        await quiet(small)
        await small.cache.reset()
        from_storage = await small.engine.answer(asked)
        assert (from_storage.account.storage, from_storage.tokens) == (8 * PAGE, (token,))


@LOOPS
async def test_b034_a_match_that_has_gone_before_the_load_is_a_shorter_hit(anyio_backend: object) -> None:
    """Given a match of 8 pages on the host.
    When the host is flooded, in part or wholly, before the lease or between lease and load.
    Then the hit is what is left, the rest is computed, and the answer is the same; never an assertion."""
    for flooded_pages in (2, 8):
        for leased_before in (False, True):
            async with opened(device_pages=24, host_pages=8) as small:
                asked = prompt(8)
                first = await compute(small, asked)
                await quiet(small)
                # Two nodes, the lower one used longer ago.
                small.cache.lease(prompt(4), "toucher").release()
                await clear_device(small)
                assert small.cache.match(asked).host == 8 * PAGE
                lease = small.cache.lease(asked, "r") if leased_before else None
                await compute(small, prompt(flooded_pages, family=1))
                await quiet(small)
                if lease is None:
                    lease = small.cache.lease(asked, "r")
                load = lease.load()
                assert not isinstance(load, Shortfall)
                assert lease.usable_tokens == (4 * PAGE if flooded_pages == 2 else 0)
                for layer in range(small.cache.kv.shape.layers):
                    await load.ready(layer)
                assert not isinstance(lease.allocate(len(asked) - lease.usable_tokens), Shortfall)
                token = small.model.forward(asked, lease.pages, lease.usable_tokens, len(asked))
                assert (token,) == first.tokens
                assert (await load.verdict()).failed is None
                lease.release()
                await quiet(small)
                assert pins(small) == 0
