"""Copies of pages by native code, on the CPU: a whole batch in one call, without the GIL.

`plans` is also what a GPU's driver is given: the structs are the same, and so is the kernel's body (include/copy.h).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hicache_actors.cuda_ext.native.library import Function, Library
from hicache_actors.cuda_ext.native.structs import Plan, Stores
from hicache_actors.errors import UsageError
from hicache_actors.transfer.affine import AffineCopy, Kind, Loops
from hicache_actors.transfer.engines import Engine

ENGINES: Final[dict[Engine, int]] = {"kernel": 1, "direct": 2, "staged": 3}
"""hic_engine."""

_KINDS: Final[dict[Kind, int]] = {"affine": 0, "page": 1, "piece": 2}
_RUN: Final = np.dtype([("source", np.uint64), ("target", np.uint64), ("bytes", np.uint64)])


def plans(copy: AffineCopy) -> tuple[Plan, ...]:
    """The structs of a copy, one for each of its loops; none if it copies nothing.

    They point into ``copy``, which must live until the last of them has been executed.
    """
    if not copy.pages:
        return ()
    return tuple(_plan(copy, loops) for loops in copy.loops)


class Copies:
    """The copying functions of the library.  Any thread may call; every method blocks until the bytes are in place."""

    def __init__(self, library: Library) -> None:
        plan = ctypes.POINTER(Plan)
        u32, u64 = ctypes.c_uint32, ctypes.c_uint64
        self._library = library
        self._check: Function = library.function("hic_plan_check", ctypes.c_int, plan)
        self._run = library.function("hic_copy_run", ctypes.c_int, plan, u32)
        self._by = library.function("hic_copy_by", ctypes.c_int, plan, ctypes.c_int, ctypes.c_int, u32)
        self._list = library.function("hic_copy_list", ctypes.c_int64, plan, ctypes.c_int, ctypes.c_void_p, u64)
        self._runs = library.function("hic_copy_runs", ctypes.c_int, ctypes.c_void_p, u64, u32)
        self._grid = library.function("hic_copy_grid", ctypes.c_int, plan, u32, u32, u32, ctypes.c_void_p)

    def check(self, plan: Plan) -> None:
        """Tables, extents, page ids and alignment, once more and by the library.  Raises `UsageError` naming what is wrong."""
        self._checked(self._check(ctypes.byref(plan)))

    def run(self, plan: Plan, threads: int = 1) -> None:
        """Move the bytes, by ``threads`` threads, the caller's among them."""
        self._checked(self._run(ctypes.byref(plan), threads))

    def run_by(self, plan: Plan, engine: Engine, *, to_host: bool, threads: int = 1) -> None:
        """Move the bytes as a GPU's engine would.  Raises `UsageError` for a pair of engine and plan that does not work."""
        self._checked(self._by(ctypes.byref(plan), ENGINES[engine], to_host, threads))

    def merged(self, plan: Plan, *, by_target: bool) -> NDArray[Any]:
        """The plan as single copies (source, target, bytes), neighbours joined, sorted by the address of one side."""
        runs = np.empty(plan.runs, dtype=_RUN)
        count = self._list(ctypes.byref(plan), by_target, runs.ctypes.data, len(runs))
        self._checked(count)
        return runs[:count]

    def run_list(self, runs: NDArray[Any], threads: int = 1) -> None:
        """memcpy for each run of a list that `merged` made, in its order."""
        self._checked(self._runs(runs.ctypes.data, len(runs), threads))

    def grid(self, plan: Plan, blocks: int, block_threads: int, lanes: int, stores: Stores | None = None) -> None:
        """The kernel's body for every thread of a grid, as a GPU would run it, one thread after the other.  For tests."""
        counter = None if stores is None else ctypes.addressof(stores)
        self._checked(self._grid(ctypes.byref(plan), blocks, block_threads, lanes, counter))

    def _checked(self, code: int) -> None:
        if code < 0:
            raise UsageError(f"a native copy was refused: {self._library.last_error()}")


def _plan(copy: AffineCopy, loops: Loops) -> Plan:
    plan = Plan.from_buffer_copy(_template(loops))
    plan.source_pages = _address(copy.source_pages)
    plan.target_pages = _address(copy.target_pages)
    plan.page_count = copy.pages
    plan.source_limit, plan.target_limit = copy.source.pages, copy.target.pages
    plan.runs = copy.runs(loops)
    for number, level in enumerate(loops.levels):
        if level.kind == "page":
            plan.level[number].extent = copy.pages
    return plan


@functools.lru_cache(maxsize=2048)
def _template(loops: Loops) -> bytes:
    """A plan without its pages."""
    plan = Plan(
        pieces=loops.pieces.ctypes.data,
        piece_count=len(loops.pieces),
        run_bytes=loops.run_bytes,
        unit_bytes=loops.unit_bytes,
        levels=len(loops.levels),
    )
    for to, level in zip(plan.level, loops.levels, strict=False):
        to.extent, to.kind = level.extent, _KINDS[level.kind]
        to.source_stride, to.target_stride = level.source_stride, level.target_stride
    return bytes(plan)


def _address(slots: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(slots), ctypes.c_void_p).value or 0
