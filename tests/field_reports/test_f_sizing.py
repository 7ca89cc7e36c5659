"""Field reports, section F: what a request is refused, what a setting is turned into, and what a size counts.

Sizes are scaled to pages of 4 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from hicache_actors import ConfigError, Shortfall
from hicache_actors.backends import Stored
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.registry import known_schemes, open_backend
from hicache_actors.backends.wrappers import Slow, Wrapper
from hicache_actors.cache.handles import Lease
from hicache_actors.config import HostConfig, PrefetchPolicy, WritePolicy
from hicache_actors.core.words import Account
from hicache_actors.keys.prompt import Prompt
from hicache_actors.memory.budget import host_memory_scope, take_host_memory
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import content, room
from hicache_actors.testing.small import SHAPE, Small, prompt, small_config
from hicache_actors.tiers.storage.words import Direction, LaneSnapshot

from .kit import PAGE, VIRTUAL, branch, compute, opened, quiet, store

VIRTUAL_ONCE = pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)


# -- B101: the cap on what may be fetched -----------------------------------------------------------------------------


async def _ask_at_once(small: Small, prompts: Sequence[Prompt], deadline_s: float | None = None) -> list[Account]:
    """Acquire all prompts at the same time -> their accounts, in the order of the prompts."""
    accounts: list[Account | None] = [None] * len(prompts)

    async def ask(number: int) -> None:
        async with small.cache.acquire(prompts[number], deadline_s=deadline_s) as lease:
            accounts[number] = lease.account

    async with anyio.create_task_group() as group:
        for number in range(len(prompts)):
            group.start_soon(ask, number)
    return [account for account in accounts if account is not None]


@pytest.mark.parametrize("host_per_device", [1, 2])
@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
@VIRTUAL_ONCE
async def test_b101_a_fetch_that_finds_the_budget_used_up_is_tried_again(
    anyio_backend: object, policy: PrefetchPolicy, host_per_device: int
) -> None:
    """Given 24 stored prompts of 60 pages, and a host of the device's size or twice that, half of which may be in fetches.
    When all are asked for at once on an empty cache.
    Then every prompt is hit whole: who finds the budget used up asks again when a fetch has ended."""
    backend = MemoryBackend()
    prompts = [prompt(60, family=family) for family in range(24)]
    await store(backend, *prompts)
    device_pages = 24 * 60
    async with opened(
        device_pages=device_pages,
        host_pages=device_pages * host_per_device,
        backend=Slow(backend, 0.02, jitter_s=0.01),
        prefetch_policy=policy,
    ) as small:
        accounts = await _ask_at_once(small, prompts)
        assert [account.storage for account in accounts] == [60 * PAGE] * 24
        assert all("host_capacity" not in account.reasons for account in accounts)
        assert (small.cache.snapshot().counts.get("prefetch_host_capacity", 0) > 0) == (host_per_device == 1)
        assert small.cache.core.usage().staged_pages == 0


@VIRTUAL
async def test_b101_who_waits_for_budget_waits_no_longer_than_its_deadline(anyio_backend: object) -> None:
    """Given a fetch that holds the whole budget for a second.
    When two others are asked for, one of which will not wait that long.
    Then that one is served without its pages in time, and says why; the other gets them."""
    backend = MemoryBackend()
    large, hasty, patient = (prompt(8, family=family) for family in range(3))
    await store(backend, large, hasty, patient)
    ended_s: dict[str, float] = {}
    got: dict[str, Account] = {}
    slow = Slow(backend, 1.0)
    async with opened(device_pages=40, host_pages=16, backend=slow, prefetch_policy="wait_complete") as small:

        async def ask(name: str, asked: Prompt, deadline_s: float) -> None:
            async with small.cache.acquire(asked, deadline_s=deadline_s) as lease:
                ended_s[name], got[name] = anyio.current_time() - begun_s, lease.account

        begun_s = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(ask, "large", large, 10.0)
            await anyio.sleep(0.1)
            group.start_soon(ask, "hasty", hasty, 1.5)
            group.start_soon(ask, "patient", patient, 10.0)
        assert got["large"].storage == got["patient"].storage == 8 * PAGE
        assert (got["hasty"].storage, got["hasty"].reasons["host_capacity"]) == (0, 8 * PAGE)
        assert 1.5 <= ended_s["hasty"] - 0.1 < 1.51
        assert small.cache.core.usage().pending_acquires == 0


@VIRTUAL
async def test_b101_who_waits_for_budget_may_leave(anyio_backend: object) -> None:
    """Given a fetch that holds the whole budget, and another request that waits for it.
    When the second is cancelled, the first ends, and the second is asked for anew.
    Then nothing of it has been left behind, and it gets its pages."""
    backend = MemoryBackend()
    first, second = prompt(8, family=1), prompt(8, family=2)
    await store(backend, first, second)
    async with opened(device_pages=40, host_pages=16, backend=Slow(backend, 0.5)) as small:
        async with anyio.create_task_group() as group:
            group.start_soon(_ask_at_once, small, [first])
            await anyio.sleep(0.1)
            with anyio.move_on_after(0.7) as scope:
                await _ask_at_once(small, [second])
            assert scope.cancelled_caught
            assert small.cache.core.usage().pending_acquires == 1
        (account,) = await _ask_at_once(small, [second])
        assert account.storage == 8 * PAGE


async def test_b101_a_budget_of_nothing_is_refused_at_the_start() -> None:
    """Given a host of one page, of which half a page may be in fetches.
    When a cache with storage is opened.
    Then it is refused, and the setting, the reason and what is allowed are named."""
    with pytest.raises(ConfigError, match="at most half of the slots") as caught:
        async with opened(host_pages=1, backend=MemoryBackend()):
            pass
    assert (caught.value.field, caught.value.value) == ("host.pages", 1)
    assert caught.value.allowed.startswith("at least 2 pages")


# -- B103, B104: settings and sizes -----------------------------------------------------------------------------------

_EFFECTIVE: dict[str, tuple[tuple[int, ...], Callable[[Small], int]]] = {
    "host_pages": ((2, 33, 500), lambda small: small.cache.snapshot().core.host.total_pages),
    "device_pages": ((1, 17, 200), lambda small: small.cache.snapshot().core.device.total_pages),
    "read_concurrency": ((1, 7), lambda small: _lane(small, "read").concurrency),
    "write_concurrency": ((1, 5), lambda small: _lane(small, "write").concurrency),
    "read_in_flight_bytes": ((1, 12_345), lambda small: _lane(small, "read").limit_bytes or 0),
    "write_in_flight_bytes": ((1, 54_321), lambda small: _lane(small, "write").limit_bytes or 0),
    "max_hung_calls": ((1, 9), lambda small: _lane(small, "read").max_hung_calls),
}


def _lane(small: Small, direction: Direction) -> LaneSnapshot:
    storage = small.cache.snapshot().storage
    assert storage is not None
    return storage.lanes[direction]


@pytest.mark.parametrize("name", _EFFECTIVE)
@VIRTUAL_ONCE
async def test_b103_what_was_set_is_what_is_in_force(anyio_backend: object, name: str) -> None:
    """Given each number that a snapshot shows, set to small, odd and large values.
    When the cache is open.
    Then the snapshot shows that very value."""
    values, read_back = _EFFECTIVE[name]
    for value in values:
        async with opened(backend=MemoryBackend(), **{name: value}) as small:
            assert read_back(small) == value


@pytest.mark.parametrize("threshold_tokens", [1, 20, 22, 8192])
@VIRTUAL_ONCE
async def test_b103_no_threshold_is_raised_in_silence(anyio_backend: object, threshold_tokens: int) -> None:
    """Given a threshold below which storage is not read: smaller than a page, whole pages, in between, and large.
    When prompts with just as many stored pages, and with one less, are asked for.
    Then the first is fetched, the second is not, and says why."""
    enough = max(1, -(-threshold_tokens // PAGE))
    backend = MemoryBackend()
    just, less = prompt(enough, family=1), prompt(enough - 1, family=2, extra=PAGE)
    await store(backend, just, less)
    config = small_config(host_pages=2 * enough + 2)
    storage = msgspec.structs.replace(config.storage, prefetch_threshold_tokens=threshold_tokens)
    config = msgspec.structs.replace(config, storage=storage)
    async with opened(config=config, device_pages=enough + 2, backend=backend) as small:
        async with small.cache.acquire(just, deadline_s=30.0) as lease:
            assert lease.account.storage == enough * PAGE
        await quiet(small)
        async with small.cache.acquire(less, deadline_s=30.0) as lease:
            assert lease.account.storage == 0
            assert enough == 1 or lease.account.reasons["below_threshold"] == (enough - 1) * PAGE


@pytest.mark.parametrize("setting", [{"pages": 37}, {"size_gb": 0.001}, {"ratio": 3.5}])
async def test_b103_the_capacity_that_is_shown_is_the_memory_that_is_taken(setting: dict[str, Any]) -> None:
    """Given a host pool by each way of saying its size.
    When the cache is open.
    Then pages shown, times the bytes of a page, are the bytes that were mapped, in the report as in the snapshot."""
    config = msgspec.structs.replace(small_config(), host=HostConfig(**setting))
    async with opened(device_pages=10, config=config) as small:
        memory, snapshot = small.cache.movers.host.memory, small.cache.snapshot()
        (host,) = [tier for tier in small.cache.report.tiers if tier.tier == "host"]
        assert snapshot.core.host.total_pages == host.pages == host.tokens // PAGE
        assert host.pages * snapshot.host.slot_bytes == host.bytes == snapshot.host.nbytes == memory.nbytes


async def test_b104_all_that_is_taken_stays_within_the_size_that_was_set() -> None:
    """Given a size for the host pool, and another pool of the same process that was sized first.
    When the cache is opened.
    Then headers and padding count towards the size, and what does not fit beside the other pool is refused."""
    config = msgspec.structs.replace(small_config(), host=HostConfig(size_gb=0.001))
    async with opened(config=config) as small:
        nbytes = small.cache.movers.host.memory.nbytes
        assert 0.99e6 < nbytes <= 1e6
        assert nbytes == small.cache.snapshot().core.host.total_pages * SlotLayout(SHAPE).slot_bytes
    with host_memory_scope(ranks=1) as account:
        take_host_memory("side pool", account.share_bytes() - 900_000)
        with pytest.raises(ConfigError, match="side pool") as caught:
            async with opened(config=config):
                pass
        assert caught.value.field == "host.size_gb"
        assert sum(account.taken.values()) <= account.limit.available_bytes


# -- B105: every store that is offered can be used --------------------------------------------------------------------

_SMALLEST: dict[str, Callable[[Path], str]] = {
    "memory": lambda folder: "memory://",
    "file": lambda folder: f"file://{folder}/store",
    "sglang-file": lambda folder: f"sglang-file://{folder}/flat",
    "slab": lambda folder: f"slab://{folder}/slots?gb=0.001",
    "mmap": lambda folder: f"mmap://{folder}/slots?gb=0.001",
}
_BY_CLASS = {"dynamic", "sglang", "shm"}  # in tests/backends/test_foreign.py and test_slab.py
_ON_SERVERS = {"redis", "redis+unix", "valkey", "valkey+unix", "s3", "mooncake", "lmcache", "nixl"}  # in tests/engines


def test_b105_every_built_in_store_is_tried() -> None:
    """Given the stores that this package offers.
    When they are compared with those of the next test.
    Then none is missing."""
    assert set(known_schemes()) == set(_SMALLEST) | _BY_CLASS | _ON_SERVERS


@pytest.mark.parametrize("scheme", _SMALLEST)
async def test_b105_every_store_can_be_built_and_keeps_the_contract(scheme: str, tmp_path: Path) -> None:
    """Given each store with the smallest configuration that is documented.
    When it is built, and put, get, exists, delete, clear, cancel, close and a request through a cache are tried.
    Then each does what the contract says (the contract suite has the details)."""
    workers = Workers("stores", 2)
    backend = open_backend(_SMALLEST[scheme](tmp_path), workers)
    await backend.open()
    keys = ["a", "b", "c"]
    assert list(await backend.write(keys, [memoryview(content(key, 100)) for key in keys])) == [Stored.WRITTEN] * 3
    assert await backend.exists([*keys, "d"]) == 3
    buffers = room(3, 100)
    assert list(await backend.read(keys, buffers)) == [True] * 3
    assert [bytes(buffer) for buffer in buffers] == [content(key, 100) for key in keys]
    with anyio.CancelScope() as scope:
        scope.cancel()
        await backend.exists(keys)
    assert await backend.delete(["a", "d"]) == 1
    await backend.clear()
    assert await backend.exists(["b"]) == 0
    await backend.close()
    assert workers.close(10.0) == ()
    asked = prompt(4)
    async with opened(url=_SMALLEST[scheme](tmp_path / "another")) as small:
        first = await compute(small, asked)
        assert (await small.cache.stored(asked, 10.0)).tokens == 4 * PAGE
        await quiet(small)
        await small.cache.reset()
        again = await small.engine.answer(asked)
        assert (again.account.storage, again.tokens) == (4 * PAGE, first.tokens)


# -- B106: no holes at the front --------------------------------------------------------------------------------------


class _Reads(Wrapper):
    """Counts objects that are read."""

    reads = 0

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        self.reads += len(keys)
        return await super().read(keys, buffers)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@VIRTUAL_ONCE
async def test_b106_a_common_start_that_never_left_the_device_is_stored_all_the_same(
    anyio_backend: object, policy: WritePolicy
) -> None:
    """Given 50 prompts with a common start of 8 pages, which is used all the time and never evicted.
    When their ends have been evicted, the cache has been drained and closed, and a later one is asked.
    Then every prompt is hit whole from storage."""
    backend = MemoryBackend()
    prompts = [branch(8, 10, other=100 + number) for number in range(50)]
    config = msgspec.structs.replace(small_config(host_pages=40), write_policy=policy)
    async with opened(device_pages=16, config=config, backend=backend) as small:
        for asked in prompts:
            await compute(small, asked)
            if policy == "write_through":
                assert await small.cache.drain(60.0) == 0
        assert small.cache.match(prompt(8)).device == 8 * PAGE
        assert await small.cache.drain(60.0) == 0
    async with opened(device_pages=16, host_pages=40, backend=backend) as small:
        for asked in prompts:
            account = (await small.engine.answer(asked)).account
            assert (account.storage, account.computed) == (10 * PAGE - account.device - account.host, 1)
            await small.cache.drain(60.0)
        assert small.cache.core.usage().served.storage == (8 + 50 * 2) * PAGE


@VIRTUAL_ONCE
async def test_b106_what_lies_behind_a_hole_is_not_read(anyio_backend: object) -> None:
    """Given a store in which the first page of each prompt is missing, as a crash may leave it.
    When the prompts are asked for.
    Then nothing is usable, and nothing is read."""
    memory = MemoryBackend()
    prompts = [branch(1, 6, other=100 + number) for number in range(10)]
    await store(memory, *prompts)
    backend = _Reads(memory)
    async with opened(backend=backend) as small:
        [first] = small.store.keys.keys(prompts[0].page_hashes(PAGE, 1))
        assert await memory.delete([first]) == 1
        for asked in prompts:
            async with small.cache.acquire(asked, deadline_s=5.0) as lease:
                assert lease.account.storage == 0
                assert lease.account.reasons["not_cached"] == 6 * PAGE
        assert backend.reads == 0


# -- B107: many short requests ----------------------------------------------------------------------------------------


async def test_b107_short_requests_take_whole_pages_and_may_end_between_steps() -> None:
    """Given a device of 16 pages, and 100 requests of 1 to 5 tokens that all come in one step.
    When those that fit are computed, and a third of them ends between two steps, from another thread.
    Then nobody gets room that is not there, no call fails, all are served, and all bytes are right."""
    waiting = [(f"r{n}", prompt(0, family=n, extra=1 + n % 5)) for n in range(100)]
    running: list[Lease] = []
    served = 0
    async with opened(device_pages=16, host_pages=16, driver="step") as small:
        cache, model = small.cache, small.model
        while waiting or running:
            await cache.begin_step_async()
            for lease in running:  # some have been released since the last step
                lease.release()
            running.clear()
            refused = 0
            for rid, asked in list(waiting):
                lease = cache.lease(asked, rid)
                granted = lease.allocate(len(asked))
                if isinstance(granted, Shortfall):
                    lease.release()
                    refused += 1
                    continue
                assert len(granted) == -(-len(asked) // PAGE)
                model.forward(asked, lease.pages, 0, len(asked))
                lease.commit(len(asked))
                running.append(lease)
                waiting.remove((rid, asked))
                served += 1
            pages = [page for lease in running for page in lease.pages]
            assert len(pages) == len(set(pages)) <= 16
            device = cache.core.usage().device
            assert refused == 0 or device.free_pages + device.evictable_pages <= 1
            for lease in running:
                assert model.forward(lease.prompt, lease.pages, len(lease.prompt), len(lease.prompt)) >= 0
            cache.end_step()
            for lease in running[::3]:
                await anyio.to_thread.run_sync(lease.release)
        assert served == 100
        while cache.needs_step:
            await cache.begin_step_async()
            cache.end_step()
            await anyio.sleep(0.001)
        assert cache.core.usage().leases == 0
