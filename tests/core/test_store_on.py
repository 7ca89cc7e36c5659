"""store_on = "host_evict": nothing is stored because it has come to the host, all is stored before it leaves it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hicache_actors.core import Core, CoreLease, PolicyRefused
from hicache_actors.core.check import nodes_of
from hicache_actors.core.node import UNSTORED, Node
from hicache_actors.core.order import EVICTIONS, Eviction
from hicache_actors.core.words import HOST, READY, Phase, StartBackup, encode_result
from hicache_actors.errors import ConfigError

from .kit import PAGE, Toks, answer, cached, clear_device, compute, make, of_type, settle, whole, woken


def lazy(device: int = 40, host: int = 40, **settings: Any) -> Core:
    """The mark is at three quarters of the host: of 40 pages 10 are to be free, or stored and next to go."""
    return make(device, host, store_on="host_evict", **settings)


def prompt(family: int, pages: int = 5) -> Toks:
    return Toks(range(family << 20, (family << 20) + pages * PAGE + 1))


def saved(effects: list[Any]) -> list[tuple[int, int, int]]:
    """(family, first page, pages) of each path that the backups store."""
    return [
        (memoryview(path.tokens).cast("B").cast("q")[0] >> 20, path.first_page, path.pages)
        for backup in of_type(effects, StartBackup)
        for path in backup.paths
    ]


def fill(core: Core, *families: int, pages: int = 5) -> list[Any]:
    effects: list[Any] = []
    for family in families:
        lease = compute(core, prompt(family, pages), f"maker of {family}")
        effects += settle(core)
        core.release(lease)
        effects += settle(core)
    return effects


# -- ahead of eviction --------------------------------------------------------------------------------------------------------


def test_below_the_mark_nothing_is_stored() -> None:
    core = lazy()
    assert saved(fill(core, 1, 2, 3, 4, 5, 6)) == []
    assert core.usage().host.free_pages == 10
    assert core.usage().stored_pages == 0
    assert not core.needs_step
    assert core.next_due_ms is None
    whole(core)


def test_above_the_mark_what_would_go_next_is_stored_in_the_order_of_eviction() -> None:
    core = lazy()
    fill(core, 1, 2, 3, 4, 5, 6)
    core.release(core.lease(prompt(1), "uses 1 again"))
    assert saved(fill(core, 7)) == [(2, 0, 5)], "5 of 40 are free, so 5 more are to be ready to go"
    assert saved(fill(core, 8)) == [(3, 0, 5)]
    assert core.usage().host.free_pages == 0
    assert core.usage().stored_pages == 10
    assert core.counts["stored_ahead_pages"] == 10
    assert saved(fill(core, 9)) == [(4, 0, 5)], "2 has gone, 4 is among the next ten"
    assert core.counts["evicted_host_pages"] == 5
    assert "evicted_unstored_pages" not in core.counts
    whole(core)


def test_what_is_used_again_is_not_stored_before_its_turn_comes() -> None:
    core = lazy(100, 40)
    fill(core, *range(1, 8))
    assert core.usage().stored_pages == 5
    for turn in range(8, 20):
        core.release(core.lease(prompt(3), f"keeps 3 in use, turn {turn}"))
        fill(core, turn)
    assert not any(node.stored for node in nodes_of(core.state) if core.state.tree.path_tokens(node)[:8] == _first(3))
    assert "evicted_unstored_pages" not in core.counts
    whole(core)


def _first(family: int) -> bytes:
    return (family << 20).to_bytes(8, "little")


def test_a_page_is_stored_with_its_prefix_and_no_hole_is_left() -> None:
    core = lazy(60, 40)
    stem = prompt(1, 10)
    cached(core, stem)
    for branch in (1, 2, 3):
        cached(
            core, Toks([*range(1 << 20, (1 << 20) + 10 * PAGE), *range(branch * 1000, branch * 1000 + 5 * PAGE + 1)])
        )
    effects = fill(core, 2, pages=10)
    assert saved(effects) == [(1, 0, 15)], "the first branch would go next, and hangs on the stem"
    whole(core)


def test_one_section_opens_one_backup_and_no_more_than_a_few_batches_at_once() -> None:
    core = lazy(4000, 4000, store_water_mark=0.5, storage=False)
    for family in range(1, 36):
        cached(core, prompt(family, 100))
    core.set_storage(True)
    (first,) = of_type(core.take_effects(), StartBackup)
    assert sum(path.pages for path in first.paths) == 300, "until 256 are reached"
    effects = settle(core)
    assert core.usage().stored_pages == 1500, "with 500 free ones that is half of the host"
    assert max(sum(path.pages for path in backup.paths) for backup in of_type(effects, StartBackup)) == 300
    whole(core)


def test_a_slow_store_pins_no_more_of_the_host_than_is_to_be_ready() -> None:
    """Eviction does not wait for it: what it does not take in time goes unstored, and is counted."""
    core = lazy(200, 40)
    for family in range(1, 30):
        lease = compute(core, prompt(family), f"r{family}")
        for _ in range(3):
            answer(core, only=lambda job: core.state.jobs.open[job].kind != "backup")
        core.release(lease)
        answer(core, only=lambda job: core.state.jobs.open[job].kind != "backup")
        open_backups = [job for job in core.state.jobs.open.values() if job.kind == "backup"]
        assert sum(part.pages for job in open_backups for part in job.ranges) <= 10  # type: ignore[attr-defined]
    assert core.counts["evicted_unstored_pages"] >= 50
    assert "write_back_refused_pages" not in core.counts
    whole(core)


def test_what_has_come_to_the_host_is_looked_at_before_anybody_asks_for_room() -> None:
    """Else a section could take a page that the apply before it has just let go."""
    core = lazy(store_water_mark=0.0)
    lease = compute(core, prompt(1), "one")
    (write_back,) = core.take_effects()
    core.apply(0, [(write_back.job, Phase.RUN, encode_result(5))], [write_back.job])  # type: ignore[union-attr]
    assert core.usage().jobs["backup.run"] == 1
    assert core.usage().host.evictable_pages == 0
    core.release(lease)
    whole(core)


def test_with_the_mark_at_one_only_those_who_wait_have_pages_stored() -> None:
    core = lazy(store_water_mark=1.0)
    assert saved(fill(core, *range(1, 12))) == []
    waiter = core.drained()
    assert woken(settle(core), waiter) == core.usage().tree_pages - 40
    assert core.usage().stored_pages == 40
    whole(core)


def test_publish_stores_at_once() -> None:
    core = make()
    assert saved(fill(core, 1)) == [(1, 0, 5)]
    assert "stored_ahead_pages" not in core.counts
    whole(core)


# -- a store that fails, comes and goes -----------------------------------------------------------------------------------------


def fail_backups(core: Core, rounds: int = 1) -> None:
    for _ in range(rounds):
        effects = core.take_effects()
        wire = core.wire()
        values = [
            (job, phase, encode_result(0 if core.state.jobs.open[job].kind == "backup" else 1 << 20))
            for job, phase in wire.slots
        ]
        core.apply(core.now_ms, values, wire.rows)
        core.check()
        assert effects is not None


def test_what_was_given_up_is_tried_again_once_the_store_takes_pages() -> None:
    core = lazy(200, 40, retry_delays_s=(1,))
    fill(core, 1, 2, 3, 4, 5, 6)
    lease = compute(core, prompt(7), "seven")
    fail_backups(core, 4)
    assert core.usage().retries == 1
    core.apply(1000, [], [])
    fail_backups(core, 3)
    assert core.counts["backup_given_up_pages"] == 5
    assert not core.state.jobs.open, "and it is not tried for ever"
    core.release(lease)
    assert saved(fill(core, 8)) == [(2, 0, 5), (1, 0, 5)]
    assert core.usage().stored_pages == 10
    whole(core)


def test_a_store_that_is_attached_gets_what_is_above_the_mark() -> None:
    core = lazy(storage=False)
    fill(core, *range(1, 9))
    core.set_storage(True)
    assert core.usage().backlog_nodes == 0
    effects = settle(core)
    assert saved(effects) == [(1, 0, 5), (2, 0, 5)]
    core.set_storage(True)
    assert core.usage().stored_pages == 0
    assert saved(settle(core)) == [(1, 0, 5), (2, 0, 5)], "the next one has nothing of it"
    core.set_storage(False)
    assert saved(fill(core, 20, 21)) == []
    whole(core)


def test_other_weights_and_a_reset_begin_anew() -> None:
    core = lazy()
    fill(core, *range(1, 9))
    assert core.usage().stored_pages == 10
    core.advance_epoch("other")
    core.take_effects()
    core.check()
    assert saved(fill(core, *range(1, 7))) == []
    assert saved(fill(core, 7)) == [(1, 0, 5)]
    whole(core)


def test_a_degraded_cache_stores_nothing_more() -> None:
    core = lazy()
    fill(core, *range(1, 9))
    drain = core.drained()
    core.degrade()
    effects = core.take_effects()
    assert woken(effects, drain) == 0
    assert not of_type(effects, StartBackup)
    assert core.usage().backlog_nodes == 0
    whole(core)


def test_what_lies_below_a_gap_is_stored_once_the_gap_is_filled() -> None:
    core = lazy(60, 8, store_water_mark=0.0)
    head = Toks(range(4 * PAGE))
    lease = core.lease(head.plus(range(900, 900 + 2 * PAGE + 1)), "a")
    core.allocate(lease, 6 * PAGE + 1)
    core.commit(lease, 4 * PAGE)
    core.take_effects()
    core.commit(lease, 6 * PAGE)
    core.take_effects()
    first, second = [job.id for job in core.state.jobs.open.values() if job.kind == "write_back"]
    core.apply(0, [(second, Phase.RUN, encode_result(2))], [])
    core.check()
    assert not of_type(core.take_effects(), StartBackup), "its prefix is not on the host yet"
    core.apply(0, [], [second])
    assert not of_type(core.take_effects(), StartBackup)
    core.apply(0, [(first, Phase.RUN, encode_result(4))], [])
    core.check()
    settle(core)
    assert core.usage().stored_pages == 6
    core.release(lease)
    whole(core)


# -- those who wait -------------------------------------------------------------------------------------------------------------


def test_stored_asks_for_the_pages_of_its_prompt_alone() -> None:
    core = lazy()
    fill(core, 1, 2)
    waiter = core.stored(prompt(2, 3))
    effects = settle(core)
    assert saved(effects) == [(2, 0, 5)]
    assert woken(effects, waiter) == (3 * PAGE, None)
    assert core.usage().stored_pages == 5
    whole(core)


def test_stored_follows_pages_that_are_on_their_way_to_the_host() -> None:
    core = lazy()
    lease = compute(core, prompt(1), "one")
    waiter = core.stored(prompt(1))
    effects = settle(core)
    assert woken(effects, waiter) == (5 * PAGE, None)
    core.release(lease)
    whole(core)


def test_stored_ends_when_the_pages_are_given_up() -> None:
    core = lazy(retry_delays_s=())
    fill(core, 1)
    waiter = core.stored(prompt(1))
    (backup,) = of_type(core.take_effects(), StartBackup)
    core.apply(0, [(backup.job, Phase.RUN, encode_result(2))], [])
    assert woken(core.take_effects(), waiter) == (2 * PAGE, "given_up")
    assert saved(settle(core)) == []
    whole(core)


def test_stored_of_dirty_pages_under_write_back() -> None:
    core = lazy(write_policy="write_back")
    core.release(compute(core, prompt(1), "one"))
    assert core.usage().dirty_pages == 5
    waiter = core.stored(prompt(1))
    assert woken(settle(core), waiter) == (5 * PAGE, None)
    whole(core)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_a_drain_stores_the_rest_roots_first(write_policy: str) -> None:
    core = lazy(2000, 2000, write_policy=write_policy)
    stem = prompt(1, 10)
    cached(core, stem)
    for branch in range(1, 4):
        cached(
            core, Toks([*range(1 << 20, (1 << 20) + 10 * PAGE), *range(branch * 1000, branch * 1000 + 90 * PAGE + 1)])
        )
    lease = compute(core, prompt(2, 100), "on its way to the host")
    waiter = core.drained()
    effects = core.take_effects()
    assert core.needs_step
    effects += settle(core)
    assert woken(effects, waiter) == 0
    assert core.usage().stored_pages == core.usage().tree_pages == 380
    paths = saved(effects)
    assert min(first for family, first, _ in paths[:2] if family == 1) == 0, "the stem, before what hangs on it"
    assert sum(pages for _, _, pages in paths) == 380, "each page once"
    core.release(lease)
    assert saved(fill(core, 3)) == [], "nobody waits any more"
    whole(core)


def test_a_drain_that_is_given_up_leaves_the_rest_unstored() -> None:
    core = lazy(2000, 2000)
    for family in range(1, 6):
        cached(core, prompt(family, 200))
    waiter = core.drained()
    answer(core)
    left = core.cancel_waiter(waiter)
    assert isinstance(left, int)
    assert left >= 600
    settle(core)
    assert core.usage().stored_pages < 1000
    assert core.usage().backlog_nodes == 0
    whole(core)


def test_a_drain_ends_though_the_store_fails() -> None:
    core = lazy(retry_delays_s=(1,))
    fill(core, 1, 2)
    waiter = core.drained()
    effects: list[Any] = []
    for turn in range(20):
        effects += core.take_effects()
        fail_backups(core)
        core.apply(1000 * turn, [], [])
    effects += core.take_effects()
    assert woken(effects, waiter) == 10
    whole(core)


# -- by brute force -------------------------------------------------------------------------------------------------------------


def must_be_ready(core: Core) -> int:
    """Evict in thought, page after page, what the host is to have free or ready: each page of it is stored, or on its way there ->
    pages that have been looked at.
    """
    state, policy = core.state, core.state.policies.eviction
    newest_first = policy.name in ("mru", "filo")
    nodes = [node for node in nodes_of(state) if node.at[HOST].state]
    ticks = {id(node): node.at[HOST].tick for node in nodes}
    kids = {id(node): node.at[HOST].kids for node in nodes}
    left, looked_at = state.policies.ready_goal_pages - state.pools[HOST].free, 0
    next_to_go = [node for node in nodes if not kids[id(node)]]

    def key(node: Node) -> tuple[int, int]:
        return policy.rank(node), -ticks[id(node)] if newest_first else ticks[id(node)]

    while left > 0 and next_to_go:
        node = min(next_to_go, key=key)
        next_to_go.remove(node)
        host, pages = node.at[HOST], node.end - state.tree.start(node)
        if host.state != READY or (state.residents.protects_dirty and node.at[0].state):
            continue
        left -= pages
        if host.locks:
            continue
        looked_at += pages
        above_are_here = all(up.at[HOST].state == READY for up in state.tree.path(node, 0))
        assert node.stored != UNSTORED or not above_are_here, "it could have been stored ahead"
        up = node.parent
        if id(up) in kids:
            kids[id(up)] -= 1
            if policy.by_use:
                ticks[id(up)] = max(ticks[id(up)], ticks[id(node)])
            if not kids[id(up)]:
                next_to_go.append(up)
    return looked_at


class Life:
    """Random requests, answers that come in any order and fail now and then."""

    def __init__(self, seed: int, eviction: Eviction, write_policy: str) -> None:
        self.rng = random.Random(seed)
        host_pages = 16 if write_policy == "write_through_selective" else 48
        self.goal = host_pages // 4
        self.core = lazy(80, host_pages, eviction=eviction, write_policy=write_policy, retry_delays_s=(1,) * 60)
        self.leases: list[CoreLease] = []
        self.made = self.looked_at = self.skipped = 0

    def section(self) -> None:
        self.core.take_effects()
        self.core.check()
        if self.core.state.residents.moving or self.core._saving.backup_pages >= self.goal:
            self.skipped += 1  # enough is under way
        else:
            self.looked_at += must_be_ready(self.core)

    def turn(self) -> None:
        rng, core = self.rng, self.core
        x = rng.random()
        if x < 0.4 and len(self.leases) < 3:
            self._serve()
        elif x < 0.6 and self.leases:
            core.release(self.leases.pop(rng.randrange(len(self.leases))))
        elif x < 0.64:
            clear_device(core)
        elif x < 0.67:
            core.stored(self._prompt())
        elif x < 0.68:
            core.cancel_waiter(core.drained())
        self.section()
        wire = core.wire()
        values = []
        for job, phase in wire.slots:
            if rng.random() < 0.7:
                pages = 1 << 20 if rng.random() < 0.9 else rng.randrange(3)
                values.append((job, phase, pages if phase is Phase.HIT else encode_result(pages)))
        core.apply(core.now_ms + rng.randrange(300), values, [job for job in wire.rows if rng.random() < 0.8])
        core.check()
        self.section()

    def _prompt(self) -> Toks:
        fork = self.rng.randrange(1, 6) * PAGE
        branch, pages = self.rng.randrange(4), self.rng.randrange(1, 10)
        base = self.rng.randrange(5) << 20
        return Toks([base + i + (1000 * branch if i >= fork else 0) for i in range(pages * PAGE + 1)])

    def _serve(self) -> None:
        self.made += 1
        tokens = self._prompt()
        lease = self.core.lease(tokens, f"r{self.made}", self.rng.randrange(2))
        self.leases.append(lease)
        self.core.load(lease)
        if self.core.allocate(lease, max(0, len(tokens) - lease.capacity_tokens)) is None:
            self.core.commit(lease, len(tokens))


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_what_goes_next_is_stored_as_far_as_the_mark_says(eviction: Eviction, write_policy: str) -> None:
    looked_at = 0
    for seed in range(2):
        life = Life(seed, eviction, write_policy)
        for _ in range(120):
            life.turn()
        for lease in life.leases:
            life.core.release(lease)
        looked_at += life.looked_at
        life.core.apply(10**6, [], [])
        whole(life.core)
    assert looked_at


@pytest.mark.parametrize("settings", [{"store_on": "later"}, {"store_water_mark": 1.5}, {"store_water_mark": True}])
def test_what_cannot_be_honoured_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(**settings)


# -- at run time --------------------------------------------------------------------------------------------------------------


def test_from_publish_on_everything_is_stored_what_is_there_first() -> None:
    core = lazy()
    assert saved(fill(core, 1, 2, 3)) == []
    assert core.set_store_on("publish") is None
    assert sorted(saved(settle(core))) == [(family, 0, 5) for family in (1, 2, 3)]
    assert core.usage().stored_pages == 15
    assert saved(fill(core, 4)) == [(4, 0, 5)]
    whole(core)


def test_from_host_evict_on_pages_wait_for_their_turn() -> None:
    core = lazy()
    assert core.set_store_on("publish") is None
    assert saved(fill(core, 1, 2)) == [(1, 0, 5), (2, 0, 5)]
    assert core.set_store_on("host_evict") is None
    assert core.set_store_on("host_evict") is None, "nothing to do"
    assert saved(fill(core, 3, 4, 5, 6)) == []
    # The host is at its mark; 1 and 2 are next to go, and stored.
    assert saved(fill(core, 7)) == []
    assert saved(fill(core, 8)) == []
    assert saved(fill(core, 9)) == [(3, 0, 5)]
    whole(core)


def test_another_time_is_refused_when_nothing_is_stored_any_more() -> None:
    core = lazy()
    with pytest.raises(ConfigError):
        core.set_store_on("never")  # type: ignore[arg-type]
    core.degrade()
    assert core.set_store_on("publish") == PolicyRefused("degraded")
    assert core.set_store_on("host_evict") is None, "nothing to do"
