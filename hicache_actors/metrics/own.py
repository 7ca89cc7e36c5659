"""The metrics of this library, all from one snapshot, so the figures of one scrape fit together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from hicache_actors.metrics.table import Metric, Sample, by, counter, gauge, histogram, one, tokens_by

if TYPE_CHECKING:
    from hicache_actors.cache.snapshots import Snapshot
    from hicache_actors.tiers.storage import LaneSnapshot

_PREFETCH_REFUSALS: Final = (
    "below_threshold",
    "not_cached",
    "host_capacity",
    "stopped",
    "reset",
    "degraded",
    "no_storage",
    "disabled",
)
_BREAKER_STATES: Final = ("closed", "open", "half_open")
_STATES: Final = ("open", "degraded", "disabled", "closing", "closed")


def _tokens(at: Snapshot) -> list[Sample]:
    served = at.core.served
    return by({"device": served.device, "host": served.host, "storage": served.storage, "computed": served.computed})


def _requested(at: Snapshot) -> tuple[Sample, ...]:
    served = at.core.served
    return one(served.device + served.host + served.storage + served.computed)


def _pages(at: Snapshot) -> Iterator[Sample]:
    for name, tier in (("device", at.core.device), ("host", at.core.host)):
        yield (name, "free"), tier.free_pages
        yield (name, "owned"), tier.owned_pages
        yield (name, "limbo"), tier.limbo_pages
        yield (name, "closed"), tier.closed_pages


def _open_jobs(at: Snapshot) -> Iterator[Sample]:
    for kind_and_phase, count in at.core.jobs.items():
        kind, _, phase = kind_and_phase.partition(".")
        yield (kind, phase), count


def _refusals(at: Snapshot) -> Iterator[Sample]:
    yield ("device", "device_capacity"), at.counts.get("device_shortfalls", 0)
    for reason in _PREFETCH_REFUSALS:
        yield ("prefetch", reason), at.counts.get(f"prefetch_{reason}", 0)
    yield ("room", "deadline"), at.counts.get("rooms_late", 0)
    yield ("room", "refused"), at.counts.get("rooms_refused", 0)


def _unsaved(at: Snapshot) -> Iterator[Sample]:
    for stage, reason in (
        ("write_back", "refused"),
        ("write_back", "failed"),
        ("backup", "failed"),
        ("backup", "given_up"),
        ("save", "refused"),
    ):
        yield (stage, reason), at.counts.get(f"{stage}_{reason}_pages", 0)


def _evicted(at: Snapshot) -> list[Sample]:
    return by({tier: at.counts.get(f"evicted_{tier}_pages", 0) for tier in ("device", "host")})


def _lookups(at: Snapshot) -> list[Sample]:
    storage = at.storage
    if storage is None:
        return []
    return by({"hit": storage.lookup_hits, "miss": storage.lookups - storage.lookup_hits})


def _scrubbed(at: Snapshot) -> list[Sample]:
    storage = at.storage
    if storage is None:
        return []
    bad = storage.scrubbed_bad_objects
    return by({"good": storage.scrubbed_objects - bad, "bad": bad})


def _storage_pages(at: Snapshot) -> list[Sample]:
    storage = at.storage
    if storage is None:
        return []
    return by(
        {
            "read": storage.read_pages,
            "written": storage.written_pages,
            "present": storage.present_pages,
            "joined": storage.joined_pages,
            "corrupt": storage.corrupt_pages,
            "foreign": storage.foreign_pages,
        }
    )


def _refused_calls(at: Snapshot) -> Iterator[Sample]:
    if at.storage is not None:
        for direction, reasons in at.storage.refused.items():
            for reason, count in reasons.items():
                yield (direction, reason), count


def _lane_calls(at: Snapshot) -> Iterator[Sample]:
    for direction, lane in _lanes(at):
        yield (direction, "waiting"), lane.waiting_calls
        yield (direction, "running"), lane.running_calls
        yield (direction, "hung"), lane.hung_calls


def _lane_bytes(at: Snapshot) -> Iterator[Sample]:
    for direction, lane in _lanes(at):
        yield (direction, "waiting"), lane.waiting_bytes
        yield (direction, "in_flight"), lane.in_flight_bytes
        yield (direction, "hung"), lane.hung_bytes


def _lane_limits(at: Snapshot) -> Iterator[Sample]:
    for direction, lane in _lanes(at):
        if lane.limit_bytes is not None:
            yield (direction,), lane.limit_bytes


def _staging(at: Snapshot) -> Iterator[Sample]:
    for direction, slots in () if at.storage is None else at.storage.staging.items():
        yield (direction, "free"), slots.total_pages - slots.held_pages
        yield (direction, "held"), slots.held_pages - slots.hung_pages
        yield (direction, "hung"), slots.hung_pages


def _breakers(at: Snapshot) -> Iterator[Sample]:
    for direction, lane in _lanes(at):
        for state in _BREAKER_STATES:
            yield (direction, state), float(state == lane.breaker.state)


def _lanes(at: Snapshot) -> Iterable[tuple[str, LaneSnapshot]]:
    return () if at.storage is None else at.storage.lanes.items()


def _shadow(at: Snapshot) -> list[Sample]:
    shadow = at.shadow
    if shadow is None:
        return []
    return by({"equal": shadow.equal_pages, "different": shadow.different_pages, "unchecked": shadow.unchecked_pages})


def _queues(at: Snapshot) -> Iterator[Sample]:
    for actor in at.system.actors:
        yield (actor.name, "control"), actor.control_depth
        yield (actor.name, "data"), actor.data_depth


def _workers(at: Snapshot) -> Iterator[Sample]:
    for workers in at.workers:
        yield (workers.name, "running"), workers.running
        yield (workers.name, "queued"), workers.queued
        yield (workers.name, "lost"), workers.lost


METRICS: Final[tuple[Metric, ...]] = (
    # -- requests
    counter(
        "hicache_tokens_total",
        "Prompt tokens of requests that have ended, by where they came from; each token once.",
        _tokens,
        "source",
    ),
    counter("hicache_requested_tokens_total", "Prompt tokens of requests that have ended: all sources.", _requested),
    counter(
        "hicache_computed_tokens_total",
        "Prompt tokens that had to be computed, by the reason; adds up to source computed.",
        lambda at: by(at.core.served.reasons),
        "reason",
    ),
    counter(
        "hicache_leases_total",
        "Leases that have ended: served, or returned before anything was computed.",
        lambda at: by({"served": at.core.served_leases, "returned": at.core.returned_leases}),
        "outcome",
    ),
    gauge("hicache_leases", "Leases that are open.", lambda at: one(at.core.leases)),
    gauge("hicache_pending_acquires", "Requests that wait in acquire.", lambda at: one(at.core.pending_acquires)),
    gauge("hicache_waiting_rooms", "Requests that wait for device pages.", lambda at: one(at.core.waiting_rooms)),
    gauge(
        "hicache_reserved_pages",
        "Device pages that were granted to requests and not taken yet.",
        lambda at: one(at.core.reserved_pages),
    ),
    counter("hicache_refusals_total", "Calls that were refused, by what and why.", _refusals, "what", "reason"),
    # -- pools
    gauge("hicache_pages", "Page slots by tier and state; their sum is the pool.", _pages, "tier", "state"),
    gauge(
        "hicache_evictable_pages",
        "Owned pages that could be evicted now.",
        lambda at: by({"device": at.core.device.evictable_pages, "host": at.core.host.evictable_pages}),
        "tier",
    ),
    counter("hicache_evicted_pages_total", "Pages that were evicted.", _evicted, "tier"),
    counter(
        "hicache_dropped_pages_total",
        "Pages that left the cache without a copy on device or host.",
        lambda at: one(at.counts.get("dropped_pages", 0) + at.counts.get("dropped_subtree_pages", 0)),
    ),
    counter(
        "hicache_stored_ahead_pages_total",
        "Pages whose backup was opened because they would leave the host next.",
        lambda at: one(at.counts.get("stored_ahead_pages", 0)),
    ),
    counter(
        "hicache_evicted_unstored_pages_total",
        "Pages that left the host before the store had them.",
        lambda at: one(at.counts.get("evicted_unstored_pages", 0)),
    ),
    gauge("hicache_staged_pages", "Host pages in the hands of prefetches.", lambda at: one(at.core.staged_pages)),
    gauge("hicache_tree_nodes", "Nodes of the prefix tree.", lambda at: one(at.core.nodes)),
    gauge("hicache_tree_pages", "Distinct pages on device or host.", lambda at: one(at.core.tree_pages)),
    gauge("hicache_stored_pages", "Those of them that are stored.", lambda at: one(at.core.stored_pages)),
    gauge("hicache_dirty_pages", "Device pages that are nowhere else yet.", lambda at: one(at.core.dirty_pages)),
    # -- jobs and bytes
    gauge("hicache_open_jobs", "Jobs by kind and phase: hit, run, limbo.", _open_jobs, "kind", "phase"),
    gauge("hicache_backup_retries", "Failed backups that wait to be tried again.", lambda at: one(at.core.retries)),
    counter(
        "hicache_moved_bytes_total",
        "Bytes of KV that have moved, without headers.",
        lambda at: by({direction: flow.bytes for direction, flow in at.flows.items()}),
        "direction",
    ),
    counter(
        "hicache_moved_pages_total",
        "Pages that have moved.",
        lambda at: by({direction: flow.pages for direction, flow in at.flows.items()}),
        "direction",
    ),
    histogram(
        "hicache_job_seconds",
        "Time of a job from when it could move bytes to its result.",
        lambda at: [((direction,), flow.seconds) for direction, flow in at.flows.items()],
        "direction",
    ),
    counter(
        "hicache_unsaved_pages_total",
        "Pages that were not saved when they should have been.",
        _unsaved,
        "stage",
        "reason",
    ),
    # -- storage
    counter(
        "hicache_storage_hit_tokens_total",
        "Tokens that the storage has promised.",
        lambda at: one(at.core.fetches.hit_pages * at.page_size),
    ),
    counter(
        "hicache_storage_fetched_tokens_total",
        "Those of them that came to the host.",
        lambda at: one(at.core.fetches.fulfilled_pages * at.page_size),
    ),
    counter(
        "hicache_storage_unfulfilled_tokens_total",
        "The others, by the reason; hit = fetched + all reasons.",
        lambda at: tokens_by(at.core.fetches.unfulfilled_pages, at.page_size),
        "reason",
    ),
    counter("hicache_storage_pages_total", "Pages by what became of them at the store.", _storage_pages, "outcome"),
    counter(
        "hicache_storage_calls_total",
        "Calls to the store.",
        lambda at: [] if at.storage is None else by(at.storage.calls),
        "call",
    ),
    counter(
        "hicache_storage_errors_total",
        "Calls to the store that failed.",
        lambda at: [] if at.storage is None else by(at.storage.errors),
        "call",
    ),
    counter(
        "hicache_storage_refused_calls_total",
        "Calls to the store that were not made: hung, breaker, credits, latency, detached.",
        _refused_calls,
        "direction",
        "reason",
    ),
    gauge(
        "hicache_storage_lane_calls", "Calls to the store by direction and state.", _lane_calls, "direction", "state"
    ),
    gauge("hicache_storage_lane_bytes", "Their bytes.", _lane_bytes, "direction", "state"),
    gauge("hicache_storage_lane_limit_bytes", "Bytes that may be in flight.", _lane_limits, "direction"),
    gauge(
        "hicache_storage_staging_pages",
        "Staging slots by direction and state, if the host's layout needs any; their sum is the pool.",
        _staging,
        "direction",
        "state",
    ),
    gauge("hicache_breaker_state", "1 for the state of the breaker of a direction.", _breakers, "direction", "state"),
    counter(
        "hicache_breaker_opened_total",
        "How often the breaker of the attached store has opened.",
        lambda at: [((direction,), lane.breaker.opened) for direction, lane in _lanes(at)],
        "direction",
    ),
    gauge(
        "hicache_storage_open_calls",
        "Calls to the store that run now.",
        lambda at: () if at.storage is None else one(at.storage.open_calls),
    ),
    counter("hicache_storage_lookups_total", "Lookups that the store has answered.", _lookups, "result"),
    gauge(
        "hicache_storage_never_hits",
        "1 if the store is populated, as far as is known, and not one of many lookups has found anything.",
        lambda at: () if at.storage is None else one(int(at.storage.never_hits)),
    ),
    gauge(
        "hicache_storage_neighbour_objects",
        "Objects of the same model, seen when the store was attached, that are divided otherwise and cannot be shared.",
        lambda at: [] if at.storage is None else by(at.storage.neighbours),
        "division",
    ),
    counter(
        "hicache_storage_scrubbed_objects_total", "Objects read in the background to be verified.", _scrubbed, "verdict"
    ),
    counter(
        "hicache_storage_scrubbed_bytes_total",
        "Their bytes.",
        lambda at: () if at.storage is None else one(at.storage.scrubbed_bytes),
    ),
    # -- events of residencies
    gauge("hicache_residency_subscribers", "Listeners to events.", lambda at: one(at.events.subscribers)),
    counter(
        "hicache_residency_batches_total",
        "Batches of events: told, and lost by a subscriber that was too slow (each counts for itself).",
        lambda at: by({"told": at.events.batches, "lost": at.events.lost_batches}),
        "outcome",
    ),
    counter(
        "hicache_residency_snapshots_total",
        "Snapshots that subscribers got, to begin with or after a loss.",
        lambda at: one(at.events.snapshots),
    ),
    counter(
        "hicache_residency_restarts_total",
        "How often so much had changed at once that all subscribers were told anew.",
        lambda at: one(at.events.restarts),
    ),
    # -- inside
    counter(
        "hicache_shadow_pages_total",
        "Shadow mode: cached pages that were computed again, by what comparing them gave.",
        _shadow,
        "verdict",
    ),
    gauge(
        "hicache_state",
        "1 for the state that the cache is in.",
        lambda at: by({state: float(state == at.state) for state in _STATES}),
        "state",
    ),
    counter("hicache_copies_failed_total", "Device copies that failed.", lambda at: one(at.device.failed_copies)),
    gauge("hicache_queue_messages", "Messages that wait for an actor.", _queues, "actor", "lane"),
    counter(
        "hicache_actor_messages_total",
        "Messages that an actor has handled.",
        lambda at: by({actor.name: actor.handled for actor in at.system.actors}),
        "actor",
    ),
    counter(
        "hicache_actor_busy_seconds_total",
        "Time that an actor has spent in its handlers.",
        lambda at: by({actor.name: actor.busy_s for actor in at.system.actors}),
        "actor",
    ),
    gauge("hicache_worker_calls", "Calls in worker threads; lost: their caller has left.", _workers, "pool", "state"),
    histogram("hicache_loop_lag_seconds", "How late the event loop wakes a sleeper.", lambda at: [((), at.loop_lag)]),
    gauge("hicache_loop_lag_max_seconds", "The worst of them since open.", lambda at: one(at.loop_lag.max_s)),
    counter("hicache_events_total", "Every counter of the core, by its own name.", lambda at: by(at.counts), "event"),
)
