"""Other weights: what is forgotten, and that no storage job gets a page of one model under the name of another."""

from __future__ import annotations

from hicache_actors.core import Core
from hicache_actors.core.words import Phase, StartBackup, StartPrefetch, UseWeights, encode_result

from .kit import PAGE, Toks, answer, cached, compute, host_only, make, of_type, settle, whole, woken


def prompt(pages: int, family: int = 0) -> Toks:
    return Toks(range(1000 * family, 1000 * family + pages * PAGE + 1))


def test_both_tiers_are_dropped_and_nothing_counts_as_stored() -> None:
    core = make()
    cached(core, prompt(3))
    host_only(core, prompt(5, family=1))
    core.advance_epoch("v2")
    core.check()
    assert core.take_effects()[-1] == UseWeights("v2")
    usage = core.usage()
    assert (usage.stored_pages, usage.device.owned_pages, usage.host.owned_pages) == (0, 0, 0)
    match = core.match(prompt(5, family=1))
    assert (match.device, match.host, match.storage_hint) == (0, 0, 0)
    cached(core, prompt(3))
    assert core.usage().stored_pages == 3
    whole(core)


def test_what_the_section_wanted_saved_before_has_its_old_name() -> None:
    """The order of effects is the order of names: the backup must start before the names change."""
    core = make()
    lease = compute(core, prompt(3), "maker")
    core.take_effects()
    answer_write_back(core)  # the write-back is agreed, so this section wants its pages stored
    core.advance_epoch("v2")
    effects = core.take_effects()
    kinds = [type(effect) for effect in effects if isinstance(effect, StartBackup | UseWeights)]
    assert kinds == [StartBackup, UseWeights]
    core.release(lease)
    settle(core)
    assert core.usage().stored_pages == 0, "it is stored under a name that nobody asks for any more"
    whole(core)


def answer_write_back(core: Core) -> None:
    wire = core.wire()
    values = [(job, phase, encode_result(3)) for job, phase in wire.slots]
    core.apply(core.now_ms, values, [job for job, _, _ in values])


def test_what_is_on_its_way_from_the_store_is_not_published() -> None:
    core = make()
    hit = core.prefetch(prompt(4), "a")
    running = core.prefetch(prompt(4, family=1), "b")
    assert hit is not None
    assert running is not None
    effects = core.take_effects()
    assert [effect.job for effect in of_type(effects, StartPrefetch)] == [hit, running]
    core.apply(0, [(running, Phase.HIT, 4)], [])
    core.take_effects()
    core.advance_epoch("v2")
    core.take_effects()
    core.apply(0, [(hit, Phase.HIT, 4), (running, Phase.RUN, encode_result(4))], [])
    core.check()
    assert core.prefetch_reason(hit) == core.prefetch_reason(running) == "reset"
    assert core.match(prompt(4, family=1)).host == 0
    settle(core)
    whole(core)


def test_retries_of_old_pages_are_given_up() -> None:
    core = make(retry_delays_s=(1.0,))
    lease = compute(core, prompt(3), "maker")
    answer(core)
    answer(core, results={job: encode_result(0) for job in core.state.jobs.open})
    assert core.usage().retries == 1
    core.advance_epoch("v2")
    assert core.usage().retries == 0
    core.apply(5000, [], [])
    assert not of_type(core.take_effects(), StartBackup)
    core.release(lease)
    settle(core)
    whole(core)


def test_who_waits_for_old_pages_to_be_stored_is_told() -> None:
    core = make()
    lease = compute(core, prompt(3), "maker")
    waiter = core.stored(prompt(3))
    core.advance_epoch("v2")
    assert woken(core.take_effects(), waiter) == (0, "not_committed")
    core.release(lease)
    settle(core)
    whole(core)


def test_equal_updates_leave_equal_digests_and_others_do_not() -> None:
    one, same, other = make(), make(), make()
    for core, weights in ((one, "v2"), (same, "v2"), (other, "v3")):
        cached(core, prompt(2))
        core.advance_epoch(weights)
    assert one.log_digest == same.log_digest != other.log_digest
    assert one.state_digest() == same.state_digest()


def test_blocks_of_the_engine_are_found_no_more_and_saved_anew() -> None:
    core = make(slots="engine", prefetch_threshold_tokens=1000)
    core.save_from(prompt(4), "maker", range(4), 0)
    settle(core)
    assert core.lookup(prompt(4), "before") == 4 * PAGE
    core.advance_epoch("v2")
    core.check()
    assert core.lookup(prompt(4), "after") == 0
    core.save_from(prompt(4), "maker", range(4), 0)
    settle(core)
    assert core.lookup(prompt(4), "again") == 4 * PAGE
    assert core.usage().stored_pages == 4
    for rid in ("before", "after", "again"):
        core.finish(rid)
    settle(core)
    whole(core)
