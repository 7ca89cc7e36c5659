from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import pytest

from hicache_actors.core.pool import FEW
from hicache_actors.core.words import Slots, pack_slots
from hicache_actors.errors import StoppedError, UsageError
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.shapes import BATCH_BYTES, BATCH_PAGES, KVShape
from hicache_actors.transfer.plan import CopyPlan, batches

SHAPE = KVShape(layers=2, kv=2, heads=1, head_dim=4, dtype="uint8", page_size=2)


def sides(pages: int) -> tuple[KVTensors, HostMemory]:
    return KVTensors.make(SHAPE, pages), HostMemory(SlotLayout(SHAPE), pages)


@pytest.mark.parametrize(
    ("pages", "page_bytes", "lengths"),
    [
        (0, 100, []),
        (BATCH_PAGES, 100, [BATCH_PAGES]),
        (2 * BATCH_PAGES + 2, 100, [BATCH_PAGES, BATCH_PAGES, 2]),
        (BATCH_PAGES + 1, BATCH_BYTES // BATCH_PAGES, [BATCH_PAGES, 1]),
        (BATCH_PAGES, BATCH_BYTES // BATCH_PAGES + 1, [BATCH_PAGES - 1, 1]),
        (5, BATCH_BYTES // 2, [2, 2, 1]),
        (2, BATCH_BYTES + 1, [1, 1]),
    ],
)
def test_batches_hold_256_pages_and_32_mib_at_most(pages: int, page_bytes: int, lengths: list[int]) -> None:
    assert (BATCH_PAGES, BATCH_BYTES) == (256, 32 * 2**20)
    cut = batches(pack_slots(range(pages)), page_bytes)
    assert [len(batch) for batch in cut] == lengths
    assert [page for batch in cut for page in batch] == list(range(pages))


def test_work_counts_its_bytes() -> None:
    pages = BATCH_PAGES + 36
    kv, host = sides(pages)
    plan = CopyPlan(kv, pack_slots(range(pages)), host, pack_slots(range(pages)))
    assert (plan.pages, plan.nbytes, plan.layers) == (pages, pages * SHAPE.page_bytes, range(2))
    assert plan.work().nbytes == plan.nbytes
    assert plan.work(range(1), 1).nbytes == 36 * SHAPE.layer_page_bytes


def test_an_empty_plan_moves_nothing() -> None:
    kv, host = sides(3)
    plan = CopyPlan(kv, b"", host, b"")
    assert plan.batches == ()
    plan.work().run()
    assert plan.nbytes == 0


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (pack_slots([1, 2]), pack_slots([1]), "2 source pages for 1 target"),
        (pack_slots([1, 5]), pack_slots([1, 2]), "source slot 5 of a pool of 5"),
        (pack_slots([1, 2, 3]), pack_slots([4, 0, 4]), "target slot 4 is given to two pages"),
        (pack_slots([1]), pack_slots([7]), "target slot 7"),
    ],
)
def test_slots_that_do_not_fit_are_refused(source: Slots, target: Slots, words: str) -> None:
    kv, host = sides(5)
    with pytest.raises(UsageError, match=words):
        CopyPlan(kv, source, host, target)


@pytest.mark.parametrize(
    ("last_source", "last_target", "words"),
    [
        (FEW + 1, FEW, f"source slot {FEW + 1} of a pool of {FEW + 1}"),
        (FEW, FEW + 1, f"target slot {FEW + 1} of a pool of {FEW + 1}"),
        (FEW, 3, "target slot 3 is given to two pages"),
    ],
)
def test_one_slot_among_many_is_enough(last_source: int, last_target: int, words: str) -> None:
    kv, host = sides(FEW + 1)
    first = list(range(FEW))
    CopyPlan(kv, pack_slots([*first, FEW]), host, pack_slots([*first, FEW]))
    with pytest.raises(UsageError, match=words):
        CopyPlan(kv, pack_slots([*first, last_source]), host, pack_slots([*first, last_target]))


def test_shapes_that_differ_are_refused() -> None:
    kv, _ = sides(5)
    other = HostMemory(SlotLayout(KVShape(2, 2, 1, 4, "int8", 2)), 5)
    with pytest.raises(UsageError, match="cannot copy pages"):
        CopyPlan(kv, pack_slots([1]), other, pack_slots([1]))


def test_work_after_close_is_refused() -> None:
    kv, host = sides(5)
    work = CopyPlan(kv, pack_slots([1]), host, pack_slots([1])).work()
    host.close()
    with pytest.raises(StoppedError):
        work.run()


def test_no_python_runs_per_page() -> None:
    """Ten times the pages in the same count of batches: the same count of Python calls, to plan and to run."""

    def calls(pages: int) -> int:
        kv, host = sides(640)
        count = 0

        def count_call(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        source, target = pack_slots(range(pages)[::-1]), pack_slots(range(pages))
        gc.disable()  # a collection in between would call the callbacks of whoever watches it
        sys.setprofile(count_call)
        try:
            CopyPlan(kv, source, host, target).work().run()
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    assert calls(6) == calls(60)
