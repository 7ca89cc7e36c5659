"""Each eviction order against a sorted scan of everything that could go, on random histories."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

from hicache_actors.core import CoreLease
from hicache_actors.core.check import nodes_of
from hicache_actors.core.lane import Lane
from hicache_actors.core.node import NOWHERE, Node, Residency
from hicache_actors.core.order import EVICTIONS, Eviction, Order, Policy
from hicache_actors.core.words import DEVICE, HOST, Shortfall

from .kit import PAGE, Toks, answer, make, settle, whole
from .model import Path, paths, residents

Key = tuple[int, int]


class Facts:
    """What the requests have done to one page.  ``used`` and ``came``: when, at each place."""

    def __init__(self) -> None:
        self.hits = self.priority = 0
        self.used = [0, 0]
        self.came = [0, 0]

    def inherit(self, child: Facts, place: int) -> None:
        """A page has been used whenever one behind it was."""
        self.used[place] = max(self.used[place], child.used[place])


KEYS: dict[Eviction, Callable[[Facts, int], Key]] = {
    "lru": lambda page, place: (0, page.used[place]),
    "mru": lambda page, place: (0, -page.used[place]),
    "fifo": lambda page, place: (0, page.came[place]),
    "filo": lambda page, place: (0, -page.came[place]),
    "slru": lambda page, place: (int(page.hits >= 2), page.used[place]),
    "lfu": lambda page, place: (page.hits, page.used[place]),
    "priority": lambda page, place: (page.priority, page.used[place]),
}


class History:
    """Random requests on a Core, and what an onlooker knows of each page.  Spans of nodes, and locks, are Core's."""

    def __init__(self, seed: int, eviction: Eviction, write_policy: str, **storage: Any) -> None:
        self.rng = random.Random(seed)
        self.core = make(26, 24, write_policy=write_policy, eviction=eviction, **({"storage": False} | storage))
        self.key = KEYS[eviction]
        self.ranked = eviction in ("slru", "lfu", "priority")
        self.pages: dict[Path, Facts] = {}
        self.here: list[set[Path]] = [set(), set()]
        self.time = self.made = 0
        self.leases: list[tuple[CoreLease, Toks]] = []

    def see(self) -> None:
        """Who has come, who has gone."""
        for place in (DEVICE, HOST):
            now = set(residents(self.core, place))
            for path in sorted(now - self.here[place]):
                self.pages.setdefault(path, Facts()).came[place] = self.time
            for path in sorted(self.here[place] - now, key=len, reverse=True):
                if (parent := self.pages.get(path[:-PAGE])) is not None:
                    parent.inherit(self.pages[path], place)
            self.here[place] = now
        for path in set(self.pages) - self.here[DEVICE] - self.here[HOST]:
            del self.pages[path]
        for node in nodes_of(self.core.state):
            span = self.span(node)
            for path in span:
                self.pages[path].came = list(self.pages[span[-1]].came)  # what has been joined came with its last page

    def span(self, node: Node) -> list[Path]:
        tree = self.core.state.tree
        ids = memoryview(tree.path_tokens(node)).cast("q").tolist()
        return [(tree.scope_of(node), *ids[: (i + 1) * PAGE]) for i in range(tree.start(node), node.end)]

    def use(self, tokens: Toks, start: int, stop: int, priority: int) -> None:
        """A request has come to use pages [start, stop); on the device that is a use of those before as well."""
        for at, path in enumerate(paths(tokens, stop)):
            page = self.pages[path]
            page.used[DEVICE] = self.time
            if at >= start:
                page.used[HOST] = self.time
                page.hits += 1
                page.priority = max(page.priority, priority)

    def prompt(self) -> Toks:
        length = self.rng.choice((5, 9, 21, 30))
        tokens = [0] * length
        tokens[self.rng.randrange(length) :] = [self.rng.randrange(1, 9)] * length
        return Toks(tokens[:length])

    def request(self) -> None:
        core, tokens, priority = self.core, self.prompt(), self.rng.choice((0, 0, 1, 2, -3))
        self.made += 1
        self.time += 1
        lease = core.lease(tokens, f"r{self.made}", priority)
        if self.rng.random() < 0.3 and not isinstance(core.load(lease), Shortfall):
            self.see()
        found = len(lease.pages)
        self.use(tokens, 0, found, priority)
        self.evict(DEVICE, lambda: self._allocate(lease, tokens))
        self.leases.append((lease, tokens))

    def _allocate(self, lease: CoreLease, tokens: Toks) -> None:
        self.core.allocate(lease, len(tokens) // PAGE * PAGE + PAGE - lease.capacity_tokens)

    def commit(self) -> None:
        lease, tokens = self.rng.choice(self.leases)
        most = min(lease.capacity_tokens, len(tokens))
        upto = self.rng.randint(0, most) if self.rng.random() < 0.4 else most
        start, stop = lease.done_pages, upto // PAGE
        if start < stop and lease.failed is None:
            self.time += 1
            self.core.commit(lease, upto)
            self.see()
            self.use(tokens, start, stop, lease.priority)

    def evict(self, place: int, act: Callable[[], object]) -> None:
        """Victims of ``act`` are the first of the sorted scan."""
        self.see()
        before, order = self.here[place], self.scan(place)
        lost = self.core.counts.get("dropped_dirty_pages", 0)
        act()
        gone = before - set(residents(self.core, place))
        lost = self.core.counts.get("dropped_dirty_pages", 0) - lost
        expected: set[Path] = set()
        while len(expected) < len(gone) - lost:
            expected |= order.pop(0)
        if lost:
            assert expected <= gone
            assert not order, "dirty pages go when nothing else is left"
        else:
            assert gone == expected
        self.see()

    def scan(self, place: int) -> list[set[Path]]:
        """Spans in the order in which they would go: of the nodes without children the one with the least key, again and again."""
        spans: dict[int, set[Path]] = {}
        parent: dict[int, int] = {}
        last: dict[int, Facts] = {}
        held: set[int] = set()  # parents of what stays
        for node in nodes_of(self.core.state):
            stuck = place == DEVICE and node.stuck and self.core.state.residents.protects_dirty
            if node.at[place].state and (node.at[place].locks or stuck):
                held.add(id(node.parent))
            elif node.at[place].state:
                span = self.span(node)
                spans[id(node)], parent[id(node)] = set(span), id(node.parent)
                last[id(node)] = copy.deepcopy(self.pages[span[-1]])
                if self.ranked:
                    assert len({self.key(self.pages[path], place)[0] for path in span}) == 1, "joined, and not alike"
        out = []
        while leaves := [n for n in spans if n not in held | {parent[n] for n in spans}]:
            first = min(leaves, key=lambda n: self.key(last[n], place))
            out.append(spans.pop(first))
            if parent[first] in last:
                last[parent[first]].inherit(last[first], place)
        return out

    def step(self) -> None:
        x = self.rng.random()
        if x < 0.4 and len(self.leases) < 3:
            self.request()
        elif x < 0.7 and self.leases:
            self.commit()
        elif x < 0.9 and self.leases:
            lease, _ = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.core.release(lease)
            self.see()
        else:
            host = self.core.state.evictor
            free = self.core.state.pools[HOST].free
            if not self.core.state.residents.protects_dirty and host.available(HOST) > free:
                self.evict(HOST, lambda: host.host_room(free + self.rng.randint(1, 6)))
        if self.rng.random() < 0.5:
            answer(self.core)
        else:
            self.core.take_effects()
        self.core.check()
        self.see()


@pytest.mark.parametrize("write_policy", ["none", "write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_victims_are_the_first_of_a_sorted_scan(eviction: Eviction, write_policy: str) -> None:
    evicted = joined = 0
    for seed in range(4):
        history = History(seed, eviction, write_policy)
        for _ in range(200):
            before = history.core.usage().nodes
            history.step()
            joined += history.core.usage().nodes < before
        for lease, _ in history.leases:
            history.core.release(lease)
        settle(history.core)
        evicted += history.core.counts.get("evicted_device_pages", 0)
        whole(history.core)
    assert evicted > 100
    assert joined > 5


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_looking_ahead_of_host_eviction_does_not_change_its_order(eviction: Eviction) -> None:
    evicted = 0
    for seed in range(3):
        history = History(seed, eviction, "write_through", storage=True, store_on="host_evict", store_water_mark=0.5)
        for _ in range(200):
            history.step()
        for lease, _ in history.leases:
            history.core.release(lease)
        evicted += history.core.counts.get("evicted_host_pages", 0)
        assert history.core.counts["stored_ahead_pages"]
        whole(history.core)
    assert evicted > 50


# -- the orders by themselves -------------------------------------------------------------------------------------------------


def residency(tick: int, hits: int = 0, priority: int = 0) -> Residency:
    node = Node(b"", b"", b"", NOWHERE, 1, hits=hits, priority=priority)
    return Residency(node, tick=tick)


def listed_keys(order: Order, policy: Policy) -> list[Key]:
    return [(policy.rank(each.node), each.tick) for each in order.listed()]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_any_mix_of_offers_and_discards_stays_sorted(eviction: Eviction, backwards: bool) -> None:
    policy = Policy(eviction, protected_hits=2)
    for seed in range(8):
        rng = random.Random(seed)
        order = policy.order(backwards=backwards)
        inside: list[Residency] = []
        ticks = list(range(1000))
        rng.shuffle(ticks)
        for tick in ticks[:600]:
            x = rng.random()
            if x < 0.6 or not inside:
                inside.append(residency(tick, rng.randrange(5), rng.randrange(-2, 3)))
                order.offer(inside[-1])
            elif x < 0.8:
                gone = inside.pop(rng.randrange(len(inside)))
                assert gone.lane is not None
                gone.lane.discard(gone)
                assert [gone.older, gone.newer, gone.late] == [None, None, 0]
            else:
                newest = policy.name in ("mru", "filo")
                expected = sorted(inside, key=lambda r: (policy.rank(r.node), -r.tick if newest else r.tick))
                popped = order.pop()
                assert popped is expected[-1 if backwards else 0]
                inside.remove(popped)
                for other in inside:
                    assert policy.before(popped, other) != backwards
        assert len(order.listed()) == len(inside)
        keys = listed_keys(order, policy)
        while (popped := order.pop()) is not None:
            assert (policy.rank(popped.node), popped.tick) == keys.pop(0)
        assert not keys


def test_a_use_moves_in_constant_time_and_a_late_one_in_logarithmic() -> None:
    """Steps are counted, not timed: the heap beside the list takes only what belongs in between."""
    lane = Lane()
    inside = [residency(2 * tick) for tick in range(1, 2000)]
    for each in inside:
        lane.offer(each)
    assert lane._late == [], "in order: the list alone"
    for tick, each in enumerate(inside[:500]):
        lane.discard(each)
        each.tick = 10_000 + tick
        lane.offer(each)
    assert lane._late == [], "used again: the list alone"
    late = [residency(2 * tick + 1) for tick in range(600, 900)]
    random.Random(1).shuffle(late)
    for each in late:
        lane.offer(each)
    assert len(lane._late) == len(late)
    for each in late[:100]:
        lane.discard(each)
    assert len(lane._late) == len(late) - 100, "nothing dead is left behind"
