"""Each eviction order in a large tree, page by page against a heap: the order stays exact, however many could go."""

from __future__ import annotations

import gc
import heapq
import random
from array import array
from collections.abc import Callable, Iterator

import pytest

from hicache_actors.core import DEVICE, READY, SLOT_BYTES, Core, CoreConfig
from hicache_actors.core.node import Node
from hicache_actors.core.order import EVICTIONS, Eviction
from hicache_actors.keys.scope import NO_SCOPE

from .kit import PAGE, Toks

EVICTED_AT_ONCE = 64
BY_ARRIVAL = ("fifo", "filo")

KEYS: dict[Eviction, Callable[[Node, int], tuple[int, int]]] = {
    "lru": lambda node, tick: (0, tick),
    "mru": lambda node, tick: (0, -tick),
    "fifo": lambda node, tick: (0, tick),
    "filo": lambda node, tick: (0, -tick),
    "slru": lambda node, tick: (int(node.hits >= 2), tick),
    "lfu": lambda node, tick: (node.hits, tick),
    "priority": lambda node, tick: (node.priority, tick),
}


def grow(core: Core, pages: int) -> None:
    """Prompts of a page with up to 99 continuations of another one each, below the verbs, as `commit` does it."""
    state = core.state
    slots = state.pools[DEVICE].take(pages)

    def add(parent: Node, tokens: list[int]) -> Node:
        at = state.tree.pages * SLOT_BYTES
        node = state.tree.add(parent, memoryview(array("q", tokens)).cast("B"), parent.end, parent.end + 1)
        state.residents.put(node, DEVICE, slots[at : at + SLOT_BYTES], READY)
        return node

    root = state.tree.root(NO_SCOPE)
    for family in range(-(-pages // 100)):
        head = [family] * PAGE
        parent = add(root, head)
        for kid in range(min(99, pages - state.tree.pages)):
            add(parent, head + [kid] * PAGE)


def expected(nodes: list[Node], eviction: Eviction) -> Iterator[Node]:
    """All nodes as they have to go: of those without children the one with the least key, again and again."""
    key = KEYS[eviction]
    ticks = {id(node): node.at[DEVICE].tick for node in nodes}
    kids = {id(node): node.kids for node in nodes}
    parents = {id(node): node.parent for node in nodes}
    heap = [(*key(node, ticks[id(node)]), at, node) for at, node in enumerate(nodes) if not node.kids]
    heapq.heapify(heap)
    last = len(nodes)
    while heap:
        node = heapq.heappop(heap)[-1]
        yield node
        parent = parents[id(node)]
        if id(parent) not in ticks:
            continue
        if eviction not in BY_ARRIVAL:  # it was used whenever what stands behind it was
            ticks[id(parent)] = max(ticks[id(parent)], ticks[id(node)])
        kids[id(parent)] -= 1
        if not kids[id(parent)]:
            last += 1
            heapq.heappush(heap, (*key(parent, ticks[id(parent)]), last, parent))


@pytest.mark.parametrize("pages", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_every_page_goes_in_its_turn(eviction: Eviction, pages: int) -> None:
    draw = random.Random(pages)
    core = Core(CoreConfig(PAGE, pages, 0, write_policy="none", storage=False))
    grow(core, pages)
    nodes = list(core.state.tree.table.values())
    for node in nodes:
        node.hits, node.priority = draw.randrange(50), draw.randrange(-3, 4)
    draw.shuffle(nodes)
    for node in nodes:
        core.state.residents.use([node])
    assert core.set_eviction("mru") is None  # each way of listing is made anew, from the facts of now
    while core.state.residents.moving:
        core.take_effects()
    assert core.set_eviction(eviction) is None
    while core.state.residents.moving:
        core.take_effects()
    order = iter([*expected(nodes, eviction)])
    lease = core.lease(Toks([]), "evictor")
    gc.disable()
    try:
        for turn in range(1, pages // EVICTED_AT_ONCE + 1):
            assert core.allocate(lease, EVICTED_AT_ONCE * PAGE) is None
            assert core.state.tree.pages == pages - turn * EVICTED_AT_ONCE
            assert all(not next(order).tag for _ in range(EVICTED_AT_ONCE)), "another page has gone instead"
    finally:
        gc.enable()
    core.release(lease)
    core.close()
