"""Prefetch: pages of the storage become host-only nodes.

Asked for the run that no tier holds; HIT is what the storage has on every rank, the grant what the host has room for (at most half
of its slots are in prefetches, hung reads included), RESULT what has arrived everywhere.  The anchor's host part is pinned until
RESULT, nothing on the device; if the anchor is gone by then, nothing is published.
"""

from __future__ import annotations

import msgspec

from hicache_actors.core.evictions import Cause
from hicache_actors.core.jobs import Job
from hicache_actors.core.node import STORED, Node
from hicache_actors.core.state import Note, State
from hicache_actors.core.words import (
    ABSENT,
    DEVICE,
    HOST,
    READY,
    SLOT_BYTES,
    Grant,
    Path,
    Phase,
    Settled,
    Slots,
    StartPrefetch,
    StopJob,
    Tokens,
)

_KEPT = 4096  # outcomes of ended prefetches that can still be asked for


class Fetched(msgspec.Struct, frozen=True):
    """What a prefetch has brought: pages [first_page, first_page + pages), and why not all that was asked.

    ``ended``: how many prefetches had given their slots back by then.
    """

    first_page: int
    pages: int
    reason: str | None = None
    ended: int = 0


_FORGOTTEN = Fetched(0, 0)


class PrefetchJob(Job):
    """``rids`` are those who still want the rest; ``followers`` those who get the account, stopped or not.

    Its slots are the grant; after RESULT, what was not published.
    """

    kind = "prefetch"
    place = HOST
    storage = True

    def __init__(self, fetches: Fetches, tokens: Tokens, start: int, stop: int) -> None:
        super().__init__(Phase.HIT, fetches.state.epoch)
        self.fetches, self.start, self.stop = fetches, start, stop
        self.storage_epoch = fetches.state.storage_epoch
        self.tokens = tokens
        self.key = tokens.packed[: stop * fetches.state.tree.page_bytes]
        self.rids: dict[str, None] = {}
        self.followers: dict[str, None] = {}
        self.hit = 0  # pages, agreed
        self.granted = 0  # pages of it that got a slot
        self.short: str | None = None  # why the grant is shorter than the hit

    def on_hit(self, pages: int) -> None:
        self.fetches.grant(self, pages)

    def on_result(self, pages: int, sound: bool) -> None:
        self.fetches.publish(self, pages)

    def on_released(self) -> None:
        self.fetches.staged_pages -= len(self.slots) // SLOT_BYTES

    def on_degrade(self) -> None:
        self.fetches.settle(self, 0, "degraded")


class Fetches:
    """All prefetches.  ``staged_pages``: host pages in their hands, limbo included; ``ended``: how many have had a RESULT."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.staged_pages = 0
        self.ended = 0
        self._outcomes: dict[int, Fetched] = {}
        self._jobs: dict[str, dict[int, None]] = {}  # rid -> jobs it wants
        self._fetched: dict[str, Fetched] = {}  # rid -> for the account of its next lease

    # -- opening and stopping -----------------------------------------------------------------------------------------------

    def open(self, tokens: Tokens, rid: str, deadline_s: float | None, priority: int) -> int | None:
        """Open a prefetch, or join the one that fetches the first missing page -> job; None (counted) if there is nothing to do."""
        state = self.state
        if state.degraded or not state.storage:
            self._declined(rid, 0, "degraded" if state.degraded else state.config.no_storage_reason)
            return None
        stop = state.pages_asked(tokens)
        tail, page = self._reached(tokens, stop)
        if page >= stop:
            return None
        job = self._fetching(tokens, page)
        if job is None:
            if stop - page < state.config.threshold_pages:
                self._declined(rid, page, "below_threshold")
                return None
            job = PrefetchJob(self, tokens, page, stop)
            state.jobs.add(job)
            top = tail
            while top.end and top.at[HOST].state == READY:
                top = top.parent
            if top.end < tail.end:
                job.pins = [state.pins.pin(HOST, tail, top.end)]
            path = Path(tokens.scope, job.key, page, stop - page, tokens)
            state.effects.append(StartPrefetch(job.id, rid, path, deadline_s, priority))
            state.count("prefetches")
        else:
            state.count("prefetches_joined")
        job.rids[rid] = job.followers[rid] = None
        self._jobs.setdefault(rid, {})[job.id] = None
        state.note(Note.PREFETCH, job.id, page, state.text(rid))
        return job.id

    def missing_pages(self, tokens: Tokens) -> int:
        """Pages of the prompt that no tier holds."""
        stop = self.state.pages_asked(tokens)
        return stop - self._reached(tokens, stop)[1]

    def _reached(self, tokens: Tokens, stop: int) -> tuple[Node, int]:
        """-> (deepest node on the way that is on some tier, page where the prompt leaves it)."""
        tree, key = self.state.tree, tokens.packed
        node, page = tree.root(tokens.scope), 0
        while page < stop:
            child = tree.child(node, key, page)
            if child is None or not (child.at[DEVICE].state or child.at[HOST].state == READY):
                break
            node, page = child, tree.shared(child, key, page, stop)
            if page < child.end:
                break
        return node, page

    def _fetching(self, tokens: Tokens, page: int) -> PrefetchJob | None:
        """The open prefetch that fetches this page of this prompt, if somebody still wants it."""
        stop = (page + 1) * self.state.tree.page_bytes
        begin = bytes(tokens.packed[:stop])
        for job in self.state.jobs.open.values():
            if (
                isinstance(job, PrefetchJob)
                and job.phase is not Phase.LIMBO
                and job.rids
                and job.start <= page < job.stop
                and job.epoch == self.state.epoch
                and job.tokens.scope == tokens.scope
                and begin.startswith(job.key[:stop])
            ):
                return job
        return None

    def _declined(self, rid: str, page: int, reason: str) -> None:
        self.state.count(f"prefetch_{reason}")
        self._keep(rid, Fetched(page, 0, reason))

    def stop(self, job_id: int, rid: str) -> None:
        """``rid`` does not want the rest any more; the job stops when nobody does."""
        job = self.state.jobs.open.get(job_id)
        if not isinstance(job, PrefetchJob) or rid not in job.rids:
            return
        del job.rids[rid]
        self._unfollow(job_id, rid)
        self.state.note(Note.STOP, job_id, len(job.rids))
        if not job.rids and job.phase is not Phase.LIMBO:
            self.state.effects.append(StopJob(job_id))

    def leave(self, job_id: int, rid: str) -> None:
        """`stop`, and ``rid`` does not want the account either: its request has been cancelled."""
        self.stop(job_id, rid)
        job = self.state.jobs.open.get(job_id)
        if isinstance(job, PrefetchJob):
            job.followers.pop(rid, None)

    def _unfollow(self, job_id: int, rid: str) -> None:
        jobs = self._jobs.get(rid)
        if jobs is not None:
            jobs.pop(job_id, None)
            if not jobs:
                del self._jobs[rid]

    def on_lease(self, rid: str) -> None:
        """``best_effort``: a request that is admitted has waited long enough."""
        if self.state.config.prefetch_policy == "best_effort":
            for job_id in list(self._jobs.get(rid, ())):
                self.stop(job_id, rid)

    # -- the job's three ends -----------------------------------------------------------------------------------------------

    def grant(self, job: PrefetchJob, hit: int) -> None:
        """HIT: reserve host slots for it, or for a part, or decline."""
        state = self.state
        least = state.config.threshold_pages
        hit = job.hit = min(hit, job.stop - job.start)
        if job.epoch == state.epoch and job.storage_epoch == state.storage_epoch and hit > 0:
            node, page = self._reached(job.tokens, job.start)
            if page == job.start == node.end:
                state.tree.hint(node, job.key, page, job.start + hit)
        pages = min(hit, self._budget_pages)
        if not job.rids:
            return self._decline(job, "stopped")
        if job.epoch != state.epoch:
            return self._decline(job, "reset")
        if hit < least:
            return self._decline(job, "below_threshold" if hit else "not_cached")
        state.cause = Cause("fetch", next(iter(job.rids)))
        if pages >= least and not state.evictor.host_room(pages):
            pages = state.pools[HOST].free
        if pages < least:
            return self._decline(job, "host_capacity")
        job.slots, job.granted = state.pools[HOST].take(pages), pages
        self.staged_pages += pages
        job.phase = Phase.RUN
        job.short = "host_capacity" if pages < hit else None
        state.effects.append(Grant(job.id, job.slots))

    @property
    def _budget_pages(self) -> int:
        return self.state.pools[HOST].opened // 2 - self.staged_pages

    def room(self) -> tuple[bool, bool]:
        """-> (whether there is budget that no open prefetch is about to ask for, whether one is open that may give some back)."""
        under_way = [
            job
            for job in self.state.jobs.open.values()
            if isinstance(job, PrefetchJob) and job.phase is not Phase.LIMBO
        ]
        asked = sum(job.stop - job.start for job in under_way if job.phase is Phase.HIT)
        return self._budget_pages > asked, bool(under_way)

    def _decline(self, job: PrefetchJob, reason: str) -> None:
        self.state.count(f"prefetch_{reason}")
        self.settle(job, 0, reason)
        self.state.effects.append(Settled(job.id, 0, reason))
        self.state.close(job)

    def publish(self, job: PrefetchJob, arrived: int) -> None:
        """RESULT: what has arrived everywhere becomes host-only nodes; the other slots stay the job's until RELEASED."""
        state = self.state
        granted = len(job.slots) // SLOT_BYTES
        pages = min(arrived, granted)
        reason = job.short if pages == granted else "fetch_incomplete"
        if job.epoch != state.epoch:
            pages, reason = 0, "reset"
        elif pages and not self._anchored(job):
            pages, reason = 0, "anchor_lost"
            state.count("prefetch_anchor_lost")
        left = self._insert(job, pages) if pages else []
        left.append(job.slots[pages * SLOT_BYTES :])
        job.slots = b"".join(left)
        self.staged_pages -= granted - len(job.slots) // SLOT_BYTES
        self.ended += 1
        state.count("prefetched_pages", pages)
        self.settle(job, pages, reason)
        state.effects.append(Settled(job.id, pages, reason))
        state.pins.unpin(job.pins)
        job.pins = []
        state.to_limbo(job)

    def _anchored(self, job: PrefetchJob) -> bool:
        return self._reached(job.tokens, job.start)[1] == job.start

    def _insert(self, job: PrefetchJob, pages: int) -> list[Slots]:
        """Publish pages [start, start + pages) -> slots of those that the host has got meanwhile.

        What lies above on the device alone is asked to be written back, else its eviction would take the new pages along.
        """
        tree, key, goal = self.state.tree, job.key, job.start + pages
        node, page, left = tree.root(job.tokens.scope), 0, []
        while page < goal:
            child = tree.child(node, key, page)
            begin = page
            if child is None:
                child, page = tree.add(node, key, page, goal), goal
            else:
                page = tree.shared(child, key, page, goal if page >= job.start else job.start)
                if page < child.end:
                    child = tree.split(child, page)
            if begin >= job.start:
                slots = job.slots[(begin - job.start) * SLOT_BYTES : (page - job.start) * SLOT_BYTES]
                if child.at[HOST].state == ABSENT:
                    self.state.residents.put(child, HOST, slots, READY)
                    if job.storage_epoch == self.state.storage_epoch:
                        tree.set_stored(child, STORED)
                    elif self.state.storage and self.state.saving.ahead.stores_at_once:
                        self.state.backlog.append(child)
                else:
                    left.append(slots)
            node = child
        self.state.residents.use([node])
        if goal < job.start + job.hit and job.storage_epoch == self.state.storage_epoch:
            tree.hint(node, key, goal, job.start + job.hit)
        self.state.saving.want_host(node, job.tokens)
        return left

    def settle(self, job: PrefetchJob, pages: int, reason: str | None) -> None:
        """File what the prefetch has brought, for those who wait for it and for the accounts of those who asked."""
        outcome = Fetched(job.start, pages, reason, self.ended)
        self.state.totals.fetch_ended(job.hit, job.granted, pages, reason)
        self._outcomes[job.id] = outcome
        if len(self._outcomes) > _KEPT:
            del self._outcomes[next(iter(self._outcomes))]
        for rid in job.followers:
            self._keep(rid, outcome)
            self._unfollow(job.id, rid)

    def outcome(self, job_id: int) -> Fetched | None:
        """What a prefetch has brought: None while it runs; nothing, if it ended so long ago that it has been forgotten."""
        outcome = self._outcomes.get(job_id)
        return _FORGOTTEN if outcome is None and job_id not in self.state.jobs.open else outcome

    # -- accounts -----------------------------------------------------------------------------------------------------------

    def _keep(self, rid: str, outcome: Fetched) -> None:
        before = self._fetched.pop(rid, None)
        if before is not None and before.pages and before.first_page + before.pages == outcome.first_page:
            outcome = Fetched(before.first_page, before.pages + outcome.pages, outcome.reason)
        self._fetched[rid] = outcome
        if len(self._fetched) > _KEPT:  # of requests that never came
            del self._fetched[next(iter(self._fetched))]

    def take(self, rid: str) -> Fetched | None:
        """For the account of a lease that opens now."""
        return self._fetched.pop(rid, None)

    def give_back(self, rid: str, fetched: Fetched) -> None:
        """The lease ended before it computed anything: the next one of this request has waited for the fetch all the same."""
        self._fetched.setdefault(rid, fetched)
