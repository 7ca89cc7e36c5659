"""Each suite with tiny sizes: every figure is there.  What they say about this machine is not looked at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from hicache_actors.bench.completions import measure as measure_completions
from hicache_actors.bench.figures import Figures, flat
from hicache_actors.bench.fio import fio_program
from hicache_actors.bench.reports import ROWS
from hicache_actors.bench.reports import measure as measure_reports
from hicache_actors.bench.reports_tree import REQUESTS
from hicache_actors.bench.rig import PAGE_TOKENS, BenchError, open_rig
from hicache_actors.bench.storage import measure as measure_storage
from hicache_actors.bench.transfer import measure as measure_transfer
from hicache_actors.cuda_ext.native.library import library, why_not
from hicache_actors.memory.layout import Order
from hicache_actors.memory.shapes import KVShape, batch_pages

TINY: Mapping[str, tuple[int, int]] = {"pages_1m": (1 << 20, 3), "pages_64k": (64 << 10, 6)}
OF_A_SIZE = ["write_gb_s", "read_gb_s", "ratio_write", "ratio_read", "core_s_per_gb"]
OF_FILES = ["file_ratio_write", "file_ratio_read"]
OF_FIO = ["fio_write_gb_s", "fio_read_gb_s", "fio_ratio_write", "fio_ratio_read"]
OF_A_DISK = ["batched_ratio_write", "batched_ratio_read", "peer_ratio_write", "peer_ratio_read", "read_cold_gb_s"]


def check(figures: Figures) -> dict[str, float | str]:
    """Numbers are finite and not negative -> one level of names."""
    found = flat(figures)
    for name, value in found.items():
        assert isinstance(value, str) or (math.isfinite(value) and value >= 0), (name, value)
    return found


async def test_storage_on_a_disk(tmp_path: Path) -> None:
    figures = await measure_storage(f"file://{tmp_path}/store", TINY, 2, 3, quiet=True)
    found = check(figures)
    for size in TINY:
        assert {name for name in found if name.startswith(size)} == {f"{size}.{each}" for each in OF_A_SIZE + OF_A_DISK}
    assert {"waiter_delay_us.p50", "waiter_delay_us.p99", "loop_lag_p99_ms"} <= set(found)
    left = [path for path in (tmp_path / "store").rglob("*") if path.suffix == ".kv" or path.name.startswith("bench-")]
    assert left == []


async def test_storage_in_a_slab_beside_fio_where_that_is_installed(tmp_path: Path) -> None:
    figures = await measure_storage(f"slab://{tmp_path}/store?gb=0.03", TINY, 2, 3, quiet=True)
    for size in TINY:
        names = [*OF_A_SIZE, "read_cold_gb_s", *OF_FILES] + (OF_FIO if fio_program() else [])
        assert {name for name in check(figures) if name.startswith(size)} == {f"{size}.{each}" for each in names}
    assert [path.name for path in (tmp_path / "store").rglob("*") if "fio" in path.name] == []


async def test_storage_that_is_no_disk() -> None:
    figures = await measure_storage("memory://bench", {"pages_64k": TINY["pages_64k"]}, 1, 1, quiet=True)
    assert {name for name in check(figures) if name.startswith("pages_64k")} == {
        f"pages_64k.{each}" for each in OF_A_SIZE
    }


async def test_a_store_that_loses_pages_gives_no_figures() -> None:
    async with open_rig("memory://lossy", page_bytes=64 << 10, pages=4) as rig:
        prompt = rig.prompt(1)
        await rig.store(prompt, "one")
        await rig.clear()
        await rig.backend.delete(sorted(rig.backend.stored)[:1])
        with pytest.raises(BenchError, match=f"of {4 * PAGE_TOKENS} tokens were fetched"):
            await rig.fetch(rig.prompt(1), "two")


def test_transfer() -> None:
    shapes = {
        "gqa": KVShape(layers=2, kv=2, heads=2, head_dim=64, dtype="bfloat16", page_size=4),
        "mla": KVShape(layers=2, kv=1, heads=1, head_dim=96, dtype="bfloat16", page_size=4),
    }
    figures = dict(measure_transfer(shapes, 1 << 16, 1, 2, quiet=True))
    assert (figures.pop("device"), figures.pop("threads")) == ("native threads", "2")
    rows = {name.rpartition(".")[0] for name in check(figures)}
    layouts = {"gqa": get_args(Order), "mla": ("page_first_direct", "page_first", "layer_first", "page_unified")}
    ways = ("load", "write_back")
    assert rows == {f"{shape}.{order}.{way}" for shape in shapes for order in layouts[shape] for way in ways}
    run_bytes = {name: value for name, value in check(figures).items() if name.endswith("run_bytes")}
    assert run_bytes["gqa.page_first_direct.load.run_bytes"] == 4 * 2 * 64 * 2
    assert run_bytes["gqa.page_head.write_back.run_bytes"] == 64 * 2
    assert run_bytes["mla.page_first.load.run_bytes"] == 96 * 2


async def test_serving() -> None:
    pytest.importorskip("transformers")
    from hicache_actors.bench.serving import Sizes
    from hicache_actors.bench.serving import measure as measure_serving

    sizes = Sizes()
    sizes.ttfts = sizes.pairs = 1
    sizes.rounds, sizes.tokens = 1, 3
    found: dict[str, Any] = dict(await measure_serving("memory://bench-serving", sizes, quiet=True))
    for name in ("overhead_ms_p50", "overhead_cpu_ms_p50"):  # of one pair: may be negative
        assert math.isfinite(found.pop(name))
    spreads = {"ttft_ms", "ttft_cached_ms", "itl_idle_ms", "itl_busy_ms", "request_ms"}
    wanted = {f"{name}.{part}" for name in spreads for part in ("p50", "p99")} | {"busy_gb_s", "bare_ms_p50"}
    assert set(check(found)) == wanted


@pytest.mark.parametrize("row", sorted(ROWS))
async def test_reports(row: str) -> None:
    (figures,) = (await measure_reports(16, quiet=True, rows={row: ROWS[row]})).values()
    assert isinstance(figures, Mapping)
    for name, value in flat(figures).items():
        assert isinstance(value, str) or math.isfinite(value), (row, name)
    if row == "P05":
        pages = 4 * REQUESTS  # of as many nodes; they go in batches
        assert figures["write_back_submits"] == -(-pages // batch_pages(64 << 10))
        assert figures["load_submits"] == figures["load_submits_limit"]
    if row == "P26":
        assert figures["host_pages_lost"] == 0


def test_completions() -> None:
    if library() is None:
        pytest.skip(f"the native library is not in use: {why_not()}")
    found = check(measure_completions(1000, quiet=True))
    loops = {name.partition(".")[0] for name in found} - {"layers"}
    assert {"asyncio"} <= loops
    for loop in loops:
        assert found[f"{loop}.tickets_lost"] == 0
        assert found[f"{loop}.tickets"] == 100
        for wakes in ("wake_us_1", "wake_us_64", "wake_us_1_by_thread"):
            assert {f"{loop}.{wakes}.p50", f"{loop}.{wakes}.p99"} <= set(found)
    assert {f"layers.{layers}.share" for layers in (16, 32, 64)} <= set(found)
