"""Rule breaks that were tried and are wrong: the same random scenario must catch each of them.

They are the negative controls of `test_random`: a kit that does not see these would not see a real one either.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache_actors.core import Core, CoreLease
from hicache_actors.core.fetch import PrefetchJob
from hicache_actors.core.jobs import Job
from hicache_actors.core.opening import OpenJob
from hicache_actors.core.words import HOST, SLOT_BYTES, Phase
from hicache_actors.ranks import RoundVector
from hicache_actors.testing.broken_rounds import MapOfToday, PackedRows
from hicache_actors.testing.twin_options import TwinOptions
from hicache_actors.testing.twins import TwinFailure, TwinRank, run_twins

SEEDS = 12


def caught(
    kinds: set[str],
    *,
    lag: int = 1,
    host_chunk_pages: int = 0,
    make_vector: Callable[[TwinRank], RoundVector] | None = None,
    attach: Callable[[TwinRank], None] | None = None,
) -> None:
    """The break is found within `SEEDS` seeds, and as what it is."""
    found: list[str] = []
    for seed in range(SEEDS):
        options = TwinOptions(seed=seed, lag=lag, host_chunk_pages=host_chunk_pages, check_every=10**9)
        try:
            run_twins(options, make_vector=make_vector, attach=attach)
        except TwinFailure as failure:
            found.append(failure.kind)
            if failure.kind in kinds:
                return
        except (AssertionError, KeyError, IndexError, ValueError) as exc:
            found.append(repr(exc))
    raise AssertionError(f"not caught as {kinds} in {SEEDS} seeds: {found}")


def reserve_in_the_pipeline(rank: TwinRank) -> None:
    """Host slots are taken when this rank's pipeline gets to it."""
    state, fetches = rank.core.state, rank.core._fetches
    grant = fetches.grant

    def grant_later(job: PrefetchJob, hit: int) -> None:
        job.phase = Phase.RUN  # or the same hit would be taken again

        def reserve() -> None:
            if job.id in state.jobs.open and job.phase is Phase.RUN:
                grant(job, hit)

        rank.world.at(rank.world.delay_ms(3), reserve)

    plant(fetches, "grant", grant_later)


def unlock_at_the_local_end(rank: TwinRank) -> None:
    """The host lock of a backup goes when this rank's store has answered."""
    state, released = rank.core.state, rank.board.released

    def unlock(job_id: int) -> None:
        job = state.jobs.open.get(job_id)
        if job is not None and job.kind == "backup":
            state.pins.unpin(job.pins)
            job.pins = []
        released(job_id)

    plant(rank.board, "released", unlock)


def unpin_at_result(rank: TwinRank) -> None:
    """A job's pins end with its RESULT."""
    state = rank.core.state
    to_limbo = state.to_limbo

    def unpin(job: Job) -> None:
        to_limbo(job)
        state.pins.unpin(job.pins)
        job.pins = []

    plant(state, "to_limbo", unpin)


def free_at_result(rank: TwinRank) -> None:
    """What a prefetch has not published is free with its RESULT."""
    state, fetches = rank.core.state, rank.core._fetches
    to_limbo = state.to_limbo

    def free(job: Job) -> None:
        to_limbo(job)
        if isinstance(job, PrefetchJob):
            state.pools[HOST].give(job.slots)
            fetches.staged_pages -= len(job.slots) // SLOT_BYTES
            job.slots = b""

    plant(state, "to_limbo", free)


def drain_only_what_is_open_here(rank: TwinRank) -> None:
    """A release looks at whether its events have fired, which is a local fact."""
    leases = rank.core._leases
    release = leases.release

    def look_first(lease: CoreLease, after: object | None) -> None:
        lease.events = [event for event in lease.events if not rank.world.has_fired(event)]
        release(lease, None if rank.world.has_fired(after) else after)

    plant(leases, "release", look_first)


def open_at_once(rank: TwinRank) -> None:
    pool = rank.core.state.pools[HOST]
    pool.open_more(pool.closed)


def open_at_the_local_end(rank: TwinRank) -> None:
    done, core = rank.board.done, rank.core

    def open_here(job: int, phase: Phase, value: int) -> None:
        opening = core.state.jobs.open.get(job)
        if isinstance(opening, OpenJob):
            opening.opening.settle(opening, opening.pages)
        done(job, phase, value)

    plant(rank.board, "done", open_here)


def plant(target: object, name: str, replacement: Callable[..., None]) -> None:
    setattr(target, name, replacement)


def test_a_pipeline_that_reserves_for_itself() -> None:
    caught({"diverged"}, attach=reserve_in_the_pipeline)


def test_the_digest_on_the_wire_finds_a_divergence_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Core, "state_digest", lambda core: 0)
    caught({"diverged"}, attach=reserve_in_the_pipeline)


def test_a_host_unlock_at_the_local_end_of_a_backup() -> None:
    caught({"diverged"}, attach=unlock_at_the_local_end)


def test_pins_dropped_at_result() -> None:
    caught({"wrong bytes"}, attach=unpin_at_result)


def test_limbo_freed_at_result() -> None:
    caught({"wrong bytes"}, attach=free_at_result)


def test_a_drain_that_depends_on_what_has_fired_here() -> None:
    caught({"diverged"}, attach=drain_only_what_is_open_here)


def test_memory_opened_before_all_ranks_have_it() -> None:
    caught({"wrong bytes"}, host_chunk_pages=12, attach=open_at_once)


def test_memory_opened_when_this_rank_has_it() -> None:
    caught({"diverged"}, host_chunk_pages=12, attach=open_at_the_local_end)


def test_released_bits_packed_into_a_mask() -> None:
    caught({"wrong bytes"}, make_vector=lambda rank: PackedRows())


def test_a_stale_hit_taken_as_a_result_at_lag_two() -> None:
    caught({"wrong bytes"}, lag=2, make_vector=lambda rank: MapOfToday(rank.core.wire))
