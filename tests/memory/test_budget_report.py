"""The start-up report: sizes that add up, break-even as measured, and every trap with its reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hicache_actors.config import Config, StorageConfig
from hicache_actors.errors import ConfigError
from hicache_actors.memory.budget import HostBudget, host_budget, host_memory_scope
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.limits import MemoryLimit
from hicache_actors.memory.report import BreakEven, SizingReport, sizing_report, storage_facts
from hicache_actors.memory.shapes import KVShape
from hicache_actors.memory.staging import StagingSize, staging_size, take_staging
from hicache_actors.memory.traps import StorageFacts

LLAMA_70B = KVShape(layers=80, kv=2, heads=8, head_dim=128, dtype="float16", page_size=64)
SMOLLM2 = KVShape(layers=30, kv=2, heads=3, head_dim=64, dtype="bfloat16", page_size=64)
GOOD_STORE = StorageFacts("file:///store", 10**12, "ext4")
GIB = 2**30


def report(shape: KVShape = SMOLLM2, settings: dict[str, Any] | None = None, **options: Any) -> SizingReport:
    config = Config.from_dict({"page_size": shape.page_size, **(settings or {})})
    return sizing_report(config, shape, **{"device_pages": 100, "host": 200, **options})


def codes(found: SizingReport) -> set[str]:
    return {trap.code for trap in found.traps}


def test_sizes_of_a_large_model() -> None:
    found = report(LLAMA_70B, device_pages=1000, host=2000, storage=GOOD_STORE)
    slot_bytes = 4096 + 64 * 327_680
    by_tier = {tier.tier: tier for tier in found.tiers}
    assert [(t.pages, t.tokens, t.bytes, t.header_bytes, t.padding_bytes) for t in found.tiers] == [
        (1000, 64_000, 1000 * 64 * 327_680, 0, 0),
        (2000, 128_000, 2000 * slot_bytes, 2000 * 4096, 0),
        (
            10**12 // slot_bytes,
            10**12 // slot_bytes * 64,
            10**12 // slot_bytes * slot_bytes,
            10**12 // slot_bytes * 4096,
            0,
        ),
    ]
    assert by_tier["device"].tokens * 327_680 == 20_971_520_000
    assert not found.traps


def test_padding_is_counted() -> None:
    shape = KVShape(layers=1, kv=2, heads=1, head_dim=50, dtype="uint8", page_size=64)  # 6,400 bytes a page
    host = next(tier for tier in report(shape).tiers if tier.tier == "host")
    assert host.bytes == 200 * 12_288
    assert (host.header_bytes, host.padding_bytes) == (200 * 4096, 200 * (12_288 - 4096 - 6400))


def test_the_report_counts_what_is_mapped() -> None:
    budget = host_budget(report().layout, 100, limit=MemoryLimit(64 * GIB, 64 * GIB), ranks=2)
    found = report(host=budget)
    memory = HostMemory(found.layout, budget.pages)
    host = found.to_dict()["tiers"]["host"]
    assert host["bytes"] == memory.nbytes == budget.pool_bytes
    assert found.ranks == 2
    assert found.to_dict()["memory"]["share_bytes"] == budget.share_bytes
    assert "(2 ranks on this host)" in found.text
    assert memory.close()


def test_staging_lies_beside_the_host_pool() -> None:
    layout = SlotLayout(SMOLLM2, "layer_first")
    page_bytes = 64 * 23_040
    batch = 32 * 2**20 // page_bytes
    with host_memory_scope(MemoryLimit(64 * GIB, 64 * GIB), ranks=1) as account:
        budget = host_budget(layout, 200, ratio=1.0)
        staging = take_staging(layout, budget.pages, StorageConfig(read_concurrency=3, write_concurrency=1))
        assert staging == StagingSize(3 * batch, batch, 4096 + page_bytes)
        assert account.taken == {"host pool": 200 * page_bytes, "staging": 4 * batch * (4096 + page_bytes)}
    found = report(settings={"host": {"layout": "layer_first"}}, host=budget, staging=staging, storage=GOOD_STORE)
    host, storage = (next(tier for tier in found.tiers if tier.tier == name) for name in ("host", "storage"))
    assert (host.bytes, host.header_bytes, host.padding_bytes) == (budget.pool_bytes, 0, 0)
    assert storage.pages == 10**12 // (4096 + page_bytes)
    assert storage.header_bytes == storage.pages * 4096
    assert found.to_dict()["staging"]["bytes"] == staging.bytes
    assert f"staging   {3 * batch} slots to read through and {batch} to write through, 130.12 MB" in found.text
    assert (
        "1,474,560 bytes on host, not in one run (layer_first); 1,478,656 bytes on storage: 4,096 header" in found.text
    )


def test_staging_is_never_more_than_the_host_pool() -> None:
    layout = SlotLayout(SMOLLM2, "layer_first", 0)
    assert staging_size(layout, 5, StorageConfig()) == StagingSize(5, 5, 64 * 23_040)
    assert staging_size(SlotLayout(SMOLLM2, "page_first"), 5, StorageConfig()) is None


def test_staging_that_does_not_fit_is_refused() -> None:
    layout = SlotLayout(SMOLLM2, "layer_first")
    with host_memory_scope(MemoryLimit(GIB, GIB), ranks=1) as account:
        host_budget(layout, account.share_bytes(0.0) // layout.slot_bytes - 10, ratio=1.0, reserve_gb=0.0)
        with pytest.raises(ConfigError, match="staging needs") as caught:
            take_staging(layout, 500, StorageConfig(), reserve_gb=0.0)
    assert (caught.value.field, caught.value.value) == ("host.layout", "layer_first")
    assert "make the host pool smaller" in caught.value.fix


def test_headers_that_only_storage_has_are_no_trap_without_it() -> None:
    settings = {"host": {"layout": "layer_first"}}
    tiny = KVShape(1, 2, 1, 64, "bfloat16", 64)
    assert codes(report(tiny, settings)) == set()
    assert codes(report(tiny, settings, storage=GOOD_STORE)) == {"slot_overhead", "storage_staged"}


@pytest.mark.parametrize(("ms_a_token", "mb_s"), [(1.07, 22), (0.54, 43), (0.42, 55), (0.60, 38)])
def test_break_even_as_measured_on_a_small_model(ms_a_token: float, mb_s: int) -> None:
    break_even = report(prefill_tokens_per_s=1000 / ms_a_token).break_even
    assert break_even.load_token_bytes == 23_040
    assert round(break_even.load_bytes_s(1000 / ms_a_token) / 1e6) == mb_s
    assert break_even.fetch_token_bytes == 23_040 + 4096 / 64


def test_break_even_in_words() -> None:
    unknown = BreakEven(1000.0, 2000.0, None)
    assert unknown.describe().startswith(
        "a load pays above 1.00 MB/s and a fetch from storage above 2.00 MB/s for each 1,000"
    )
    assert (
        "above 2.00 MB/s and a fetch from storage above 4.00 MB/s at 2,000 tokens/s"
        in BreakEven(1000.0, 2000.0, 2000.0).describe()
    )


def test_every_fact_is_a_line() -> None:
    lines = report(LLAMA_70B, storage=StorageFacts("s3://bucket"), prefill_tokens_per_s=500).lines()
    words = [line.split()[0] for line in lines]
    assert words == ["KV", "slot", "device", "host", "storage", "pays"]
    assert lines[4].endswith("s3://bucket, size unknown")


# -- traps -------------------------------------------------------------------------------------------------------------

TRAPS: dict[str, dict[str, Any]] = {
    "page_tiny": {"shape": KVShape(80, 2, 8, 128, "float16", 8)},
    "page_large": {"shape": KVShape(30, 2, 3, 64, "bfloat16", 512)},
    "slot_overhead": {"shape": KVShape(1, 2, 1, 64, "bfloat16", 64)},
    "no_header": {"settings": {"host": {"header_bytes": 0}}},
    "host_not_larger": {"host": 100},
    "threshold_over_cap": {
        "settings": {"storage": {"prefetch_threshold_tokens": 100 * 64 + 1}},
        "storage": GOOD_STORE,
    },
    "best_effort": {"settings": {"storage": {"prefetch_policy": "best_effort"}}, "storage": GOOD_STORE},
    "timeout_short": {"storage": StorageFacts("file:///slow", 10**12, "ext4", read_bytes_s=50e6)},
    "storage_on_tmpfs": {"storage": StorageFacts("file:///dev/shm/kv", 10**12, "tmpfs")},
    "storage_in_memory": {"storage": StorageFacts("memory://demo", filesystem="memory")},
    "storage_on_network": {"storage": StorageFacts("file:///net", 10**12, "nfs4")},
    "storage_on_overlay": {"storage": StorageFacts("file:///layer", 10**12, "overlay")},
    "storage_staged": {"settings": {"host": {"layout": "layer_first"}}, "storage": GOOD_STORE},
    "not_verified": {"settings": {"storage": {"verify": "sampled"}}, "storage": GOOD_STORE},
    "chunks_small": {
        "settings": {"host": {"layout": "page_unified"}, "storage": {"keys": "unified"}},
        "layout": SlotLayout(SMOLLM2, "page_unified", 4096, head_group=1, layer_partition=3),
        "storage": GOOD_STORE,
    },
    "storage_over_disk": {"storage": StorageFacts("slab:///small", 10**12, "ext4", cap_bytes=2 * 10**12)},
    "storage_small": {"storage": StorageFacts("file:///small", 10**8, "ext4")},
    "kv_heads_unknown": {"storage": GOOD_STORE, "ranks": 2},
    "storage_slower_than_recompute": {
        "storage": StorageFacts("file:///slow", 10**12, "ext4", read_bytes_s=200e6),
        "prefill_tokens_per_s": 10_000.0,
    },
}


@pytest.mark.parametrize("code", TRAPS)
def test_each_trap_is_found_alone(code: str) -> None:
    found = report(**TRAPS[code])
    assert codes(found) == {code}
    (trap,) = found.traps
    assert trap.text
    assert trap.fix
    assert found.to_dict()["traps"][0]["code"] == code
    assert found.lines()[-1].startswith(trap.severity)
    assert (trap in found.problems) == (trap.severity == "problem")


def test_without_storage_its_traps_are_silent() -> None:
    settings = {"storage": {"prefetch_threshold_tokens": 10**6, "prefetch_policy": "best_effort"}}
    assert codes(report(settings=settings, ranks=8)) == set()


def test_a_small_host_pool_says_where_storage_hits_would_land() -> None:
    (trap,) = report(host=100, storage=GOOD_STORE).traps
    assert "storage hits have nowhere to land" in trap.text
    assert "nowhere to land" not in report(host=100).traps[0].text
    assert codes(report(host=101, storage=GOOD_STORE)) == set()


def test_the_threshold_may_be_as_large_as_the_cap() -> None:
    settings = {"storage": {"prefetch_threshold_tokens": 100 * 64}}
    assert codes(report(settings=settings, storage=GOOD_STORE)) == set()


def test_one_latent_for_all_ranks_needs_no_head_count() -> None:
    latent = KVShape(61, 1, 1, 576, "bfloat16", 64)
    assert codes(report(latent, storage=GOOD_STORE, ranks=8)) == set()


def test_problems_come_first() -> None:
    shape = KVShape(80, 2, 8, 128, "float16", 8)
    severities = [trap.severity for trap in report(shape, storage=TRAPS["storage_in_memory"]["storage"]).traps]
    assert severities == ["problem", "note"]


# -- storage -----------------------------------------------------------------------------------------------------------


def test_facts_of_a_folder(tmp_path: Path) -> None:
    facts = storage_facts(f"file://{tmp_path}/not/yet", ranks=4)
    assert facts is not None
    assert facts.room_bytes is not None
    assert facts.room_bytes > 0
    assert facts.filesystem
    assert facts.ranks == 4
    shared = storage_facts(f"file://{tmp_path}", ranks=4, replicated=True)
    assert shared is not None
    assert shared.ranks == 1


def test_facts_of_what_is_no_folder() -> None:
    assert storage_facts(None) is None
    assert storage_facts("memory://x") == StorageFacts("memory://x", filesystem="memory")
    assert storage_facts("s3://bucket", read_bytes_s=5.0) == StorageFacts("s3://bucket", read_bytes_s=5.0)


def test_the_cap_of_a_store_bounds_what_it_holds(tmp_path: Path) -> None:
    def room_bytes(url: str) -> int | None:
        facts = storage_facts(url)
        assert facts is not None
        return facts.room_bytes

    for url in (f"file://{tmp_path}?max_gb=0.001", f"slab://{tmp_path}?gb=0.001", "shm://none?gb=0.001"):
        assert room_bytes(url) == 1_000_000
    (tmp_path / "objects.slab").write_bytes(bytes(500_000))  # there already: it stays as large as it was made
    assert room_bytes(f"mmap://{tmp_path}?gb=0.001") == 500_000
    assert room_bytes(f"file://{tmp_path}?max_gb=nonsense") == room_bytes(f"file://{tmp_path}")
    found = report(storage=storage_facts(f"file://{tmp_path}?max_gb=1"))
    (tier,) = (tier for tier in found.tiers if tier.tier == "storage")
    assert tier.pages == 10**9 // found.layout.slot_bytes


def test_memory_that_was_asked_for_as_a_store_is_a_note() -> None:
    found = report(storage=storage_facts("shm://none?gb=100000"))
    severities = {trap.code: trap.severity for trap in found.traps}
    assert severities["storage_in_memory"] == "note"
    assert severities["storage_over_disk"] == "problem"
    assert "storage_on_tmpfs" not in severities


def test_ranks_divide_a_shared_disk() -> None:
    alone, shared = (report(storage=StorageFacts("file:///s", 10**12, "ext4", ranks=n)) for n in (1, 4))
    pages = [next(t.pages for t in found.tiers if t.tier == "storage") for found in (alone, shared)]
    assert pages[0] // 4 == pages[1]


def test_a_budget_brings_its_ranks() -> None:
    budget = HostBudget(200, 1, 2, "pages", ranks=3, share_bytes=4)
    assert report(host=budget).ranks == 3
    assert report(host=budget, ranks=5).ranks == 5


def test_the_documentation_lists_every_trap() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (problem|note) \|", page, flags=re.MULTILINE)
    severities = {code: report(**options).traps[0].severity for code, options in TRAPS.items()}
    assert dict(rows) == {**severities, "context_over_device": "note"}  # the last one is found by `hicache plan`
