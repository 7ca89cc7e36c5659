"""What Core's decisions cost in a tree of a million nodes: 1,000 prompts with 999 continuations each, one page a node.

The tree is filled below the verbs, as `commit` does it; what is timed goes through the verbs.
"""

from __future__ import annotations

import gc
import os
from argparse import Namespace
from array import array
from itertools import chain
from time import perf_counter
from typing import Final

from hicache_actors.core import DEVICE, READY, SLOT_BYTES, Core, CoreConfig, CoreLease
from hicache_actors.core.node import Node
from hicache_actors.core.pool import Pool
from hicache_actors.keys.prompt import Prompt
from hicache_actors.keys.scope import NO_SCOPE

NODES: Final = 1_000_000
QUICK_NODES: Final = NODES // 8
PAGE: Final = 64
KIDS: Final = 999
EVICTED_PAGES: Final = 64
EVICTIONS: Final = 400
OTHER_ORDER: Final = "lfu"


def run(options: Namespace, *, quiet: bool) -> dict[str, float]:
    """See `measure`."""
    return measure(QUICK_NODES if options.quick else NODES)


def measure(nodes: int) -> dict[str, float]:
    """* ``bytes_per_node``: growth of the process by the tree, spans and child table included;
    * ``gc_1m_nodes_ms``: a full collection beside it, median;
    * ``evict_64_at_1m_us``: an ``allocate`` that evicts 64 pages, lru;
    * ``touch_all_then_evict_ms``: the first of these after every node was used again, in another order;
    * ``change_order_slice_at_1m_ms``: one section's part of going over to lfu;
    * ``evict_64_at_1m_lfu_us``: then, with hit counts from 1 to 50;
    * ``alloc_free_1m_slots_us``: 64 slots out of a pool of a million and back, used slots scattered.
    """
    gc.collect()
    gc.disable()
    try:
        return _measure(nodes) | _time_pool(nodes)
    finally:
        gc.enable()


def _measure(nodes: int) -> dict[str, float]:
    before = _resident_bytes()
    core = Core(CoreConfig(PAGE, nodes, 0, write_policy="none", storage=False))
    _grow(core, nodes)
    figures: dict[str, float] = {"bytes_per_node": round((_resident_bytes() - before) / nodes)}
    figures["gc_1m_nodes_ms"] = round(sorted(_timed(gc.collect) * 1e3 for _ in range(5))[2], 3)
    lease = core.lease(Prompt([]), "evictor")
    figures |= _spread("evict_64_at_1m_us", [_evict(core, lease) for _ in range(EVICTIONS)])
    tree = list(core.state.tree.table.values())
    for node in reversed(tree):
        core.state.residents.use([node])
    figures["touch_all_then_evict_ms"] = round(_evict(core, lease) / 1e3, 3)
    for at, node in enumerate(tree):
        node.hits = 50 if node.kids else at % 50 + 1
    del tree
    refused = core.set_eviction(OTHER_ORDER)
    assert refused is None, refused
    slices = []
    while core.state.residents.moving:
        slices.append(_timed(core.take_effects) * 1e3)
    figures |= _spread("change_order_slice_at_1m_ms", slices)
    figures |= _spread("evict_64_at_1m_lfu_us", [_evict(core, lease) for _ in range(EVICTIONS)])
    core.release(lease)
    core.close()
    return figures


def _grow(core: Core, nodes: int) -> None:
    state = core.state
    tree, residents = state.tree, state.residents
    slots = state.pools[DEVICE].take(nodes)
    root = tree.root(NO_SCOPE)

    def add(parent: Node, key: memoryview) -> Node:
        at = tree.pages * SLOT_BYTES
        node = tree.add(parent, key, parent.end, parent.end + 1)
        residents.put(node, DEVICE, slots[at : at + SLOT_BYTES], READY)
        residents.use([node], 1)
        return node

    for family in range(-(-nodes // (KIDS + 1))):
        head = array("q", [family]) * PAGE
        parent = add(root, memoryview(head).cast("B"))
        for kid in range(min(KIDS, nodes - tree.pages)):
            add(parent, memoryview(head + array("q", [kid]) * PAGE).cast("B"))


def _evict(core: Core, lease: CoreLease) -> float:
    """-> microseconds."""
    started = perf_counter()
    refused = core.allocate(lease, EVICTED_PAGES * PAGE)
    took_us = (perf_counter() - started) * 1e6
    assert refused is None, refused
    return took_us


def _time_pool(slots: int) -> dict[str, float]:
    pool = Pool("device", slots)
    taken = [pool.take(EVICTED_PAGES) for _ in range(slots // EVICTED_PAGES)]
    for kept in chain(taken[::3], taken[1::3]):
        pool.give(kept)
    times = []
    for _ in range(20_000):
        started = perf_counter()
        pool.give(pool.take(EVICTED_PAGES))
        times.append((perf_counter() - started) * 1e6)
    return _spread("alloc_free_1m_slots_us", times)


def _timed(call: object) -> float:
    assert callable(call)
    started = perf_counter()
    call()
    return perf_counter() - started


def _spread(name: str, times: list[float]) -> dict[str, float]:
    times.sort()
    return {
        name: round(times[len(times) // 2], 3),
        f"{name}_p999": round(times[int(len(times) * 0.999)], 3),
        f"{name}_max": round(times[-1], 3),
    }


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
