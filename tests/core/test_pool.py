"""Slot pools name a slot that is handed out or given back twice."""

from __future__ import annotations

import pytest

from hicache_actors.core import SlotError
from hicache_actors.core.pool import Pool
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
