"""Who goes, in which order, and who stays."""

from __future__ import annotations

import random

import pytest

from hicache_actors.core import Core
from hicache_actors.core.words import DEVICE, HOST, Shortfall, StartWriteBack, encode_result

from .kit import PAGE, Toks, answer, cached, clear_device, compute, host_only, make, of_type, pages_of, settle, whole
from .model import Path, paths, residents

A = Toks(range(41))


def branch(n: int, pages: int = 2) -> Toks:
    return Toks([n] * PAGE * pages + [0])


def on_device(core: Core) -> set[Path]:
    return set(residents(core, DEVICE))


@pytest.mark.parametrize("policy", ["none", "write_through"])
@pytest.mark.parametrize("seed", range(12))
def test_victims_come_in_exact_lru_order(policy: str, seed: int) -> None:
    """Each page was used whenever a request passed it; the leaf that was used longest ago goes first.

    The oracle knows pages and times only, and the spans of the nodes from Core.
    """
    rng = random.Random(seed)
    core = make(60, 200, write_policy=policy, storage=False)
    used: dict[Path, int] = {}
    time = 0
    for n in range(150):
        length = rng.choice((5, 9, 21, 30))
        tokens = [0] * length
        tokens[rng.randrange(length) :] = [rng.randrange(1, 4)] * length
        prompt = Toks(tokens[:length])
        need = length // PAGE + 1
        lease = core.lease(prompt, f"r{n}")
        time += 1
        used |= dict.fromkeys(paths(prompt, len(lease.pages)), time)
        before, order, protected = on_device(core), victims(core, used), set(paths(prompt, len(lease.pages)))
        assert core.allocate(lease, need * PAGE - lease.capacity_tokens) is None
        gone = before - on_device(core)
        expected: set[Path] = set()
        while len(expected) < len(gone):
            expected |= order.pop(0)
        assert gone == expected, "the victims are the oldest leaves"
        assert not gone & protected
        core.commit(lease, length)
        time += 1
        used |= dict.fromkeys(paths(prompt, length // PAGE), time)
        core.release(lease)
        settle(core)
        core.check()
    whole(core)


def victims(core: Core, used: dict[Path, int]) -> list[set[Path]]:
    """Spans of unlocked nodes in the order in which they would go, leaf by leaf."""
    from hicache_actors.core.check import nodes_of

    tree = core.state.tree
    spans: dict[int, set[Path]] = {}
    parent: dict[int, int] = {}
    last: dict[int, int] = {}
    for node in nodes_of(core.state):
        if node.at[DEVICE].state and not node.at[DEVICE].locks:
            ids = memoryview(tree.path_tokens(node)).cast("q").tolist()
            scope = tree.scope_of(node)
            spans[id(node)] = {(scope, *ids[: (i + 1) * PAGE]) for i in range(tree.start(node), node.end)}
            parent[id(node)] = id(node.parent)
            last[id(node)] = used[(scope, *ids[: node.end * PAGE])]
    out = []
    while spans:
        leaves = [n for n in spans if n not in {parent[m] for m in spans}]
        oldest = min(leaves, key=lambda n: last[n])
        out.append(spans.pop(oldest))
    return out


def test_leased_pages_stay() -> None:
    core = make(20, 40)
    held = compute(core, A, "held")
    settle(core)
    other = core.lease(Toks([9] * 60), "b")
    answer_ = core.allocate(other, 44)
    assert isinstance(answer_, Shortfall)
    assert (answer_.reason, answer_.missing_pages) == ("device_capacity", 2)
    assert core.allocate(other, 36) is None
    assert pages_of(core.match(A))[0] == 10
    core.release(held)
    core.release(other)
    whole(core)


def test_a_refused_allocate_has_evicted_nothing() -> None:
    core = make(20, 40)
    cached(core, A)
    lease = core.lease(Toks([9] * 200), "b")
    before = core.usage().device
    refused = core.allocate(lease, 21 * PAGE)
    assert isinstance(refused, Shortfall)
    assert refused.missing_pages == 1
    assert core.usage().device == before
    assert core.allocate(lease, 20 * PAGE) is None, "evictable is exact"
    assert pages_of(core.match(A)) == (0, 0, 10)
    core.release(lease)
    whole(core)


def test_a_refused_load_has_evicted_nothing() -> None:
    core = make(12, 40)
    host_only(core, A)
    held = compute(core, branch(5), "held")
    settle(core)
    cached(core, branch(6))
    lease = core.lease(A, "a")
    before, match = core.usage().device, core.match(branch(6))
    assert core.allocate(core.lease(Toks([8]), "b"), 4 * PAGE) is None
    before = core.usage().device
    refused = core.load(lease)
    assert isinstance(refused, Shortfall)
    assert refused.reason == "device_capacity"
    assert core.usage().device == before
    assert core.match(branch(6)).host == match.host
    settle(core)
    for rid in ("held", "a", "b"):
        core.release(core.state.leases[rid])
    assert held.closed
    whole(core)


def test_freeing_pages_come_back_without_a_release() -> None:
    core = make(12, 40)
    lease = compute(core, A, "a")
    core.take_effects()
    core.release(lease, after="event")  # write-back and drain hold everything
    core.take_effects()
    other = core.lease(branch(7, 9), "b")
    refused = core.allocate(other, 9 * PAGE)
    assert isinstance(refused, Shortfall)
    assert refused.missing_pages == 8
    assert refused.freeing_pages == 11, "ten published pages under jobs, and the open page of the drain"
    settle(core)
    assert core.allocate(other, 9 * PAGE) is None
    core.release(other)
    whole(core)


def test_a_victim_with_a_host_copy_turns_host_only_one_without_is_dropped() -> None:
    core = make(20, 40)
    cached(core, A)
    clear_device(core)
    assert pages_of(core.match(A)) == (0, 0, 10)
    whole(core)
    core = make(20, 0)
    cached(core, A)
    clear_device(core)
    assert core.match(A).host == 0
    assert core.counts["dropped_pages"] == 10
    whole(core)


def test_host_leaves_in_lru_order_even_with_a_device_twin() -> None:
    core = make(40, 12)
    for n in (1, 2, 3):
        cached(core, branch(n, 4))
    core.release(core.lease(branch(1, 4), "touch"))
    cached(core, branch(4, 4))
    host = {path[1] for path in residents(core, HOST)}
    assert host == {1, 3, 4}
    assert pages_of(core.match(branch(2, 4))) == (4, 4, 4), "its device copy is still there"
    whole(core)


def test_a_job_does_not_touch_what_it_pins() -> None:
    """A backup that ends late does not make its pages the newest."""
    core = make(40, 12)
    core.release(compute(core, branch(1, 4), "a"))
    answer(core)
    (late,) = [job.id for job in core.state.jobs.open.values() if job.kind == "backup"]
    for n in (2, 3):
        core.release(compute(core, branch(n, 4), f"r{n}"))
        for _ in range(3):
            answer(core, only=lambda job: job != late)
    settle(core)
    cached(core, branch(4, 4))
    assert {path[1] for path in residents(core, HOST)} == {2, 3, 4}
    whole(core)


def host_below_device_only(core: Core) -> None:
    """A: pages 0-4 device only, pages 5-9 host only."""
    lease = core.lease(A, "a")
    core.allocate(lease, 41)
    core.commit(lease, 40)
    settle(core)
    core.release(lease)
    head = core.lease(Toks(range(21)), "head")  # splits
    settle(core)
    node = head.pin.tail
    core.release(head)
    core.state.pins.lose(HOST, [node])
    core.check()


def test_eviction_passes_such_a_node_over_while_others_can_go() -> None:
    core = make(24, 24)
    host_below_device_only(core)
    cached(core, branch(7, 4))
    lease = core.lease(Toks([9] * 100), "b")
    assert core.allocate(lease, 19 * PAGE) is None, "five pages of A and four of the branch are there, ten are free"
    core.check()
    effects = core.take_effects()
    assert pages_of(core.match(A)) == (5, 5, 10)
    assert core.match(branch(7, 4)).device < 16
    (written,) = of_type(effects, StartWriteBack)
    assert len(written.source) // 4 == 5
    settle(core)
    core.release(lease)
    clear_device(core)
    assert pages_of(core.match(A)) == (0, 0, 10)
    whole(core)


def test_it_goes_with_its_subtree_if_nothing_else_can() -> None:
    core = make(24, 24)
    host_below_device_only(core)
    lease = core.lease(Toks([9] * 100), "b")
    assert core.allocate(lease, 24 * PAGE) is None
    core.check()
    assert core.match(A).host == 0
    assert core.counts["dropped_subtree_pages"] == 10
    core.release(lease)
    whole(core)


def test_it_goes_with_its_subtree_if_no_backup_can_be_made() -> None:
    core = make(24, 10)
    host_below_device_only(core)
    held = [core.lease(Toks([n] * 9), f"held{n}") for n in range(50, 53)]
    for lease in held:
        core.allocate(lease, 9)
        core.commit(lease, 9)  # fills the host, and pins it there: nothing answers
    core.take_effects()
    other = core.lease(Toks([9] * 100), "b")
    assert core.allocate(other, (core.usage().device.free_pages + 1) * PAGE) is None
    core.check()
    for lease in (*held, other):
        core.release(lease)
    whole(core)


def test_a_failed_write_back_frees_its_slots_at_once() -> None:
    core = make()
    lease = compute(core, A, "a")
    core.take_effects()
    ((job, phase),) = core.wire().slots
    core.apply(0, [(job, phase, encode_result(6))], [])
    core.check()
    assert core.usage().host.limbo_pages == 4, "a late copy may still write there"
    answer(core)
    assert core.counts["write_back_failed_pages"] == 4
    core.release(lease)
    whole(core)
