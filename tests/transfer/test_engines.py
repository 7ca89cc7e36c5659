"""Which engine moves which copy, and which pairs of layout and engine are refused at start."""

from __future__ import annotations

import pytest

from hicache_actors.config import LoadEngine, WriteBackEngine
from hicache_actors.core.words import pack_slots
from hicache_actors.errors import ConfigError
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.layout import Order, SlotLayout
from hicache_actors.memory.shapes import KVShape
from hicache_actors.transfer.affine import AffineCopy
from hicache_actors.transfer.engines import CPU, GPU, Engine, Engines
from hicache_actors.transfer.plan import CopyPlan

LARGE = KVShape(layers=2, kv=2, heads=8, head_dim=128, dtype="bfloat16", page_size=64)
SMALL = KVShape(layers=2, kv=2, heads=2, head_dim=128, dtype="bfloat16", page_size=16)


def copy_of(shape: KVShape, order: Order, pages: int, *, to_host: bool) -> AffineCopy:
    kv, host = KVTensors.make(shape, 64), HostMemory(SlotLayout(shape, order), 64)
    slots = pack_slots(range(0, 2 * pages, 2))
    plan = CopyPlan(kv, slots, host, slots) if to_host else CopyPlan(host, slots, kv, slots)
    return plan.work().affine()


@pytest.mark.parametrize(
    ("shape", "order", "pages", "to_host", "engine"),
    [
        (LARGE, "page_first_direct", 1, False, "direct"),  # runs of 128 KiB
        (LARGE, "page_first_direct", 1, True, "direct"),
        (SMALL, "page_first_direct", 1, False, "direct"),  # 4 runs of 8 KiB
        (SMALL, "page_first_direct", 16, False, "kernel"),
        (SMALL, "page_first_direct", 16, True, "staged"),
        (SMALL, "page_first", 16, False, "kernel"),
        (SMALL, "page_head", 16, True, "staged"),
        (SMALL, "layer_first", 16, True, "direct"),  # a page is not one run
    ],
)
def test_auto_goes_by_direction_length_and_number(
    shape: KVShape, order: Order, pages: int, to_host: bool, engine: Engine
) -> None:
    copy = copy_of(shape, order, pages, to_host=to_host)
    assert Engines().choose(copy, GPU) == engine
    assert Engines().choose(copy, GPU, kernel=False) == "direct"
    assert Engines().choose(copy, CPU) == "kernel"


def test_what_was_asked_for_is_taken() -> None:
    engines = Engines(load="kernel", write_back="staged")
    assert engines.choose(copy_of(LARGE, "page_first_direct", 1, to_host=False), GPU) == "kernel"
    assert engines.choose(copy_of(LARGE, "page_first_direct", 1, to_host=True), GPU) == "staged"


@pytest.mark.parametrize(
    ("shape", "order", "to_host", "words"),
    [
        (LARGE, "page_first_direct", False, "direct (auto: runs of 131,072 bytes)"),
        (SMALL, "page_first_direct", False, "kernel (auto: runs of 8,192 bytes; direct below 16 pages)"),
        (SMALL, "page_first_direct", True, "staged (auto: runs of 8,192 bytes; direct below 8 pages)"),
        (SMALL, "layer_first", True, "direct (auto: runs of 8,192 bytes)"),
    ],
)
def test_which_engine_is_in_use_is_said_with_the_reason(
    shape: KVShape, order: Order, to_host: bool, words: str
) -> None:
    copy = copy_of(shape, order, 1, to_host=to_host)
    assert Engines().explain(copy, GPU) == words
    assert Engines().explain(copy, GPU, kernel=False) == "direct (auto: there is no copy kernel)"
    asked = Engines("kernel", "direct").explain(copy, GPU)
    assert asked == ("direct (device.write_back_engine)" if to_host else "kernel (device.load_engine)")


@pytest.mark.parametrize(
    ("order", "load", "write_back", "field", "allowed"),
    [
        ("page_head", "direct", "auto", "device.load_engine", "'auto', 'kernel'"),
        ("page_head", "auto", "direct", "device.write_back_engine", "'auto', 'kernel', 'staged'"),
        ("page_first", "direct", "auto", "device.load_engine", "'auto', 'kernel'"),
        ("layer_first", "auto", "staged", "device.write_back_engine", "'auto', 'kernel', 'direct'"),
    ],
)
def test_pairs_that_do_not_work_are_refused(
    order: Order, load: LoadEngine, write_back: WriteBackEngine, field: str, allowed: str
) -> None:
    kv, host = KVTensors.make(SMALL, 4), HostMemory(SlotLayout(SMALL, order), 4)
    with pytest.raises(ConfigError, match=rf"{field} = .*{order}.*allowed: {allowed}; fix: ") as caught:
        Engines(load, write_back).check(kv.geometry, host.geometry, order)
    assert caught.value.field == field


@pytest.mark.parametrize("order", ["page_first_direct", "page_first", "page_head", "layer_first"])
def test_every_layout_works_with_some_engine(order: Order) -> None:
    kv, host = KVTensors.make(SMALL, 4), HostMemory(SlotLayout(SMALL, order), 4)
    for engines in (Engines(), Engines("kernel", "kernel")):
        engines.check(kv.geometry, host.geometry, order)
