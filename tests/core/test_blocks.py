"""Blocks that the engine owns: lookup, load_into, save_from, finish."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_actors.core import Core, fetch
from hicache_actors.core.news import LoadEnd, SaveEnd
from hicache_actors.core.words import (
    Effect,
    LoadResult,
    Phase,
    Shortfall,
    StartBackup,
    StartDrain,
    StartLoad,
    StartPrefetch,
    StartWriteBack,
    StopJob,
    encode_result,
    unpack_slots,
)
from hicache_actors.errors import ConfigError, UsageError

from .kit import PAGE, Toks, answer, make, of_type, settle, whole

A = Toks(range(41))


def engine(device: int = 40, host: int = 40, fetch_from_tokens: int = 1000, **settings: Any) -> Core:
    """Nothing in these tests is worth a fetch, unless they say so."""
    return make(device, host, slots="engine", prefetch_threshold_tokens=fetch_from_tokens, **settings)


def save(core: Core, tokens: Toks, rid: str = "maker", first_page: int = 0, pages: int | None = None) -> str:
    count = len(tokens) // PAGE - first_page if pages is None else pages
    return core.save_from(tokens, rid, list(range(first_page, first_page + count)), first_page * PAGE)


def saved(core: Core, tokens: Toks) -> None:
    """The prompt is on the host and stored, and nobody holds anything."""
    save(core, tokens)
    settle(core)


def finish(core: Core) -> None:
    for rid in list(core._blocks.looks):
        core.finish(rid)
    whole(core)


def test_pages_that_were_saved_are_found_and_loaded() -> None:
    core = engine()
    save_id = save(core, A)
    (write,) = core.take_effects()
    assert isinstance(write, StartWriteBack)
    assert unpack_slots(write.source) == list(range(10))
    assert core.lookup(Toks(range(45)), "other") == 0, "what is being saved is not there yet"
    settle(core)
    assert core.lookup(A, "r") == 40
    given = core.load_into("r", [20, 21, 22], 28, after="pass")
    assert not isinstance(given, Shortfall)
    (load,) = core.take_effects()
    assert isinstance(load, StartLoad)
    assert unpack_slots(load.target) == [20, 21, 22]
    assert load.source == write.target[28:]
    assert load.events == ("pass",)
    core.apply(0, [(load.job, Phase.RUN, encode_result(3))], [])
    assert core.news.loads == (LoadEnd(given[0], ("r",), LoadResult(40)),)
    assert not core.news.ended, "a copy may still run"
    assert core.load_result(load.job) == LoadResult(40)
    core.apply(0, [], [load.job])
    assert core.news.ended == (given[0],)
    assert save_id != given[0]
    finish(core)


def test_a_save_is_named_when_it_is_agreed_and_again_when_it_has_ended() -> None:
    core = engine()
    first, second = save(core, A), save(core, Toks(range(100, 121)), "b")
    (write,) = core.take_effects()
    assert isinstance(write, StartWriteBack), "one job a section"
    core.apply(0, [(write.job, Phase.RUN, encode_result(12))], [])  # all of the first, two of the second
    assert core.news.saves == (SaveEnd(first, "maker", 10), SaveEnd(second, "b", 2, 0, "save_failed"))
    assert not core.news.ended
    core.apply(0, [], [write.job])
    assert core.news.ended == (first, second)
    assert core.lookup(Toks(range(100, 121)), "r") == 8
    finish(core)


def test_only_what_the_host_lacks_is_saved() -> None:
    core = engine()
    save(core, A, pages=4)
    longer = save(core, A, "b")  # below pages that are filling
    (write,) = core.take_effects()
    assert isinstance(write, StartWriteBack)
    assert unpack_slots(write.source) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    settle(core)
    again = save(core, A, "c")
    assert core.take_effects() == []
    assert core.needs_step, "it is named in the next step"
    core.apply(0, [], [])
    assert core.news.saves == (SaveEnd(again, "c", 0, 10),)
    assert core.news.ended == (again,)
    assert not core.needs_step
    assert longer != again
    finish(core)


def test_a_save_below_a_gap_saves_nothing() -> None:
    core = engine()
    save(core, A, pages=2)
    settle(core)
    save_id = save(core, A, first_page=5)
    assert of_type(core.take_effects(), StartWriteBack) == []
    core.apply(0, [], [])
    assert core.news.saves == (SaveEnd(save_id, "maker", 0, 0, "gap"),)
    assert core.counts["save_gap"] == 1
    whole_request = save(core, A)
    settle(core)
    assert core.lookup(A, "r") == 40
    assert whole_request != save_id
    finish(core)


def test_a_save_without_room_saves_the_first_pages() -> None:
    core = engine(host=6, storage=False)
    save_id = save(core, A)
    (write,) = core.take_effects()
    core.apply(0, [(write.job, Phase.RUN, encode_result(6))], [])  # type: ignore[union-attr]
    assert core.news.saves == (SaveEnd(save_id, "maker", 6, 0, "host_capacity"),)
    assert core.counts["save_refused_pages"] == 4
    assert core.lookup(A, "r") == 24
    none = save(core, Toks(range(500, 541)), "b")
    settle(core)
    assert core.counts["save_host_capacity"] == 1, "the lookup holds everything"
    assert none != save_id
    finish(core)


def test_a_failed_save_takes_what_was_saved_below_it_along() -> None:
    core = engine()
    save(core, A, pages=4)
    (upper,) = core.take_effects()
    below = save(core, A, "b")
    (lower,) = core.take_effects()
    core.apply(0, [(lower.job, Phase.RUN, encode_result(6))], [])  # type: ignore[union-attr]
    core.check()
    assert of_type(core.take_effects(), StartBackup) == [], "no hole is stored"
    assert core.lookup(A, "r") == 0
    core.apply(0, [(upper.job, Phase.RUN, encode_result(2))], [])  # type: ignore[union-attr]
    core.check()
    assert core.lookup(A, "r") == 8
    assert below
    finish(core)


def test_what_was_saved_below_is_stored_when_its_ancestors_are_saved() -> None:
    core = engine()
    save(core, A, pages=4)
    (upper,) = core.take_effects()
    save(core, A, "b")
    (lower,) = core.take_effects()
    core.apply(0, [(lower.job, Phase.RUN, encode_result(6))], [])  # type: ignore[union-attr]
    core.apply(0, [(upper.job, Phase.RUN, encode_result(4))], [])  # type: ignore[union-attr]
    (backup,) = of_type(core.take_effects(), StartBackup)
    assert len(unpack_slots(backup.source)) == 10
    finish(core)


def test_a_lookup_pins_until_finish() -> None:
    core = engine(host=10, storage=False)
    saved(core, A)
    assert core.lookup(A, "r") == 40
    other = Toks(range(1000, 1021))
    save(core, other, "b")
    settle(core)
    assert core.lookup(other, "s") == 0, "there was no room"
    core.finish("r")
    core.finish("r")  # idempotent
    save(core, other, "b")
    settle(core)
    assert core.lookup(other, "s") == 20
    finish(core)


def test_a_finish_with_an_event_keeps_the_pins_until_it_has_fired() -> None:
    core = engine(host=10, storage=False)
    saved(core, A)
    assert core.lookup(A, "r") == 40
    core.finish("r", "pass")
    (drain,) = of_type(core.take_effects(), StartDrain)
    assert drain.events == ("pass",)
    assert core.usage().host.evictable_pages == 0
    core.apply(0, [], [drain.job])
    assert core.usage().host.evictable_pages == 10
    whole(core)


def test_lookup_counts_from_what_the_engine_has() -> None:
    core = engine()
    saved(core, A)
    assert core.lookup(A, "r", 16) == 24
    assert core.lookup(A, "r", 40) == 0
    with pytest.raises(UsageError, match="whole pages"):
        core.lookup(A, "r", 3)
    finish(core)


def fetching(core: Core, tokens: Toks, rid: str) -> StartPrefetch:
    assert core.lookup(tokens, rid) is None
    (start,) = of_type(core.take_effects(), StartPrefetch)
    assert isinstance(start, StartPrefetch)
    return start


def test_lookup_says_none_while_a_fetch_is_under_way() -> None:
    core = engine(fetch_from_tokens=4)
    start = fetching(core, A, "r")
    assert core.lookup(A, "r") is None
    core.apply(0, [(start.job, Phase.HIT, 10)], [])
    assert core.lookup(A, "r") is None
    core.apply(0, [(start.job, Phase.RUN, encode_result(7))], [start.job])
    assert core.lookup(A, "r") == 28
    assert core.lookup(A, "r") == 28, "a request fetches once"
    assert of_type(core.take_effects(), StartPrefetch) == []
    finish(core)


def test_a_joined_fetch_is_asked_on() -> None:
    core = engine(fetch_from_tokens=4)
    start = fetching(core, Toks(range(21)), "a")
    assert core.lookup(A, "b") is None, "it joins"
    core.apply(0, [(start.job, Phase.HIT, 5)], [])
    core.apply(0, [(start.job, Phase.RUN, encode_result(5))], [])
    rest = fetching(core, A, "b")
    assert rest.path.first_page == 5
    finish(core)


def test_a_fetch_ends_when_nobody_is_left() -> None:
    core = engine(fetch_from_tokens=4)
    start = fetching(core, A, "r")
    core.finish("r")
    assert of_type(core.take_effects(), StopJob) == [StopJob(start.job)]
    whole(core)


def test_best_effort_stops_at_the_first_lookup_after_the_hit() -> None:
    core = engine(fetch_from_tokens=4, prefetch_policy="best_effort")
    start = fetching(core, A, "r")
    assert core.lookup(A, "r") is None
    assert of_type(core.take_effects(), StopJob) == []
    core.apply(0, [(start.job, Phase.HIT, 10)], [])
    assert core.lookup(A, "r") is None
    assert of_type(core.take_effects(), StopJob) == [StopJob(start.job)]
    core.apply(0, [(start.job, Phase.RUN, encode_result(2))], [])
    assert core.lookup(A, "r") == 8
    finish(core)


def test_nothing_is_fetched_that_the_engine_has() -> None:
    core = engine(fetch_from_tokens=12)
    assert core.lookup(A, "r", 32) == 0
    assert core.counts["prefetch_below_threshold"] == 1
    assert core.lookup(A, "s", 28) is None
    finish(core)


def test_the_blocks_of_a_failed_load_are_named() -> None:
    core = engine()
    saved(core, A)
    core.lookup(A, "r")
    given = core.load_into("r", list(range(10, 20)), 0)
    assert not isinstance(given, Shortfall)
    core.take_effects()
    core.apply(0, [(given[1], Phase.RUN, encode_result(4))], [])
    (end,) = core.news.failed_loads
    assert end == LoadEnd(given[0], ("r",), LoadResult(16, "load_failed"), tuple(range(14, 20)))
    assert core.lookup(A, "r") == 40, "the source was good"
    finish(core)


def test_a_bad_source_leaves_the_host_also_for_those_who_have_found_it() -> None:
    core = engine()
    saved(core, A)
    core.lookup(A, "r")
    core.lookup(A, "s")
    given = core.load_into("r", list(range(10)), 0)
    assert not isinstance(given, Shortfall)
    core.take_effects()
    core.apply(0, [(given[1], Phase.RUN, encode_result(4, sound=False))], [])
    core.check()
    assert core.load_into("s", [30], 36) == Shortfall("load_failed", 1)
    assert not isinstance(core.load_into("s", [30], 12), Shortfall)
    assert core.counts["bad_sources"] == 1
    finish(core)


def test_reset_forgets_what_was_found() -> None:
    core = engine()
    saved(core, A)
    core.lookup(A, "r")
    given = core.load_into("r", [1], 0)
    assert not isinstance(given, Shortfall)
    pending = save(core, Toks(range(700, 721)), "b")
    effects = core.take_effects()
    core.reset()
    core.check()
    assert core.load_into("r", [2], 4) == Shortfall("reset", 1)
    core.apply(0, [(effect.job, Phase.RUN, encode_result(5)) for effect in effects], [])  # type: ignore[union-attr]
    core.check()
    assert core.news.loads == (LoadEnd(given[0], ("r",), LoadResult(0, "reset"), (1,)),)
    assert core.news.saves == (SaveEnd(pending, "b", 0, 0, "reset"),)
    assert core.lookup(A, "r") == 0
    finish(core)


def test_degraded_names_everything_and_finds_nothing() -> None:
    core = engine()
    saved(core, A)
    core.lookup(A, "r")
    given = core.load_into("r", [1], 0)
    assert not isinstance(given, Shortfall)
    pending = save(core, Toks(range(700, 721)), "b")
    jobs = [effect.job for effect in core.take_effects()]  # type: ignore[union-attr]
    core.apply(0, [], [], alive=False)
    core.check()
    assert [end.result for end in core.news.loads] == [LoadResult(0, "degraded")]
    assert core.news.saves == (SaveEnd(pending, "b", 0, 0, "degraded"),)
    assert not core.news.ended, "copies may still run"
    assert core.lookup(A, "r") == 0
    assert core.load_into("r", [1], 0) == Shortfall("degraded", 1) if core._blocks.looks["r"].found_pages else True
    late = save(core, A)
    core.apply(0, [], jobs)
    assert set(core.news.ended) == {given[0], pending, late}
    finish(core)


def test_accounts_add_up() -> None:
    core = engine()
    saved(core, A)
    core.lookup(A, "r", 8)
    given = core.load_into("r", list(range(10, 18)), 8)
    assert not isinstance(given, Shortfall)
    settle(core)
    core.finish("r")
    core.lookup(Toks(range(3)), "aborted")
    core.finish("aborted")
    served = core.usage().served
    assert (served.device, served.host, served.storage, served.computed) == (8, 32, 0, 1)
    assert served.reasons == {"open_page": 1}
    assert (core.usage().served_leases, core.usage().returned_leases) == (1, 1)
    whole(core)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda core: core.load_into("nobody", [1], 0), "no lookup"),
        (lambda core: core.load_into("r", [1], 2), "start of a page"),
        (lambda core: core.load_into("r", [1] * 2, 0), "twice"),
        (lambda core: core.load_into("r", [40], 0), "blocks are 0 ... 39"),
        (lambda core: core.load_into("r", list(range(11)), 0), "lookup found 10"),
        (lambda core: core.load_into("r", [], 0), "lookup found 10"),
        (lambda core: core.save_from(A, "r", list(range(11)), 0), "10 whole ones"),
        (lambda core: core.save_from(A, "r", [-1], 0), "blocks are 0 ... 39"),
        (lambda core: core.lease(A, "r"), "owns its blocks"),
        (lambda core: core.acquire(A, "r"), "owns its blocks"),
    ],
)
def test_calls_out_of_place_change_nothing(call: Any, problem: str) -> None:
    core = engine()
    saved(core, A)
    core.lookup(A, "r")
    before = core.state_digest()
    with pytest.raises(UsageError, match=problem):
        call(core)
    assert core.state_digest() == before
    finish(core)


def test_owned_slots_have_no_use_for_these_verbs() -> None:
    core = make()
    for call in (lambda: core.lookup(A, "r"), lambda: core.save_from(A, "r", [1], 0)):
        with pytest.raises(UsageError, match='slots="engine"'):
            call()
    with pytest.raises(ConfigError, match="write_policy"):
        engine(write_policy="none")


def test_owned_slots_name_their_loads() -> None:
    core = make()
    from .kit import host_only

    host_only(core, A)
    lease = core.lease(A, "r")
    loads = core.load(lease)
    assert not isinstance(loads, Shortfall)
    effects: list[Effect] = core.take_effects()
    (start,) = of_type(effects, StartLoad)
    target = unpack_slots(start.target)
    core.apply(0, [(start.job, Phase.RUN, encode_result(4))], [])
    assert core.news.failed_loads == (
        LoadEnd(f"load-{start.job}", ("r",), LoadResult(16, "load_failed"), tuple(target[4:])),
    )
    answer(core)
    assert core.news.loads == ()
    core.release(lease)
    whole(core)


def test_a_request_that_asks_again_after_thousands_of_fetches_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_KEPT", 2)
    core = engine(fetch_from_tokens=0)
    assert core.lookup(A, "patient") is None
    for at in range(1, 4):
        assert core.lookup(Toks(range(100 * at, 100 * at + 9)), f"r{at}") is None
    settle(core)
    assert core.lookup(A, "patient") == 40
    finish(core)
