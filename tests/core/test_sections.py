"""apply, effects, the wire, digests; reset and degrade; what Core must not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hicache_actors.core import Core, CoreConfig, Wire
from hicache_actors.core.words import Phase, Settled, StartWriteBack, encode_result
from hicache_actors.errors import ConfigError

from .kit import PAGE, Toks, answer, clear_device, compute, host_only, make, of_type, pages_of, settle, whole

A = Toks(range(41))


def test_core_imports_neither_torch_nor_asyncio_and_reads_no_clock() -> None:
    code = (
        "import sys, hicache_actors.core; "
        "bad = {'torch', 'asyncio', 'anyio', 'threading', 'socket'} & set(sys.modules); "
        "assert not {'torch', 'asyncio', 'anyio'} & bad, bad; "
        "mods = [m for n, m in sys.modules.items() if n.startswith('hicache_actors.core')]; "
        "assert not any(hasattr(m, name) for m in mods for name in ('time', 'perf_counter', 'monotonic')), mods"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_values_of_a_phase_that_is_over_are_dropped() -> None:
    """At lag 2 a HIT comes back a second time while the job reads: it is no RESULT."""
    core = make()
    job = core.prefetch(A, "a")
    assert job is not None
    core.take_effects()
    for _ in range(2):
        core.apply(0, [(job, Phase.HIT, 10)], [])
    assert core.match(A).host == 0
    core.apply(0, [(job, Phase.RUN, encode_result(10))], [])
    digest = core.state_digest()
    core.apply(0, [(job, Phase.RUN, encode_result(3)), (job, Phase.HIT, 2), (999, Phase.RUN, 1)], [998])
    assert core.state_digest() == digest
    assert pages_of(core.match(A)) == (0, 0, 10)
    whole(core)


def test_released_before_result_is_dropped() -> None:
    core = make()
    lease = compute(core, A, "a")
    core.take_effects()
    ((job, _),) = core.wire().slots
    core.apply(0, [], [job])
    assert core.needs_step
    assert core.usage().jobs == {"write_back.run": 1}
    core.release(lease)
    whole(core)


def test_values_are_applied_in_job_order_whatever_their_own() -> None:
    def run(reverse: bool) -> int:
        core = make(30, 14)
        for n in range(3):
            core.prefetch(Toks([n] * 21), f"r{n}")
        core.take_effects()
        values = [(job, phase, 3) for job, phase in core.wire().slots]
        core.apply(5, reversed(values) if reverse else values, [])
        core.take_effects()
        return core.state_digest()

    assert run(False) == run(True)


def test_the_clock_is_monotonic() -> None:
    core = make()
    core.apply(500, [], [])
    core.apply(300, [], [])
    assert core.now_ms == 500


def test_intents_come_last_in_their_order() -> None:
    core = make()
    host_only(core, A)
    seen: list[object] = []
    core.apply(
        7, [], [], [lambda c: seen.append(c.lease(A, "a")), lambda c: seen.append((c.now_ms, len(c.state.leases)))]
    )
    assert seen[1] == (7, 1)
    core.release(core.state.leases["a"])
    whole(core)


def test_effects_are_returned_once() -> None:
    core = make()
    lease = compute(core, A, "a")
    assert of_type(core.take_effects(), StartWriteBack)
    assert core.take_effects() == []
    core.release(lease)
    whole(core)


def test_the_wire_gives_places_to_the_oldest_and_half_of_them_to_storage_jobs() -> None:
    core = make(200, 200, table_slots=8, table_rows=4)
    prefetches = [core.prefetch(Toks([n] * 13), f"p{n}") for n in range(10)]
    core.take_effects()
    assert [job for job, _ in core.wire().slots] == prefetches[:4]
    leases = []
    for n in range(6):
        leases.append(compute(core, Toks([100 + n] * 9), f"r{n}"))
        core.take_effects()
    wire = core.wire()
    assert [job for job, _ in wire.slots] == [*prefetches[:4], 11, 12, 13, 14]
    core.apply(0, [(job, phase, 0) for job, phase in wire.slots[:4]], [])
    assert [job for job, _ in core.wire().slots][:4] == prefetches[4:8], "places are free again"
    granted = core.wire().slots[:4]
    core.apply(0, [(job, phase, 3) for job, phase in granted], [])
    core.apply(0, [(job, Phase.RUN, 1) for job, _ in granted], [])
    assert core.wire().rows == tuple(prefetches[4:6])
    for lease in leases:
        core.release(lease, after="event")
        core.take_effects()
    assert len(core.wire().rows) == 4
    assert isinstance(core.wire(), Wire)
    whole(core)


def test_equal_inputs_give_equal_digests_and_others_do_not() -> None:
    def run(tokens: int) -> tuple[int, int]:
        core = make()
        lease = compute(core, Toks(range(tokens)), "a")
        settle(core)
        core.release(lease)
        return core.log_digest, core.state_digest()

    assert run(41) == run(41)
    assert run(41)[0] != run(45)[0]
    assert run(41)[1] != run(45)[1]


# -- reset and degrade ------------------------------------------------------------------------------------------------------


def test_reset_forgets_both_tiers_and_keeps_what_is_pinned_out_of_the_pools() -> None:
    core = make(60, 60)
    host_only(core, A)
    held = compute(core, Toks([7] * 20), "held")
    core.take_effects()
    pages = set(held.pages)
    core.reset()
    core.check()
    assert (core.epoch, core.match(A).host, core.usage().nodes) == (1, 0, 0)
    assert core.usage().device.limbo_pages == 5, "strays of the write-back and the lease"
    assert core.usage().host.limbo_pages == 5
    done = core.commit(held, 20)
    assert (done.published_pages, done.failed) == (0, "reset")
    other = core.lease(Toks([6]), "other")
    assert core.allocate(other, 55 * PAGE) is None
    assert not pages & set(other.pages)
    core.release(other)
    core.release(held)
    whole(core)


def test_reset_cuts_the_old_nodes_in_slices() -> None:
    core = make(9000, 0, storage=False)
    for n in range(9000 // 2):
        core.release(compute_unchecked(core, Toks([n] * 9), f"r{n}"))
    nodes = core.usage().nodes
    assert nodes > 4000
    core.reset()
    assert core.usage().device.free_pages == 9000, "the slots are back at once"
    slices = 0
    while core.next_due_ms is not None:
        core.apply(core.next_due_ms, [], [])
        core.take_effects()
        slices += 1
    assert 1 <= slices <= nodes // 2048 + 2
    whole(core)


def compute_unchecked(core: Core, tokens: Toks, rid: str):  # type: ignore[no-untyped-def]
    lease = core.lease(tokens, rid)
    core.allocate(lease, 8)
    core.commit(lease, 8)
    return lease


def test_degrade_keeps_lengths_and_ends_jobs() -> None:
    core = make(80, 80)
    host_only(core, A)
    done = compute(core, Toks([5] * 21), "done")
    settle(core)
    reader = core.lease(A, "reader")
    core.load(reader)
    hit = core.prefetch(Toks([6] * 21), "hit")
    run = core.prefetch(Toks([7] * 21), "run")
    assert run is not None
    core.take_effects()
    core.apply(0, [(run, Phase.HIT, 5)], [])
    core.take_effects()
    core.apply(0, [], [], alive=False)
    core.check()
    effects = core.take_effects()
    assert Settled(hit, 0, "degraded") in effects  # type: ignore[arg-type]
    assert Settled(run, 0, "degraded") in effects
    assert (done.failed, done.usable_tokens, len(done.pages)) == ("degraded", 0, 6)
    assert reader.failed == "load_failed", "half of its prefix may be written"
    assert (core.load_result(reader.loads[0]) or effects[0]).failed == "degraded"  # type: ignore[union-attr]
    assert core.usage().jobs == {"load.limbo": 1, "prefetch.limbo": 1}
    assert core.match(A).host == 0
    assert core.prefetch(A, "late") is None
    late = core.lease(A, "late")
    assert core.allocate(late, 20) is None
    assert core.commit(late, 20).failed == "degraded"
    assert core.match(A).host == 0
    for lease in (done, reader, late):
        core.release(lease)
    core.degrade()
    assert not core.needs_step or settle(core)
    assert not core.needs_step
    whole(core)


def test_a_value_after_degrade_changes_nothing() -> None:
    core = make()
    lease = compute(core, A, "a")
    core.take_effects()
    ((job, phase),) = core.wire().slots
    core.apply(0, [(job, phase, encode_result(10))], [], alive=False)
    core.check()
    assert core.match(A).host == 0
    assert core.usage().jobs == {"write_back.limbo": 1}
    answer(core)
    core.release(lease)
    whole(core)


def test_a_refilled_cache_works_after_a_reset() -> None:
    core = make()
    host_only(core, A)
    core.reset()
    core.take_effects()
    host_only(core, A)
    assert pages_of(core.match(A)) == (0, 0, 10)
    clear_device(core)
    whole(core)


# -- settings ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_size": 0},
        {"device_pages": 0},
        {"host_pages": -1},
        {"device_pages": 2.5},
        {"write_policy": "write_behind"},
        {"selective_threshold": 0},
        {"slru_protected_hits": 0},
        {"write_back_water_mark": 1.5},
        {"write_back_dirty_cap": True},
        {"eviction": "random"},
        {"prefetch_policy": "never"},
        {"retry_delays_s": (0,)},
        {"table_slots": 1},
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused(wrong: dict[str, object]) -> None:
    settings = {"page_size": 4, "device_pages": 8, "host_pages": 8} | wrong
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CoreConfig(**settings)  # type: ignore[arg-type]
