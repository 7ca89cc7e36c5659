"""write_through_selective, and policies that change while the cache runs."""

from __future__ import annotations

import pytest

from hicache_actors.core import Core, PolicyRefused
from hicache_actors.core.order import EVICTIONS, Eviction
from hicache_actors.core.words import DEVICE, HOST, StartBackup, StartWriteBack, encode_result, unpack_slots
from hicache_actors.errors import ConfigError, UsageError
from hicache_actors.keys.scope import Scope

from .kit import PAGE, Toks, answer, compute, make, of_type, pages_of, settle, whole, woken
from .model import residents

A = Toks(range(40))
LONGER = A.plus(range(900, 900 + 3 * PAGE))


def done(core: Core, tokens: Toks, rid: str) -> None:
    core.release(compute(core, tokens, rid))


# -- selective ----------------------------------------------------------------------------------------------------------------


def test_b056_one_request_is_one_use_however_it_commits() -> None:
    """Given a threshold of 2.  When one request runs to its end, in chunks: 0 backups.  A second with that prefix: 1."""
    core = make(write_policy="write_through_selective")
    lease = core.lease(A, "first")
    core.allocate(lease, 40)
    for upto in (12, 12, 24, 40, 40):
        core.commit(lease, upto)
        assert not of_type(settle(core), StartWriteBack)
    core.load(lease)
    core.release(lease)
    assert {node.hits for node in core.state.tree.table.values()} == {1}
    second = core.lease(LONGER, "second")
    effects = settle(core)
    assert [len(unpack_slots(start.source)) for start in of_type(effects, StartWriteBack)] == [10]
    assert len(of_type(effects, StartBackup)) == 1
    core.release(second)
    whole(core)


def test_only_the_part_that_was_used_often_enough_is_saved() -> None:
    core = make(write_policy="write_through_selective", selective_threshold=3)
    done(core, LONGER, "a")
    for rid in ("b", "c"):
        core.release(core.lease(A.plus([1]), rid))
    assert core.state.tree.match(LONGER.packed, LONGER.scope, 13)[2] == 13
    effects = settle(core)
    assert sum(len(unpack_slots(start.source)) for start in of_type(effects, StartWriteBack)) == 10
    assert len(residents(core, HOST)) == 10
    waiter, drained = core.stored(LONGER), core.drained()
    effects = core.take_effects()
    assert woken(effects, waiter) == (10 * PAGE, "policy")
    assert woken(effects, drained) == 0, "it wants nothing more saved"
    whole(core)


def test_a_twin_is_a_use_as_well() -> None:
    """Two requests compute the same pages at the same time: the second to commit has used what the first has published."""
    core = make(write_policy="write_through_selective")
    first, second = core.lease(A, "first"), core.lease(A, "second")
    for lease in (first, second):
        core.allocate(lease, 40)
    core.commit(first, 40)
    assert not of_type(settle(core), StartWriteBack)
    core.commit(second, 40)
    assert len(of_type(settle(core), StartWriteBack)) == 1
    for lease in (first, second):
        core.release(lease)
    whole(core)


def hits(core: Core) -> list[tuple[int, int]]:
    return sorted((node.end, node.hits) for node in core.state.tree.table.values())


def test_a_request_that_comes_back_is_one_user_however_often_it_does() -> None:
    """Preempted in decode, tried in vain, and again: the second user is the second request."""
    core = make(write_policy="write_through_selective", storage=False)
    lease = core.lease(A, "first")
    core.allocate(lease, 40)
    core.commit(lease, 40)
    core.release(lease)
    for used_tokens in (40, 41, 43):
        core.release(core.lease(LONGER, "first", used_tokens=used_tokens))
    waiter = core.acquire(LONGER, "first", used_tokens=40)
    lease = woken(settle(core), waiter)
    core.allocate(lease, len(LONGER) - lease.usable_tokens)
    core.commit(lease, len(LONGER))
    core.release(lease)
    assert hits(core) == [(13, 1)]
    assert not of_type(settle(core), StartWriteBack)
    second = core.lease(A.plus([1]), "second", used_tokens=0)
    assert hits(core) == [(10, 2), (13, 1)]
    assert len(of_type(settle(core), StartWriteBack)) == 1
    core.release(second)
    whole(core)


def test_pages_that_it_computes_anew_count_it_once_more() -> None:
    core = make(10, 4, write_policy="write_through_selective")
    done(core, A, "first")
    done(core, Toks(range(500, 540)), "evicts them")
    lease = core.lease(A, "first", used_tokens=40)
    assert not lease.pages
    core.allocate(lease, 40)
    core.commit(lease, 40)
    core.release(lease)
    assert hits(core) == [(10, 1)]
    whole(core)


def test_a_negative_count_of_used_tokens_is_a_wrong_call() -> None:
    core = make()
    for ask in (core.lease, core.acquire):
        with pytest.raises(UsageError, match="used_tokens = -1"):
            ask(A, "first", used_tokens=-1)
    whole(core)


def test_parts_on_either_side_of_the_threshold_are_not_joined() -> None:
    core = make(40, 4, write_policy="write_through_selective")
    done(core, Toks([7] * 16), "fills the host")
    core.release(core.lease(Toks([7] * 16).plus([1]), "twice"))
    core.take_effects()  # saved, and pinned there: nothing answers
    done(core, A, "a")
    done(core, LONGER, "b")
    core.check()
    assert sorted((node.end, node.hits) for node in core.state.tree.table.values()) == [(4, 2), (10, 2), (13, 1)]
    core.release(core.lease(LONGER.plus([1]), "c"))
    assert sorted((node.end, node.hits) for node in core.state.tree.table.values()) == [(4, 2), (13, 2)]
    whole(core)


# -- at run time: write policy ------------------------------------------------------------------------------------------------


def test_write_back_is_left_only_when_nothing_would_be_lost() -> None:
    core = make(40, 40, write_policy="write_back")
    done(core, A, "a")
    assert core.set_write_policy("write_through") == PolicyRefused("dirty_pages", 10)
    assert core.state.policies.write == "write_back"
    core.drained()
    settle(core)
    assert core.set_write_policy("write_through") is None
    core.check()
    done(core, Toks([5] * 20), "b")
    assert len(of_type(core.take_effects(), StartWriteBack)) == 1
    whole(core)


def test_write_back_is_not_left_while_host_pages_lack_their_prefix() -> None:
    core = make(40, 40, write_policy="write_back", write_back_water_mark=1.0)
    done(core, Toks(range(20)), "a")
    job = core.prefetch(A.plus([7]), "fetches")
    assert job is not None
    core.take_effects()
    answer(core, hits={job: 5}, only=lambda each: each == job)
    answer(core, only=lambda each: each == job)
    (save,) = [each.id for each in core.state.jobs.open.values() if each.kind == "write_back"]
    settle(core, {save: encode_result(0)})  # the save of what is above has failed
    assert core.state.residents.gaps == 1
    assert core.usage().dirty_pages == 0
    assert core.set_write_policy("write_through") == PolicyRefused("host_gaps")
    core.release(core.lease(A.plus([7]), "uses it"))
    core.drained()
    settle(core)
    assert core.set_write_policy("write_through") is None
    whole(core)


@pytest.mark.parametrize("before", ["write_through", "write_through_selective", "none"])
def test_write_back_may_begin_at_any_time(before: str) -> None:
    core = make(40, 40, write_policy=before)
    for n in range(4):
        done(core, Toks([n] * 9, Scope(salt=str(n))), f"r{n}")
    core.release(core.lease(Toks([0] * 9, Scope(salt="0")), "again"))
    assert core.set_write_policy("write_back") is None
    core.check()
    core.take_effects()
    settle(core)
    done(core, A, "a")
    core.take_effects()
    core.check()
    assert core.usage().dirty_pages <= 10
    assert core.set_write_policy("write_back") is None, "nothing to do"
    whole(core)


def test_an_unknown_policy_is_a_wrong_call() -> None:
    core = make()
    with pytest.raises(ConfigError, match="write_policy"):
        core.set_write_policy("write_behind")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="eviction"):
        core.set_eviction("random")  # type: ignore[arg-type]
    core.degrade()
    assert core.set_write_policy("write_back") == PolicyRefused("degraded")
    assert core.set_eviction("mru") == PolicyRefused("degraded")


# -- at run time: eviction ----------------------------------------------------------------------------------------------------


def leaves(core: Core, n: int) -> None:
    """One page each, used in order; every third twice."""
    for i in range(n):
        lease = core.lease(Toks([i, 0, 0, 0]), f"r{i}")
        core.allocate(lease, PAGE)
        core.commit(lease, PAGE)
        core.release(lease)
        if i % 3 == 0:
            core.release(core.lease(Toks([i, 0, 0, 0, 9]), f"again{i}"))


def next_victims(core: Core, pages: int) -> list[int]:
    before = residents(core, DEVICE)
    free = core.usage().device.free_pages
    lease = core.lease(Toks([]), "evicts")
    assert core.allocate(lease, (free + pages) * PAGE) is None
    gone = set(before) - set(residents(core, DEVICE))
    core.release(lease)
    core.check()
    return sorted(path[1] for path in gone)


@pytest.mark.parametrize(
    ("eviction", "victims"),
    [("lru", [0, 1, 2]), ("mru", [57, 58, 59]), ("fifo", [0, 1, 2]), ("filo", [57, 58, 59]), ("lfu", [1, 2, 4])],
)
@pytest.mark.parametrize("before", ["lru", "lfu", "filo"])
def test_another_order_holds_from_the_next_section_on(before: Eviction, eviction: Eviction, victims: list[int]) -> None:
    core = make(60, 0, write_policy="none", eviction=before)
    leaves(core, 60)
    assert core.set_eviction(eviction) is None
    core.take_effects()
    core.check()
    assert not core.state.residents.moving
    assert next_victims(core, 3) == victims
    whole(core)


def test_many_nodes_change_lists_in_slices() -> None:
    """Each section moves a few thousand; until then the rest goes first, in the old order."""
    core = make(6500, 0, write_policy="none")
    leaves(core, 6500)
    assert core.set_eviction("mru") is None
    core.check()
    assert core.state.residents.moving
    assert core.next_due_ms == core.now_ms, "the driver comes back by itself"
    assert core.set_eviction("lfu") == PolicyRefused("changing")
    assert core.set_write_policy("write_through") == PolicyRefused("changing")
    assert next_victims(core, 2) == [0, 1]
    sections = 0
    while core.state.residents.moving:
        core.apply(core.now_ms, [], [])
        core.take_effects()
        sections += 1
    core.check()
    assert 2 <= sections <= 3
    assert core.next_due_ms is None
    assert next_victims(core, 2) == [6498, 6499]
    assert core.set_eviction("lfu") is None
    core.reset()
    core.check()
    assert not core.state.residents.moving
    whole(core)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_pins_and_jobs_live_through_a_change(eviction: Eviction) -> None:
    core = make(60, 60, write_policy="write_through")
    held = [compute(core, Toks([n] * 12, Scope(salt=str(n))), f"r{n}") for n in range(4)]
    answer(core, only=lambda job: job % 2 == 0)
    assert core.set_eviction(eviction) is None
    core.check()
    core.release(held[0])
    settle(core)
    for lease in held[1:]:
        core.release(lease)
    core.check()
    assert pages_of(core.match(Toks([1] * 12, Scope(salt="1"))))[0] == 2
    whole(core)
