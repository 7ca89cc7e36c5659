"""Field reports, section E: no worker dies of stores that fail, hang or crawl, nothing piles up, and who asks fails fast."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import anyio
import pytest

from hicache_actors.backends.backend import Stored
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Access, Faulty, Hanging, Slow, Wrapper
from hicache_actors.config import PrefetchPolicy
from hicache_actors.errors import BackendError
from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.small import prompt

from .kit import PAGE, VIRTUAL, compute, ended, opened, store


@VIRTUAL
async def test_b075_no_error_of_a_store_ends_the_saving(anyio_backend: object) -> None:
    """Given a store whose 3rd, 5th, 7th and 9th write raise each something else, none of them an error that a store should raise.
    When 20 prompts are saved.
    Then 16 are stored, 4 are counted as failed and tried again, and no host page stays locked."""
    errors: dict[int, Exception] = {
        3: ValueError("planted"),
        5: OSError(5, "planted"),
        7: TimeoutError(),
        9: Exception("planted"),
    }

    def schedule(access: Access) -> Exception | None:
        return errors.get(access.call) if access.verb == "write" else None

    async with opened(device_pages=128, host_pages=128, backend=Faulty(MemoryBackend(), schedule)) as small:
        for family in range(20):
            await compute(small, prompt(4, family=family))
            await ended(small, "write_back", "backup")
        assert small.cache.core.usage().stored_pages == 16 * 4
        assert small.cache.core.counts["backup_failed_pages"] == 4 * 4
        snapshot = small.cache.snapshot().storage
        assert snapshot is not None
        assert snapshot.errors == {"write": 4}
        assert await small.cache.drain(60.0) == 0  # what failed was tried again
        assert small.cache.core.usage().host.evictable_pages == small.cache.core.usage().host.owned_pages


class TimesOut(Wrapper):
    """Its data has gone with its node, its directory has not: lookups find all, reads take 1 s and fail."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.gone = True
        self.reads = 0

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        if not self.gone:
            return await super().read(keys, buffers)
        self.reads += 1
        await anyio.sleep(1.0)
        raise TimeoutError


@VIRTUAL
async def test_b081_a_dead_node_that_is_still_advertised_is_paid_for_once_or_twice(anyio_backend: object) -> None:
    """Given a store that finds 8 keys and whose reads of them time out after a second.
    When 10 requests for that prefix come, and later the node is back.
    Then one or two pay the timeout, the others are served at once, and hits return in bounded time."""
    memory = MemoryBackend()
    asked = prompt(8)
    (reference,) = await store(memory, asked)
    backend = TimesOut(memory)
    async with opened(device_pages=32, host_pages=64, backend=backend) as small:
        waits_s: list[float] = []
        for _ in range(10):
            began_s = anyio.current_time()
            async with small.cache.acquire(asked, deadline_s=5.0) as lease:
                assert lease.usable_tokens == 0
            waits_s.append(anyio.current_time() - began_s)
            await anyio.sleep(0.05)
        assert sum(wait_s > 0.5 for wait_s in waits_s) <= 2
        assert backend.reads <= 2
        backend.gone = False
        with anyio.fail_after(5.0):
            hit = 0
            while not hit:
                await anyio.sleep(0.5)
                async with small.cache.acquire(asked, deadline_s=5.0) as lease:
                    hit = lease.account.storage
        assert hit == 8 * PAGE
        assert (await small.engine.answer(asked)).tokens == reference.tokens


@VIRTUAL
async def test_b089_evictions_do_not_wait_for_puts_that_never_return(anyio_backend: object) -> None:
    """Given a store whose writes never return.
    When 100 prompts are computed, each of which evicts what the one before has left.
    Then none waits for the store, and calls and memory behind it are bounded."""
    backend = Hanging(MemoryBackend(), ["write"])
    async with opened(device_pages=9, host_pages=24, backend=backend, write_timeout_s=1.0) as small:
        for family in range(100):
            began_s = anyio.current_time()
            await compute(small, prompt(7, family=family))  # each evicts what the one before has left
            assert anyio.current_time() - began_s < 1.0
            await anyio.sleep(0.1)
        snapshot = small.cache.snapshot()
        assert snapshot.storage is not None
        lane = snapshot.storage.lanes["write"]
        assert backend.hung <= lane.concurrency + lane.max_hung_calls
        assert snapshot.core.host.limbo_pages <= 7 * backend.hung
        assert snapshot.storage.refused["write"]
        check_conservation(small.cache.core)
        backend.release()


@pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)
@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
@pytest.mark.parametrize("answer", ["raises", "none", "too few"])
async def test_b090_a_fetch_that_fails_ends_under_every_policy(
    anyio_backend: object, policy: PrefetchPolicy, answer: str
) -> None:
    """Given a store whose reads raise, return None, or return too few answers, and each policy for ending a fetch.
    When a prefix is asked for.
    Then the request goes on within a second, with the pages that did arrive."""

    class Bad(Wrapper):
        async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
            found = await super().read(keys, buffers)
            if answer == "raises":
                raise OSError(5, "planted")
            return None if answer == "none" else found[:3]  # type: ignore[return-value]

    memory = MemoryBackend()
    await store(memory, prompt(6))
    async with opened(device_pages=32, host_pages=64, backend=Bad(memory), prefetch_policy=policy) as small:
        began_s = anyio.current_time()
        async with small.cache.acquire(prompt(6)) as lease:
            arrived = lease.account.storage
        assert anyio.current_time() - began_s < 1.0
        assert arrived in ((0, 3 * PAGE) if policy == "best_effort" else (3 * PAGE if answer == "too few" else 0,))


@VIRTUAL
async def test_b093_gets_that_time_out_do_not_pile_up(anyio_backend: object) -> None:
    """Given a store whose reads never return.
    When 500 requests with a fetch come.
    Then tasks and hung calls stay bounded, and all but the first few fail fast."""
    memory = MemoryBackend()
    await store(memory, *(prompt(4, family=family) for family in range(10)))
    backend = Hanging(memory)
    async with opened(device_pages=32, host_pages=256, backend=backend, read_timeout_s=0.5) as small:
        most_tasks = most_hung = 0
        waits_s: list[float] = []
        for number in range(500):
            began_s = anyio.current_time()
            async with small.cache.acquire(prompt(4, family=number % 10), deadline_s=0.2):
                pass
            waits_s.append(anyio.current_time() - began_s)
            most_tasks = max(most_tasks, sum(task.get_name().startswith("storage-") for task in asyncio.all_tasks()))
            most_hung = max(most_hung, backend.hung)
            await anyio.sleep(0.02)
        assert most_hung <= 4 + 4
        assert most_tasks <= 12  # of 500
        assert sum(wait_s > 0.1 for wait_s in waits_s) <= 8  # those that hang; the others fail fast
        backend.release()


@VIRTUAL
async def test_b099_what_a_slow_store_is_sent_is_bounded_and_fetches_get_through(anyio_backend: object) -> None:
    """Given a slow store, a limit for bytes under way, and more writes than it can take.
    When it is offered them at full speed, and a fetch comes in between.
    Then what is under way never exceeds the limit, the rest is refused and counted, and the fetch gets through."""

    class Peak(Slow):
        now = most = 0

        async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
            self.now += sum(map(len, buffers))
            self.most = max(self.most, self.now)
            try:
                return await super().write(keys, buffers)
            finally:
                self.now -= sum(map(len, buffers))

    memory = MemoryBackend()
    await store(memory, prompt(2, family=500))
    limit_bytes = 20 * 4096
    backend = Peak(memory, bytes_per_s=15_000)
    async with opened(
        device_pages=16, host_pages=400, backend=backend, write_in_flight_bytes=limit_bytes, write_concurrency=8
    ) as small:
        for family in range(40):
            await compute(small, prompt(4, family=family))
            await anyio.sleep(0.1)
            if family == 20:
                async with small.cache.acquire(prompt(2, family=500), deadline_s=5.0) as lease:
                    assert lease.account.storage == 2 * PAGE
        snapshot = small.cache.snapshot()
        assert backend.most <= limit_bytes
        assert snapshot.storage is not None
        assert snapshot.storage.refused["write"].get("credits", 0) > 0


@VIRTUAL
async def test_b088_a_store_that_cannot_be_reached_at_the_start_is_refused_in_time(anyio_backend: object) -> None:
    """Given a store that never answers when it is opened, or cannot be reached.
    When a cache is opened on it; and then one without it, which gets it later.
    Then the first is refused in time and says why, nothing of it is left running, and the second serves all along."""

    class Unreachable(MemoryBackend):
        hangs = True

        async def open(self) -> None:
            if self.hangs:
                await anyio.sleep_forever()
            raise ConnectionRefusedError("planted")

    backend = Unreachable()
    for reason in ("no answer within", "planted"):
        tasks = len(asyncio.all_tasks())
        with anyio.fail_after(11.0), pytest.raises(BackendError, match=reason):
            async with opened(backend=backend):
                pass
        assert len(asyncio.all_tasks()) == tasks
        async with opened() as small:
            await compute(small, prompt(4))
            with pytest.raises(BackendError, match=reason):
                await small.cache.attach_storage(backend, deadline_s=1.0)
            assert (await compute(small, prompt(4))).account.device == 4 * PAGE
        backend.hangs = False
