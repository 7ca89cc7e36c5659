"""Slot pools name a slot that is handed out or given back twice."""

from __future__ import annotations

import pytest

from hicache_actors.core import SlotError
from hicache_actors.core.pool import FEW, Pool
from hicache_actors.core.words import pack_slots, unpack_slots


def test_slots_come_out_ascending_and_return() -> None:
    pool = Pool("device", 8)
    assert unpack_slots(pool.take(3)) == [0, 1, 2]
    assert unpack_slots(pool.take(2)) == [3, 4]
    pool.give(pack_slots([0, 1, 2]))
    assert unpack_slots(pool.take(4)) == [0, 1, 2, 5]
    assert pool.free == 2


def test_more_than_is_free_is_refused() -> None:
    pool = Pool("host", 2)
    with pytest.raises(SlotError, match="host: 3 slots asked, 2 free"):
        pool.take(3)
    assert pool.take(0) == b""


@pytest.mark.parametrize("again", [[1], [1, 2], [3, 3], [2, 5]])
def test_a_double_free_names_the_slots(again: list[int]) -> None:
    pool = Pool("device", 8)
    pool.take(5)
    pool.give(pack_slots([1, 2]))
    with pytest.raises(SlotError, match=r"double free of slots \["):
        pool.give(pack_slots(again))
    assert pool.free == 5, "nothing has changed"


def test_a_double_allocation_names_the_slots() -> None:
    pool = Pool("device", 4)
    pool.take(1)
    pool._stack.append(0)  # what a bug would do
    with pytest.raises(SlotError, match=r"double allocation of slots \[0\]"):
        pool.take(1)


def test_keep_only_frees_the_rest() -> None:
    pool = Pool("device", 6)
    pool.take(6)
    pool.keep_only([pack_slots([4]), pack_slots([1])])
    assert unpack_slots(pool.take(4)) == [0, 2, 3, 5]
    assert pool.free == 0


@pytest.mark.parametrize("pages", [1, FEW, FEW + 1])
def test_runs_of_any_length_come_out_as_they_went_in(pages: int) -> None:
    pool, told = Pool("device", 2 * pages), list[bytes]()
    pool.on_free = told.append
    first, second = pool.take(pages), pool.take(pages)
    assert unpack_slots(first + second) == list(range(2 * pages))
    pool.give(second)
    pool.give(first)
    assert told == [second, first]
    assert pool.take(2 * pages) == first + second


@pytest.mark.parametrize("others", [0, FEW])
@pytest.mark.parametrize("wrong", ["given back before", "named twice"])
def test_a_double_free_among_any_number_of_slots_changes_nothing(others: int, wrong: str) -> None:
    pool = Pool("device", FEW + 3)
    slots = unpack_slots(pool.take(FEW + 3))
    if wrong == "given back before":
        pool.give(pack_slots(slots[:1]))
    again = [slots[0], *slots[2 : 2 + others], slots[0] if wrong == "named twice" else slots[1]]
    before = pool.free_slots()
    with pytest.raises(SlotError, match=rf"double free of slots \[(.*, )?{slots[0]}\b"):
        pool.give(pack_slots(again))
    assert pool.free_slots() == before
    pool.give(pack_slots(slots[1:]))
    assert pool.free == len(before) + FEW + 2


@pytest.mark.parametrize("others", [0, FEW])
def test_a_double_allocation_among_any_number_of_slots_names_it(others: int) -> None:
    pool = Pool("device", FEW + 2)
    pool.take(1)
    pool._stack.append(0)  # what a bug would do
    with pytest.raises(SlotError, match=r"double allocation of slots \[0\]"):
        pool.take(1 + others)
