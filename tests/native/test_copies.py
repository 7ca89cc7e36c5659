"""Native copies against torch, byte for byte: by memcpy, as a list of runs, and by the kernel's body on a simulated grid."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext.native.copies import Copies, plans
from hicache_actors.cuda_ext.native.library import library, why_not
from hicache_actors.cuda_ext.native.structs import Plan, Stores
from hicache_actors.errors import StoppedError, UsageError
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.shapes import KVShape
from hicache_actors.testing.copy_cases import Case, Sides, cases, large_cases
from hicache_actors.transfer.engines import whole_pages
from hicache_actors.transfer.plan import CopyPlan

ALL = list(cases())
FEW = random.Random(3).sample(ALL, 40)

SHAPE = KVShape(layers=2, kv=2, heads=2, head_dim=16, dtype="bfloat16", page_size=4)


@pytest.fixture(scope="module")
def copies() -> Copies:
    found = library()
    if found is None:
        pytest.skip(f"the native library is not in use: {why_not()}")
    return Copies(found)


def check(copies: Copies, case: Case, *, grid: bool = True) -> None:
    sides = Sides(case)
    assert sides.changed_bytes()
    copy = sides.work().affine()
    structs = plans(copy)
    chance = random.Random(case.number)
    for plan in structs:
        copies.check(plan)
    ways: dict[str, Callable[[Plan], None]] = {
        "run": copies.run,
        "two threads": lambda plan: copies.run(plan, 2),
        "list": lambda plan: copies.run_list(copies.merged(plan, by_target=case.to_host)),
        "list by the other side": lambda plan: copies.run_list(copies.merged(plan, by_target=not case.to_host)),
        "direct": lambda plan: copies.run_by(plan, "direct", to_host=case.to_host),
    }
    if grid:
        ways["grid"] = lambda plan: on_a_grid(copies, plan, sides.target_bytes, chance)
    if whole_pages(copy):
        ways["staged"] = lambda plan: copies.run_by(plan, "staged", to_host=True)
    for name, way in ways.items():
        sides.reset()
        for plan in structs:
            way(plan)
        assert not sides.wrong_bytes(), name
    assert copy.nbytes == sum(plan.runs * plan.run_bytes for plan in structs) == sides.work().nbytes


def on_a_grid(copies: Copies, plan: Plan, target: torch.Tensor, chance: random.Random) -> None:
    """By the kernel's body; each unit of the plan is stored once, and none elsewhere."""
    unit = plan.unit_bytes
    counts = np.zeros(target.numel() // unit + 1, dtype=np.uint8)
    first = -(-target.data_ptr() // unit) * unit
    units = (target.data_ptr() + target.numel() - first) // unit
    stores = Stores(base=first, units=units, counts=counts.ctypes.data)
    lanes = chance.choice([1, 4, 8, 32])
    copies.grid(plan, chance.randint(1, 3), lanes * chance.choice([1, 2, 4]), lanes, stores)
    assert (stores.outside, stores.misaligned) == (0, 0)
    assert stores.total == plan.runs * plan.run_bytes // unit == int((counts == 1).sum())
    assert int(counts.max()) == 1


@pytest.mark.parametrize("case", FEW, ids=str)
def test_copies_equal_torch(copies: Copies, case: Case) -> None:
    check(copies, case)


@pytest.mark.parametrize("case", list(large_cases()), ids=str)
def test_large_copies_equal_torch(copies: Copies, case: Case) -> None:
    check(copies, case, grid=False)


def test_staged_pages_pass_a_buffer_that_holds_some_of_them(copies: Copies) -> None:
    """1 MiB a page, 4 MiB of buffer."""
    shape = KVShape(layers=2, kv=2, heads=8, head_dim=128, dtype="float32", page_size=64)
    check(copies, Case(0, shape, "page_first", 4096, "contiguous", True, (0, 2), 7, True), grid=False)


def test_what_cannot_be_staged_is_refused(copies: Copies) -> None:
    shape = KVShape(layers=3, kv=2, heads=2, head_dim=64, dtype="bfloat16", page_size=4)
    for order, to_host, layers, words in (
        ("layer_first", True, (0, 3), "whole pages: this is"),
        ("page_first", True, (1, 2), "whole pages: this is"),
        ("page_first", False, (0, 3), "to the host only"),
    ):
        copy = Sides(Case(0, shape, order, 0, "contiguous", to_host, layers, 2, True)).work().affine()  # type: ignore[arg-type]
        assert not whole_pages(copy)
        (plan,) = plans(copy)
        with pytest.raises(UsageError, match=words):
            copies.run_by(plan, "staged", to_host=to_host)


@pytest.mark.native
def test_all_copies_equal_torch(copies: Copies) -> None:
    assert len(ALL) >= 700
    for case in ALL:
        check(copies, case)


def sides() -> tuple[KVTensors, HostMemory]:
    return KVTensors.make(SHAPE, 6), HostMemory(SlotLayout(SHAPE), 5)


@pytest.fixture
def plan() -> Iterator[Plan]:
    kv, host = sides()
    copy = CopyPlan(kv, pack_slots([1, 4, 2]), host, pack_slots([0, 3, 2])).work().affine()
    (found,) = plans(copy)
    yield found
    assert copy.pages == 3  # alive until here: the plan points into it


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("unit_bytes", 3, "units of 3 bytes"),
        ("unit_bytes", 32, "units of 32 bytes"),
        ("run_bytes", 0, "runs of 0 bytes"),
        ("run_bytes", 255, "runs of 255 bytes in units of 16"),
        ("levels", 0, "0 levels, not 1 to 5"),
        ("levels", 6, "6 levels, not 1 to 5"),
        ("levels", 1, "1 levels of pieces|0 levels of pieces|runs stated"),
        ("piece_count", 3, "4 pieces, 3 in the table"),
        ("page_count", 2, "3 pages, 2 in the table"),
        ("source_limit", 4, "source page 4 of a pool of 4"),
        ("target_limit", 3, "target page 3 of a pool of 3"),
        ("runs", 11, "11 runs stated, 12 by extents"),
    ],
)
def test_a_plan_that_cannot_be_run_is_named(copies: Copies, plan: Plan, field: str, value: int, words: str) -> None:
    copies.check(plan)
    setattr(plan, field, value)
    with pytest.raises(UsageError, match=words):
        copies.check(plan)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("extent", 0, "no runs, or too many"),
        ("extent", 1 << 31, "no runs, or too many"),
        ("kind", 9, "kind 9"),
        ("source_stride", 8, "strides of 8 and"),
        ("target_stride", -24, "and -24 bytes in units of 16"),
    ],
)
def test_a_loop_that_cannot_be_run_is_named(copies: Copies, plan: Plan, field: str, value: int, words: str) -> None:
    setattr(plan.level[0], field, value)
    with pytest.raises(UsageError, match=words):
        copies.check(plan)


def test_a_piece_off_its_alignment_is_named(copies: Copies, plan: Plan) -> None:
    pieces = (ctypes.c_uint64 * 8).from_address(plan.pieces)
    pieces[2] += 8
    with pytest.raises(UsageError, match="piece 1 begins off its units of 16 bytes"):
        copies.check(plan)
    pieces[2] -= 8
    copies.check(plan)


def test_no_threads_are_too_few(copies: Copies, plan: Plan) -> None:
    with pytest.raises(UsageError, match="one thread at least"):
        copies.run(plan, 0)


@pytest.mark.parametrize(("threads", "lanes"), [(0, 1), (32, 0), (32, 3), (2048, 32)])
def test_grids_that_no_gpu_has_are_refused(copies: Copies, plan: Plan, threads: int, lanes: int) -> None:
    with pytest.raises(UsageError, match="lanes in a block"):
        copies.grid(plan, 1, threads, lanes)


def test_work_after_close_is_refused() -> None:
    kv, host = sides()
    work = CopyPlan(kv, pack_slots([1]), host, pack_slots([1])).work()
    host.close()
    with pytest.raises(StoppedError):
        work.affine()


def test_a_copy_keeps_the_host_memory_mapped(copies: Copies) -> None:
    kv, host = sides()
    copy = CopyPlan(kv, pack_slots([1]), host, pack_slots([1])).work().affine()
    assert not host.close()
    for each in plans(copy):
        copies.run(each)


def test_nothing_to_copy_is_no_plan() -> None:
    kv, host = sides()
    assert plans(CopyPlan(kv, b"", host, b"").work().affine()) == ()
