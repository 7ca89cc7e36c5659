"""write_back: nothing is saved because it was computed; what is dirty is protected, bounded, and saved in the order of eviction."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_actors.core import Core, CoreLease
from hicache_actors.core.words import (
    HOST,
    Shortfall,
    StartBackup,
    StartWriteBack,
    encode_result,
    unpack_slots,
)

from .kit import PAGE, Toks, answer, clear_device, compute, make, of_type, pages_of, settle, whole, woken
from .model import residents


def run(n: int, pages: int = 10) -> Toks:
    """A prompt of its own, of whole pages and no more."""
    return Toks(range(n << 20, (n << 20) + pages * PAGE))


def found(core: Core, n: int, pages: int = 10) -> tuple[int, int, int]:
    return pages_of(core.match(run(n, pages).plus([7])))


def lazy(device: int = 40, host: int = 40, **settings: Any) -> Core:
    """write_back that saves nothing ahead, however much is dirty."""
    settings = {"write_back_water_mark": 1.0, "write_back_dirty_cap": 1.0} | settings
    return make(device, host, write_policy="write_back", **settings)


def done(core: Core, tokens: Toks, rid: str) -> None:
    core.release(compute(core, tokens, rid))


def need(core: Core, pages: int, rid: str = "needs room") -> tuple[CoreLease, Shortfall | None]:
    lease = core.lease(Toks([9] * (pages * PAGE)), rid)
    refused = core.allocate(lease, pages * PAGE)
    core.check()
    return lease, refused


def host_only(core: Core, tokens: Toks) -> None:
    """Saved, and evicted from the device with all that is clean there."""
    done(core, tokens, "maker")
    waiter = core.stored(tokens)
    assert woken(settle(core), waiter)[1] is None
    clear_device(core)


# -- ahead of demand ----------------------------------------------------------------------------------------------------------


def test_nothing_is_saved_at_commit_below_cap_and_mark() -> None:
    core = make(40, 40, write_policy="write_back")
    done(core, run(1), "a")
    assert core.take_effects() == []
    assert core.usage().dirty_pages == 10, "a quarter of 40"
    assert not core.needs_step
    done(core, run(1), "b")
    assert core.take_effects() == [], "nor at a lease"
    whole(core)


def test_dirty_pages_stay_under_their_cap() -> None:
    core = make(200, 200, write_policy="write_back", write_back_water_mark=1.0)
    for n in range(16):
        done(core, run(n), f"r{n}")
        effects = core.take_effects()
        core.check()
        assert core.usage().dirty_pages <= 50
        assert bool(of_type(effects, StartWriteBack)) == (n >= 5)
    settle(core)
    assert core.usage().dirty_pages == 50
    assert [found(core, n)[2] for n in range(16)] == [10] * 16
    assert core.usage().stored_pages == len(residents(core, HOST)) == 110
    whole(core)


def test_saving_runs_ahead_above_the_water_mark_in_the_order_of_eviction() -> None:
    core = lazy(40, 40, write_back_water_mark=0.75)
    for n in (1, 2, 3):
        done(core, run(n), f"r{n}")
        assert core.take_effects() == [], "ten of forty are free"
    core.release(core.lease(run(1).plus([7]), "uses 1 again"))
    core.take_effects()
    done(core, run(4, 2), "r4")
    (start,) = of_type(core.take_effects(), StartWriteBack)
    assert len(unpack_slots(start.source)) == 10, "one run, to the end of its node"
    settle(core)
    assert {path[1] >> 20 for path in residents(core, HOST)} == {2}, "what would go next"
    before = core.usage().device
    assert (before.free_pages, before.evictable_pages) == (8, 10)
    whole(core)


def test_the_dirty_prefix_is_saved_with_what_hangs_on_it() -> None:
    """Roots first, in one run: no page lands on the host without its prefix."""
    core = lazy(40, 40, write_back_dirty_cap=0.25)
    base = run(1, 6)
    done(core, base, "base")
    core.take_effects()
    done(core, base.plus(range(900, 900 + 5 * PAGE)), "longer")
    (start,) = of_type(core.take_effects(), StartWriteBack)
    assert len(unpack_slots(start.source)) == 11
    settle(core)
    assert core.state.residents.gaps == 0
    whole(core)


def test_leased_pages_are_saved_too_if_the_cap_asks_for_it_and_after_their_event() -> None:
    core = lazy(40, 40, write_back_dirty_cap=0.0)
    lease = compute(core, run(1), "a", after="forward")
    (start,) = of_type(core.take_effects(), StartWriteBack)
    assert start.events == ("forward",)
    settle(core)
    assert core.usage().dirty_pages == 0
    core.release(lease)
    whole(core)


def test_events_that_have_fired_are_not_kept_for_a_later_save() -> None:
    core = lazy()
    core.release(compute(core, run(1), "a", after="forward"))
    (node,) = core.state.tree.table.values()
    assert len(node.events) == 1
    settle(core)  # the drain: it has fired everywhere
    assert not node.events
    _, refused = need(core, 40)
    assert isinstance(refused, Shortfall)
    (start,) = of_type(core.take_effects(), StartWriteBack)
    assert start.events == ()
    core.release(core.state.leases["needs room"])
    whole(core)


# -- demand -------------------------------------------------------------------------------------------------------------------


def test_eviction_skips_dirty_victims() -> None:
    core = lazy(40, 60)
    host_only(core, run(1))
    done(core, run(2), "old and dirty")
    lease = core.lease(run(1).plus([7]), "loads")
    core.load(lease)
    settle(core)
    core.release(lease)
    assert found(core, 1) == (10, 10, 10)
    assert core.usage().device.evictable_pages == 10, "of twenty unlocked"
    _, refused = need(core, 25)
    assert refused is None
    assert (found(core, 1), found(core, 2)) == ((0, 0, 10), (10, 10, 10)), "the newer, clean one went"
    assert not of_type(core.take_effects(), StartWriteBack)
    core.release(core.state.leases["needs room"])
    whole(core)


def test_if_only_dirty_victims_are_left_their_saving_is_asked_for_and_frees_them() -> None:
    core = lazy()
    for n in range(4):
        done(core, run(n), f"r{n}")
    core.take_effects()
    before = core.usage().device
    lease, refused = need(core, 12)
    assert isinstance(refused, Shortfall)
    assert (refused.missing_pages, refused.freeing_pages) == (12, 20), "two runs of ten"
    assert core.usage().device.free_pages == before.free_pages == 0
    assert [found(core, n) for n in range(4)] == [(10, 10, 10)] * 4, "nothing has been evicted"
    (start,) = of_type(core.take_effects(), StartWriteBack)
    assert len(unpack_slots(start.source)) == 20
    assert isinstance(core.allocate(lease, 12 * PAGE), Shortfall)
    assert not of_type(core.take_effects(), StartWriteBack), "enough is on its way"
    settle(core)
    assert core.allocate(lease, 12 * PAGE) is None
    assert [found(core, n) for n in range(4)] == [(0, 0, 10), (0, 0, 10), (10, 10, 10), (10, 10, 10)]
    core.release(lease)
    whole(core)


def test_a_clean_page_above_a_dirty_one_does_not_count_as_evictable() -> None:
    core = lazy(20, 40)
    host_only(core, run(1, 5))
    lease = core.lease(run(1, 10), "longer")
    core.load(lease)
    settle(core)
    assert lease.usable_tokens == 5 * PAGE
    core.allocate(lease, 5 * PAGE)
    core.commit(lease, 10 * PAGE)
    core.release(lease)
    core.check()
    usage = core.usage()
    assert (usage.device.evictable_pages, usage.device.free_pages, usage.dirty_pages) == (0, 10, 5)
    other, refused = need(core, 11)
    assert isinstance(refused, Shortfall)
    assert refused.missing_pages == 1
    settle(core)
    assert core.usage().device.evictable_pages == 10
    assert core.allocate(other, 11 * PAGE) is None
    core.release(other)
    whole(core)


def test_dirty_pages_fail_no_request_when_the_host_cannot_take_them() -> None:
    """All host pages are pinned, nothing is on its way: what cannot be saved goes, counted."""
    core = lazy(20, 10)
    done(core, run(1), "a")
    waiter = core.stored(run(1))
    answer(core)  # written back; its backup pins the host and does not end
    assert core.usage().host.evictable_pages == 0
    done(core, run(2), "b")
    lease, refused = need(core, 20)
    while isinstance(refused, Shortfall) and refused.freeing_pages:
        answer(core, only=lambda job: core.state.jobs.open[job].kind != "backup")
        refused = core.allocate(lease, 20 * PAGE)
    assert refused is None
    assert core.counts["dropped_dirty_pages"] == 10
    assert found(core, 2) == (0, 0, 0), "a miss, not listed on the host"
    assert found(core, 1) == (0, 0, 10)
    core.release(lease)
    settle(core)
    core.cancel_waiter(waiter)
    whole(core)


def test_pages_whose_saving_failed_may_go_until_they_are_used_again() -> None:
    core = lazy(20, 40)
    done(core, run(1), "a")
    lease, refused = need(core, 20)
    assert isinstance(refused, Shortfall)
    core.take_effects()
    (job,) = core.state.jobs.open
    answer(core, {job: encode_result(4)})
    settle(core)
    usage = core.usage()
    assert (usage.dirty_pages, usage.device.evictable_pages) == (0, 10)
    again = core.lease(run(1).plus([7]), "uses it")
    core.release(again)
    core.check()
    assert (core.usage().dirty_pages, core.usage().device.evictable_pages) == (6, 0)
    assert isinstance(core.allocate(lease, 20 * PAGE), Shortfall)
    settle(core)
    assert core.allocate(lease, 20 * PAGE) is None
    assert found(core, 1) == (0, 0, 10)
    core.release(lease)
    whole(core)


def test_without_a_host_nothing_is_protected() -> None:
    core = lazy(20, 0)
    done(core, run(1), "a")
    lease, refused = need(core, 20)
    assert refused is None
    assert core.counts["dropped_pages"] == 10
    core.release(lease)
    whole(core)


# -- the host -----------------------------------------------------------------------------------------------------------------


def fetch(core: Core, tokens: Toks, pages: int) -> None:
    job = core.prefetch(tokens, "fetches")
    assert job is not None
    answer(core, hits={job: pages})


def both_tiers(core: Core, n: int) -> None:
    """`run(n)` is on both tiers, unlocked."""
    lease = core.lease(run(n).plus([7]), "loads")
    core.load(lease)
    settle(core)
    core.release(lease)


def test_host_pressure_takes_duplicates_first() -> None:
    """A fetch finds room in what the device has too, though pages on the host alone are older."""
    core = lazy(40, 20)
    for n in (1, 2):
        host_only(core, run(n))
    both_tiers(core, 2)
    assert (found(core, 1), found(core, 2)) == ((0, 0, 10), (10, 10, 10))
    fetch(core, run(3, 8).plus([7]), 8)
    settle(core)
    assert core.counts["reclaimed_host_pages"] == 10
    assert (found(core, 1), found(core, 2), found(core, 3, 8)) == ((0, 0, 10), (10, 10, 10), (0, 0, 8))
    assert core.usage().dirty_pages == 10, "it is on the device alone again, and will be saved before it goes"
    whole(core)


def test_duplicates_are_spared_beyond_the_dirty_cap_while_there_is_anything_else() -> None:
    core = lazy(40, 20, write_back_dirty_cap=0.1)
    for n in (1, 2):
        host_only(core, run(n))
    both_tiers(core, 2)
    fetch(core, run(3, 8).plus([7]), 8)
    settle(core)
    assert (found(core, 1), found(core, 2), found(core, 3, 8)) == ((0, 0, 0), (10, 10, 10), (0, 0, 8))
    assert core.counts.get("reclaimed_host_pages", 0) == core.usage().dirty_pages == 0
    whole(core)


def test_saving_gives_up_only_duplicates_that_are_leased() -> None:
    """Else the clean page and the dirty one would change places, and nothing be won."""
    core = lazy(30, 10)
    host_only(core, run(1))
    both_tiers(core, 1)
    done(core, run(2), "dirty")
    held = core.lease(run(3), "held")
    assert core.allocate(held, 10 * PAGE) is None
    lease, refused = need(core, 5)
    assert refused is None, "the clean one went"
    assert (found(core, 1), found(core, 2)) == ((0, 0, 10), (10, 10, 10))
    core.release(lease)
    both_tiers(core, 1)
    leased = core.lease(run(1).plus([7]), "leased")
    lease, refused = need(core, 15, "more")
    assert isinstance(refused, Shortfall)
    core.take_effects()
    assert core.counts.get("reclaimed_host_pages", 0) == 10, "in use: it does not leave the device now"
    settle(core)
    assert found(core, 2)[2] == 10
    for each in (held, leased, lease):
        core.release(each)
    whole(core)


# -- waiting ------------------------------------------------------------------------------------------------------------------


def test_drained_saves_everything_and_then_answers() -> None:
    core = lazy(100, 100)
    for n in range(8):
        done(core, run(n), f"r{n}")
    assert core.take_effects() == []
    waiter = core.drained()
    effects = core.take_effects()
    (start,) = of_type(effects, StartWriteBack)
    assert len(unpack_slots(start.source)) == 80
    effects = settle(core)
    assert woken(effects, waiter) == 0
    assert len(of_type(effects, StartBackup)) == 1
    assert core.usage().stored_pages == 80
    whole(core)


def test_drained_on_a_host_smaller_than_what_is_dirty_saves_it_in_turns() -> None:
    core = lazy(80, 20)
    for n in range(8):
        done(core, run(n), f"r{n}")
    waiter = core.drained()
    effects = settle(core)
    assert woken(effects, waiter) == 0
    assert core.usage().stored_pages == 80
    whole(core)


def test_drained_says_what_could_not_be_saved() -> None:
    core = lazy(40, 40)
    done(core, run(1), "a")
    waiter = core.drained()
    core.take_effects()
    (job,) = core.state.jobs.open
    effects = answer(core, {job: encode_result(3)})
    effects += settle(core)
    assert woken(effects, waiter) == 7
    whole(core)


def test_stored_saves_the_prompt_now() -> None:
    core = lazy(40, 40)
    done(core, run(1), "a")
    done(core, run(2), "b")
    waiter = core.stored(run(1))
    effects = settle(core)
    assert woken(effects, waiter) == (10 * PAGE, None)
    assert (core.usage().dirty_pages, core.usage().stored_pages) == (10, 10)
    whole(core)


@pytest.mark.parametrize("cap", [0.0, 0.25, 1.0])
def test_what_is_fetched_below_dirty_pages_has_them_saved(cap: float) -> None:
    core = lazy(40, 40, write_back_dirty_cap=cap)
    done(core, run(1, 4), "a")
    fetch(core, run(1, 8).plus([7]), 4)
    settle(core)
    assert core.state.residents.gaps == 0
    lease, refused = need(core, 40)
    while isinstance(refused, Shortfall):
        settle(core)
        refused = core.allocate(lease, 40 * PAGE)
    assert found(core, 1, 8) == (0, 0, 8)
    core.release(lease)
    whole(core)
