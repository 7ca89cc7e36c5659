"""A copy of pages as nested loops around one contiguous run: what native code and GPU kernels execute.  No torch needed.

The axes are layer, part (K or V, or a group of its heads), page, token, head and dim.  Those that lie back to back on both sides
are merged into the run; what is left are loops with a stride on each side.  Pages are looked up (their ids are anything), and so
is where each part of a layer begins, because engines allocate them one by one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from hicache_actors.core.words import SLOT_BYTES, Slots
from hicache_actors.errors import UsageError
from hicache_actors.memory.geometry import Geometry, Strides

UNIT_BYTES: Final = 16
"""The widest load of a GPU thread."""

MAX_RUNS: Final = 1 << 31
MAX_RUN_BYTES: Final = 1 << 31

Kind: TypeAlias = Literal["affine", "page", "piece"]


class Level(NamedTuple):
    """One loop.  ``extent`` of a page level is 0: a copy fills in its number of pages.  Strides in bytes; a piece has none."""

    kind: Kind
    extent: int
    source_stride: int
    target_stride: int


class Loops(msgspec.Struct, frozen=True, eq=False):
    """Loops from the slowest to the fastest around a run of ``run_bytes``, the same for every set of pages.

    ``pieces``: source and target address of page 0 of each (layer, K or V), or of what was merged of them, uint64 [n, 2].
    ``unit_bytes``: the widest power of two, at most 16, that divides the run, all strides and all addresses.
    """

    levels: tuple[Level, ...]
    pieces: NDArray[np.uint64]
    run_bytes: int
    unit_bytes: int


class AffineCopy:
    """Copy ``source_pages`` to ``target_pages`` by loops: several where layers, or K and V, differ in their strides.

    Immutable.  ``keeps``: what must live while somebody may execute it, for geometries are addresses only.
    """

    __slots__ = ("keeps", "loops", "nbytes", "source", "source_pages", "target", "target_pages")

    def __init__(
        self,
        source: Geometry,
        source_pages: Slots,
        target: Geometry,
        target_pages: Slots,
        layers: range,
        *,
        keeps: object = None,
    ) -> None:
        """Raises `UsageError` for a copy beyond the limits of one plan."""
        self.source, self.target, self.keeps = source, target, keeps
        self.source_pages, self.target_pages = source_pages, target_pages
        self.loops = loops(source, target, layers.start, layers.stop)
        self.nbytes = sum(self.runs(each) * each.run_bytes for each in self.loops)
        for each in self.loops:
            if self.runs(each) >= MAX_RUNS:
                raise UsageError(
                    f"a copy of {self.runs(each):,} runs of {each.run_bytes:,} bytes: {MAX_RUNS:,} at most"
                )

    @property
    def pages(self) -> int:
        return len(self.source_pages) // SLOT_BYTES

    @property
    def to_host(self) -> bool:
        """A write-back; else a load."""
        return self.target.place == "host"

    @property
    def run_bytes(self) -> int:
        """The shortest contiguous run, before neighbouring pages are joined; 0 if nothing is to be copied."""
        return min((each.run_bytes for each in self.loops), default=0)

    def runs(self, each: Loops) -> int:
        """How many runs one of ``loops`` has."""
        return math.prod(self.pages if level.kind == "page" else level.extent for level in each.levels)


@functools.lru_cache(maxsize=2048)
def loops(source: Geometry, target: Geometry, first_layer: int, end_layer: int) -> tuple[Loops, ...]:
    """The loops of layers [first_layer, end_layer): made once, then found, for a load asks for every layer again and again.

    Raises `UsageError` if the sides differ in what a page is.
    """
    if (source.extents, source.item_bytes) != (target.extents, target.item_bytes):
        raise UsageError(
            f"pages of {source.extents} (tokens, heads, dims) x {source.item_bytes} bytes do not fit into pages of "
            f"{target.extents} x {target.item_bytes}"
        )
    alike: dict[tuple[Strides, Strides], list[_Member]] = {}
    for layer in range(first_layer, end_layer):
        parts = zip(source.bases[layer], source.strides[layer], target.bases[layer], target.strides[layer], strict=True)
        for part, (from_, from_strides, to, to_strides) in enumerate(parts):
            alike.setdefault((from_strides, to_strides), []).append(_Member(layer, part, from_, to))
    return tuple(
        _loops(source, from_, to, members, to_host=target.place == "host") for (from_, to), members in alike.items()
    )


class _Member(NamedTuple):
    layer: int
    part: int
    source: int
    target: int


class _Axis(NamedTuple):
    extent: int
    source: int
    target: int


def _loops(side: Geometry, from_: Strides, to: Strides, members: list[_Member], *, to_host: bool) -> Loops:
    """``members``: parts whose strides are equal, ``from_`` and ``to``."""
    axes = [
        _Axis(extent, *strides) for extent, *strides in zip(side.extents, from_[1:], to[1:], strict=True) if extent > 1
    ]
    run = side.item_bytes
    grid = _grid(members)
    while True:
        grown = next((axis for axis in axes if axis.source == axis.target == run), None)
        if grown is not None:
            axes.remove(grown)
            run *= grown.extent
            continue
        merged = _merge_pieces(grid, run)
        if merged is None or run * grid.size > MAX_RUN_BYTES:
            break
        grid, extent = merged
        run *= extent
    pieces = grid.reshape(-1, 2)
    pieces = pieces[np.argsort(pieces[:, int(to_host)])]  # in the order of the host
    levels = [Level("affine", *axis) for axis in _joined(axes)]
    levels.append(Level("page", 0, from_.page, to.page))
    levels.append(Level("piece", len(pieces), 0, 0))
    levels.sort(key=functools.partial(_reach, pieces, to_host), reverse=True)
    numbers = [run, *pieces.ravel().tolist()]
    numbers += [stride for level in levels for stride in (level.source_stride, level.target_stride)]
    return Loops(tuple(levels), pieces, run, math.gcd(UNIT_BYTES, *numbers))


def _grid(members: list[_Member]) -> NDArray[np.uint64]:
    """Addresses as [layers, parts, 2] if every layer has the same parts here, else [pieces, 1, 2]."""
    starts = np.array([(member.source, member.target) for member in members], dtype=np.uint64)
    layers, parts = len({member.layer for member in members}), len({member.part for member in members})
    return starts.reshape(layers, parts, 2) if layers * parts == len(members) else starts.reshape(-1, 1, 2)


def _merge_pieces(grid: NDArray[np.uint64], run: int) -> tuple[NDArray[np.uint64], int] | None:
    """The grid without one of its axes, and that axis' extent, if its members lie back to back on both sides."""
    for axis in (0, 1):
        extent = grid.shape[axis]
        if extent > 1 and bool((np.diff(grid.astype(np.int64), axis=axis) == run).all()):
            return np.take(grid, [0], axis=axis), extent
    return None


def _joined(axes: Iterable[_Axis]) -> Iterator[_Axis]:
    """Axes of which one continues the other on both sides, as one loop."""
    left = sorted(axes, key=lambda axis: axis.target)
    while left:
        axis = left.pop(0)
        while True:
            follower = next(
                (
                    each
                    for each in left
                    if (each.source, each.target) == (axis.source * axis.extent, axis.target * axis.extent)
                ),
                None,
            )
            if follower is None:
                break
            left.remove(follower)
            axis = _Axis(axis.extent * follower.extent, axis.source, axis.target)
        yield axis


def _reach(pieces: NDArray[np.uint64], to_host: bool, level: Level) -> int:
    """How far one step of the level goes on the host."""
    if level.kind == "piece":
        if len(pieces) == 1:
            return 1 << 62
        return int(np.diff(pieces[:, int(to_host)]).min())
    return abs(level.target_stride if to_host else level.source_stride)
