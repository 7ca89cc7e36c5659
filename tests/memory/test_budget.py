from __future__ import annotations

from pathlib import Path

import pytest

from hicache_actors.errors import ConfigError
from hicache_actors.memory import budget
from hicache_actors.memory.budget import MemoryLimit, host_budget
from hicache_actors.memory.layout import SlotLayout
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


def test_this_machine_has_a_limit() -> None:
    memory = MemoryLimit.read()
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_the_tightest_cgroup_decides(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    for group, limit_text, used, cache in ((tmp_path / "a", "5000", "3000", "500"), (inner, "max", "10", "0")):
        (group / "memory.max").write_text(limit_text + "\n")
        (group / "memory.current").write_text(used + "\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    found = budget._walk(tmp_path, "/a/b", "memory.max", "memory.current", "inactive_file")
    assert found == [(5000, 2500)]
    (inner / "memory.max").write_text("700")
    assert budget._walk(tmp_path, "/a/b", "memory.max", "memory.current", "inactive_file") == [(700, 10), (5000, 2500)]
