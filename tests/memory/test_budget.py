from __future__ import annotations

import asyncio

import pytest

from hicache_actors.errors import ConfigError
from hicache_actors.memory.budget import host_budget, host_memory_scope, take_host_memory
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.limits import MemoryLimit
from hicache_actors.memory.shapes import KVShape

LAYOUT = SlotLayout(KVShape(layers=1, kv=2, heads=1, head_dim=32, dtype="uint8", page_size=64))  # 8,192 bytes a slot
GIB = 2**30


def limit(total_gib: float, available_gib: float | None = None) -> MemoryLimit:
    return MemoryLimit(int(total_gib * GIB), int((total_gib if available_gib is None else available_gib) * GIB))


def test_pages_override_size_overrides_ratio() -> None:
    assert LAYOUT.slot_bytes == 8192
    by_ratio = host_budget(LAYOUT, 36, limit=limit(64))
    assert (by_ratio.pages, by_ratio.decided_by, by_ratio.pool_bytes) == (72, "ratio", 72 * 8192)
    by_size = host_budget(LAYOUT, 36, size_gb=0.001, ratio=9, limit=limit(64))
    assert (by_size.pages, by_size.decided_by) == (122, "size_gb")  # headers count; 1 GB = 1e9 bytes
    by_pages = host_budget(LAYOUT, 36, pages=5, size_gb=1.0, limit=limit(64))
    assert (by_pages.pages, by_pages.decided_by) == (5, "pages")


def test_the_reserve_is_a_fifth_and_at_most_ten_gib() -> None:
    assert host_budget(LAYOUT, 4, limit=limit(20)).reserve_bytes == 4 * GIB
    assert host_budget(LAYOUT, 4, limit=limit(500)).reserve_bytes == 10 * GIB
    assert host_budget(LAYOUT, 4, reserve_gb=0.5, limit=limit(500)).reserve_bytes == 500_000_000


def test_a_pool_that_takes_from_the_reserve_is_refused_with_what_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        host_budget(LAYOUT, 10**6, limit=limit(10, available_gib=3))
    assert caught.value.field == "host.ratio"
    assert f"{GIB // 8192:,} pages" in caught.value.allowed
    assert host_budget(LAYOUT, 1, pages=GIB // 8192, limit=limit(10, available_gib=3)).pages == GIB // 8192
    with pytest.raises(ConfigError, match="free memory"):
        host_budget(LAYOUT, 1, pages=1, limit=limit(10, available_gib=1))


def test_room_for_no_page_is_refused() -> None:
    for fields in ({"pages": 0}, {"size_gb": 0.000001}, {"ratio": 0.1}):
        with pytest.raises(ConfigError, match="no room for a page") as caught:
            host_budget(LAYOUT, 4, limit=limit(64), **fields)
        assert caught.value.field == f"host.{next(iter(fields))}"


def test_storage_needs_room_beside_what_fetches_may_hold() -> None:
    """Field report B101: with half of one slot as the cap, storage would never be read."""
    with pytest.raises(ConfigError, match="at most half of the slots") as caught:
        host_budget(LAYOUT, 4, pages=1, storage=True, limit=limit(64))
    assert (caught.value.field, caught.value.value) == ("host.pages", 1)
    assert caught.value.allowed.startswith("at least 2 pages")
    assert host_budget(LAYOUT, 4, pages=2, storage=True, limit=limit(64)).pages == 2


def test_ranks_share_what_is_left_after_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    share_pages = 4 * GIB // 8192  # (20 - 4 reserved) / 4 ranks
    budget = host_budget(LAYOUT, 1, pages=share_pages, limit=limit(20))
    assert (budget.ranks, budget.share_bytes, budget.reserve_bytes) == (4, 4 * GIB, 4 * GIB)
    with pytest.raises(ConfigError, match="divided among 4 ranks") as caught:
        host_budget(LAYOUT, 1, pages=share_pages + 1, limit=limit(20))
    assert caught.value.allowed.startswith(f"up to {share_pages:,} pages")
    assert caught.value.fix.startswith(f"set host.pages to {share_pages:,} or less")
    assert host_budget(LAYOUT, 1, pages=share_pages + 1, ranks=1, limit=limit(20)).ranks == 1


def test_pools_in_a_scope_share_one_reading() -> None:
    half_pages = 4 * GIB // 8192
    with host_memory_scope(limit(10), ranks=1) as account:  # 8 GiB to share out
        first = host_budget(LAYOUT, 1, pages=half_pages)
        assert first.share_bytes == 8 * GIB
        take_host_memory("indexer", GIB)
        with pytest.raises(ConfigError, match=r"taken before: 4.29 GB for host pool, 1.07 GB for indexer") as caught:
            host_budget(LAYOUT, 1, pages=half_pages, pool="second pool")
        assert caught.value.allowed.startswith(f"up to {3 * GIB // 8192:,} pages")
        with pytest.raises(ConfigError) as side:
            take_host_memory("staging", 3 * GIB + 1, field="host.staging_gb")
        assert (side.value.field, side.value.allowed) == ("host.staging_gb", f"up to {3 * GIB:,} bytes")
        take_host_memory("staging", 3 * GIB)
        assert account.taken == {"host pool": 4 * GIB, "indexer": GIB, "staging": 3 * GIB}
        assert account.share_bytes() == 0
        assert account.share_bytes(reserve_gb=0) == 2 * GIB
    assert host_budget(LAYOUT, 1, pages=half_pages, limit=limit(10)).share_bytes == 8 * GIB  # the scope has ended


def test_a_scope_within_a_scope_joins_it() -> None:
    with host_memory_scope(limit(10), ranks=2) as outer:
        with host_memory_scope() as inner:
            assert inner is outer
        with pytest.raises(ConfigError, match="enclosing scope"), host_memory_scope(ranks=3):
            pass
        take_host_memory("after", GIB)
        assert outer.taken == {"after": GIB}


async def test_tasks_and_threads_of_a_scope_subtract_from_it() -> None:
    with host_memory_scope(limit(10), ranks=1) as account:
        await asyncio.gather(*(asyncio.to_thread(take_host_memory, "pool", GIB) for _ in range(8)))
        assert account.taken == {"pool": 8 * GIB}
        with pytest.raises(ConfigError):
            await asyncio.create_task(_take_later())


async def _take_later() -> None:
    take_host_memory("one more", 1)


def test_side_pools_stay_within_the_size_that_was_set() -> None:
    """Field report B104: pools beside the main one went beyond the configured size."""
    with host_memory_scope(limit(10), ranks=1) as account:
        budget = host_budget(LAYOUT, 1, size_gb=6)
        room_bytes = account.share_bytes()
        with pytest.raises(ConfigError):
            take_host_memory("side pool", room_bytes + 1)
        take_host_memory("side pool", room_bytes)
        assert budget.pool_bytes <= 6e9
        assert sum(account.taken.values()) == 8 * GIB


def test_a_reported_capacity_is_what_is_mapped() -> None:
    """Field report B103: the capacity shown and the memory taken differed."""
    budget = host_budget(LAYOUT, 8, size_gb=0.001, limit=limit(64))
    memory = HostMemory(LAYOUT, budget.pages)
    assert (memory.slots, memory.nbytes) == (budget.pages, budget.pool_bytes)
    assert memory.close()
