"""`check` is no decoration: each planted break is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache_actors.core import DEVICE, HOST, READY, Core
from hicache_actors.core.node import SAVING, STORED, WAITING, Node

from .kit import Toks, compute, make

A = Toks(range(41))


def head(core: Core) -> Node:
    return next(node for node in core.state.tree.table.values() if node.kids)


def leaf(core: Core) -> Node:
    return next(node for node in core.state.tree.table.values() if not node.kids)


def break_order(core: Core) -> None:
    core.state.residents.host.pop()


def break_stored(core: Core) -> None:
    head(core).stored = SAVING


def break_waiting(core: Core) -> None:
    core.state.tree.set_stored(leaf(core), WAITING)


def break_pool(core: Core) -> None:
    core.state.pools[HOST].give(leaf(core).at[HOST].slots[:4])


def break_links(core: Core) -> None:
    core.state.tree.table.popitem()


def break_slots(core: Core) -> None:
    leaf(core).at[DEVICE].slots = leaf(core).at[DEVICE].slots[4:]


def break_kids(core: Core) -> None:
    head(core).at[HOST].kids = 0


def break_closure(core: Core) -> None:
    for node in (head(core), leaf(core)):
        for place in (DEVICE, HOST):
            node.at[place].locks = 0
    core.state.pins.all.clear()
    residency = head(core).at[DEVICE]
    if residency.lane is not None:
        residency.lane.discard(residency)
    residency.slots, residency.state = b"", 0
    head(core).parent.at[DEVICE].kids -= 1


def break_evictable(core: Core) -> None:
    core.state.residents.unlocked[DEVICE] += 1


def break_locks(core: Core) -> None:
    leaf(core).at[DEVICE].locks += 1


def break_filling(core: Core) -> None:
    leaf(core).at[HOST].filler = 7


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (break_order, "not listed"),
        (break_stored, "stored_pages"),
        (break_waiting, "waits for no retry"),
        (break_pool, "one owner"),
        (break_links, "table"),
        (break_slots, "slots equal span"),
        (break_kids, "children present"),
        (break_closure, "closed under prefixes"),
        (break_evictable, "evictable"),
        (break_locks, "locks equal pins"),
        (break_filling, "filler"),
    ],
)
def test_a_planted_break_is_named(plant: Callable[[Core], None], message: str) -> None:
    core = make()
    lease = compute(core, A, "a")
    core.take_effects()
    for _ in range(4):
        wire = core.wire()
        core.apply(0, [(job, phase, 99) for job, phase in wire.slots], wire.rows)
        core.take_effects()
    other = core.lease(Toks(range(17)), "b")  # splits
    core.check()
    assert [node.at[HOST].state for node in core.state.tree.table.values()] == [READY, READY]
    assert {node.stored for node in core.state.tree.table.values()} == {STORED}
    plant(core)
    with pytest.raises(AssertionError, match=message):
        core.check()
    assert not lease.closed
    assert not other.closed
