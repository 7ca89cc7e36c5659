"""Loops over addresses mean the same copy as the tensors say, and are merged as far as both sides allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_actors.core.words import pack_slots
from hicache_actors.errors import UsageError
from hicache_actors.memory.geometry import Geometry, Strides
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.layout import Order, SlotLayout
from hicache_actors.memory.shapes import KVShape
from hicache_actors.transfer.affine import UNIT_BYTES, AffineCopy, Loops
from hicache_actors.transfer.plan import CopyPlan

GQA = KVShape(layers=4, kv=2, heads=8, head_dim=128, dtype="bfloat16", page_size=64)
MLA = KVShape(layers=4, kv=1, heads=1, head_dim=576, dtype="bfloat16", page_size=64)


def page_major(shape: KVShape, pages: int) -> KVTensors:
    """All of a page together, in the order of page_first_direct: K of all layers, then V."""
    whole = torch.zeros(
        pages, shape.kv, shape.layers, shape.page_size, shape.heads, shape.head_dim, dtype=torch.bfloat16
    )
    if shape.kv == 1:
        return KVTensors.from_mla([whole[:, 0, layer, :, 0] for layer in range(shape.layers)])
    keys, values = ([whole[:, kv, layer] for layer in range(shape.layers)] for kv in range(2))
    return KVTensors.from_tensors(keys, values)


def write_back(kv: KVTensors, order: Order, layers: range | None = None) -> AffineCopy:
    host = HostMemory(SlotLayout(kv.shape, order), 5)
    return CopyPlan(kv, pack_slots([3, 0]), host, pack_slots([1, 4])).work(layers).affine()


@pytest.mark.parametrize(
    ("shape", "order", "run_bytes", "runs"),
    [
        (GQA, "page_first_direct", 64 * 8 * 128 * 2, 2 * 4 * 2),
        (GQA, "layer_first", 64 * 8 * 128 * 2, 2 * 4 * 2),
        (GQA, "page_first", 8 * 128 * 2, 2 * 4 * 2 * 64),
        (GQA, "page_head", 128 * 2, 2 * 4 * 2 * 64 * 8),
        (MLA, "page_first_direct", 64 * 576 * 2, 2 * 4),
        (MLA, "page_first", 576 * 2, 2 * 4 * 64),
    ],
)
def test_runs_are_what_is_contiguous_on_both_sides(shape: KVShape, order: Order, run_bytes: int, runs: int) -> None:
    copy = write_back(KVTensors.make(shape, 5), order)
    (loops,) = copy.loops
    assert (loops.run_bytes, copy.runs(loops), loops.unit_bytes) == (run_bytes, runs, UNIT_BYTES)
    assert copy.nbytes == 2 * shape.page_bytes


@pytest.mark.parametrize("shape", [GQA, MLA])
def test_pages_that_lie_alike_on_both_sides_are_one_run(shape: KVShape) -> None:
    copy = write_back(page_major(shape, 5), "page_first_direct")
    (loops,) = copy.loops
    assert (loops.run_bytes, copy.runs(loops), len(loops.pieces)) == (shape.page_bytes, 2, 1)
    part = write_back(page_major(shape, 5), "page_first_direct", range(1, 3))
    assert part.run_bytes == 2 * shape.page_bytes // shape.layers // shape.kv


def test_loops_go_as_the_host_lies() -> None:
    """So what crosses a bus comes in long stretches: the fastest level has the shortest step there."""
    (loops,) = write_back(KVTensors.make(GQA, 5), "page_head").loops
    assert [level.kind for level in loops.levels] == ["page", "affine", "affine", "piece"]
    steps = [level.target_stride for level in loops.levels if level.kind != "piece"]
    assert steps == sorted(steps, reverse=True)


def test_k_and_v_that_differ_in_strides_are_loops_of_their_own() -> None:
    keys = [torch.zeros(5, 4, 2, 16, dtype=torch.bfloat16) for _ in range(3)]
    values = [torch.zeros(5, 2, 4, 16, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    copy = write_back(KVTensors.from_tensors(keys, values), "page_first_direct")
    assert sorted(loops.run_bytes for loops in copy.loops) == [16 * 2, 4 * 2 * 16 * 2]
    assert copy.nbytes == 2 * copy.target.extents[0] * 2 * 2 * 16 * 2 * 3


def test_the_same_loops_are_found_again() -> None:
    kv, host = KVTensors.make(GQA, 5), HostMemory(SlotLayout(GQA), 5)
    plan = CopyPlan(host, pack_slots([1]), kv, pack_slots([2]))
    assert plan.work(range(1)).affine().loops is plan.work(range(1)).affine().loops


def test_a_copy_of_nothing_has_no_runs() -> None:
    kv, host = KVTensors.make(GQA, 5), HostMemory(SlotLayout(GQA), 5)
    copy = CopyPlan(host, b"", kv, b"").work().affine()
    assert (copy.pages, copy.nbytes) == (0, 0)
    assert CopyPlan(host, pack_slots([1]), kv, pack_slots([1])).work(range(0)).affine().loops == ()


def test_pages_of_another_form_are_refused() -> None:
    one, other = (Geometry("host", 4, (tokens, 1, 8), 2, [[0]], [[Strides(64, 16, 0, 2)]]) for tokens in (4, 2))
    with pytest.raises(UsageError, match=r"pages of \(4, 1, 8\) .* x 2 bytes do not fit into pages of \(2, 1, 8\)"):
        AffineCopy(one, pack_slots([0]), other, pack_slots([0]), range(1))


def test_more_runs_than_a_plan_can_say_are_refused() -> None:
    shape = (1 << 10, 1 << 10, 1 << 10)
    apart = Strides(1 << 34, 1 << 24, 1 << 14, 16)
    side = Geometry("host", 4, shape, 1, [[0]], [[apart]])
    with pytest.raises(UsageError, match="runs of 1 bytes"):
        AffineCopy(side, pack_slots([0, 1]), side, pack_slots([1, 0]), range(1))


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Geometry, Geometry]:
    """Two sides of one form, each with its axes in any order, with gaps, and with layers apart or together."""
    tokens, heads, dims = (draw(st.integers(1, 3)) for _ in range(3))
    layers, parts, pages = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    item_bytes = draw(st.sampled_from([1, 2, 4]))
    extents = {"page": pages, "token": tokens, "head": heads, "dim": dims, "layer": layers, "part": parts}

    def side() -> Geometry:
        step, strides = item_bytes, {}
        order = draw(st.permutations(sorted(extents)))
        for axis in order:
            strides[axis] = step
            step *= extents[axis]
            if draw(st.integers(0, 3)) == 0:
                step += item_bytes * draw(st.integers(1, 3))
        apart = step if draw(st.booleans()) else 0
        bases = [
            [
                (1 << 20) + layer * strides["layer"] + part * strides["part"] + (layer * parts + part) ** 2 * apart
                for part in range(parts)
            ]
            for layer in range(layers)
        ]
        steps = Strides(*(strides[axis] if extents[axis] > 1 else 0 for axis in ("page", "token", "head", "dim")))
        return Geometry("host", pages, (tokens, heads, dims), item_bytes, bases, [[steps] * parts] * layers)

    return side(), side()


@given(geometries(), st.data())
def test_loops_copy_every_element_to_its_place_and_nothing_else(
    pair: tuple[Geometry, Geometry], data: st.DataObject
) -> None:
    source, target = pair
    layers = len(source.bases)
    first = data.draw(st.integers(0, layers - 1))
    chosen = range(first, data.draw(st.integers(first + 1, layers)))
    ids = [data.draw(st.permutations(range(source.pages))) for _ in range(2)]
    pages = list(zip(*ids, strict=True))
    copy = AffineCopy(source, pack_slots(ids[0]), target, pack_slots(ids[1]), chosen)
    wanted = {
        (byte(source, layer, part, from_, at), byte(target, layer, part, to, at))
        for layer in chosen
        for part in range(len(source.bases[layer]))
        for from_, to in pages
        for at in itertools.product(*map(range, source.extents))
    }
    moved = [
        (start + offset, end + offset)
        for loops in copy.loops
        for start, end in runs(loops, pages)
        for offset in range(0, loops.run_bytes, source.item_bytes)
    ]
    assert sorted(moved) == sorted(wanted)
    for loops in copy.loops:
        assert loops.run_bytes % loops.unit_bytes == 0
        assert all(address % loops.unit_bytes == 0 for run in runs(loops, pages) for address in run)


def byte(side: Geometry, layer: int, part: int, page: int, at: tuple[int, ...]) -> int:
    strides = side.strides[layer][part]
    return side.bases[layer][part] + sum(map(math.prod, zip((page, *at), strides, strict=True)))


def runs(loops: Loops, pages: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Where each run begins, on both sides."""
    extents = [len(pages) if level.kind == "page" else level.extent for level in loops.levels]
    for index in itertools.product(*map(range, extents)):
        source = target = 0
        for level, at in zip(loops.levels, index, strict=True):
            if level.kind == "piece":
                source, target = source + int(loops.pieces[at][0]), target + int(loops.pieces[at][1])
            else:
                from_, to = pages[at] if level.kind == "page" else (at, at)
                source, target = source + from_ * level.source_stride, target + to * level.target_stride
        yield source, target
