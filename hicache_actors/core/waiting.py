"""Waiters that Core keeps: pending acquires, `stored`, `drained`.

Each call returns the id of a waiter; a `Wake` effect with that id brings the answer.  Acquires are settled in apply (and at the end
of the section that asks, when there is nothing to fetch); the others when a section ends in which something has changed.
"""

from __future__ import annotations

import math

from hicache_actors.core.backlog import Backlog
from hicache_actors.core.fetch import Fetched, Fetches
from hicache_actors.core.lease import CoreLease
from hicache_actors.core.leases import Leases
from hicache_actors.core.node import SAVING, STORED, UNSTORED, WAITING, Node
from hicache_actors.core.saving import Saving
from hicache_actors.core.state import Note, State
from hicache_actors.core.words import DEVICE, FILLING, HOST, READY, Phase, Shortfall, Tokens, Wake
from hicache_actors.errors import UsageError


class Acquire:
    """A pending acquire: waits for its prefetch, then gets its lease and load in that same section."""

    __slots__ = (
        "deadline_s",
        "job",
        "joined",
        "priority",
        "refused",
        "rid",
        "room",
        "started_ms",
        "tokens",
        "used_tokens",
    )

    def __init__(self, tokens: Tokens, rid: str, deadline_s: float | None, priority: int) -> None:
        self.tokens, self.rid, self.deadline_s, self.priority = tokens, rid, deadline_s, priority
        self.started_ms: int | None = None  # the apply after it was asked: the clock may have rested before
        self.job = 0  # its prefetch; 0: nothing to wait for
        self.joined = False  # somebody else's prefetch
        self.room = 0  # the reservation that its lease takes pages of
        self.used_tokens = 0  # that the request has had in a lease before
        self.refused: int | None = None  # the host had no room for it when so many prefetches had ended

    @property
    def due_ms(self) -> int | None:
        """When it stops waiting for room."""
        if self.refused is None or self.deadline_s is None or self.started_ms is None:
            return None
        return self.started_ms + math.ceil(self.deadline_s * 1000)


class Stores:
    """A waiter of `stored`: what it has seen so far."""

    __slots__ = ("asked_pages", "run_pages", "tokens", "whole")

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.run_pages = 0  # acknowledged; that counts even if the pages have left the tree since
        self.asked_pages = 0  # of the path, that a backup has been asked for
        self.whole = False  # all of the prompt was in the tree at some time


class Waiting:
    def __init__(self, state: State, leases: Leases, fetches: Fetches, saving: Saving, backlog: Backlog) -> None:
        self.state, self.leases, self.fetches, self.saving, self.backlog = state, leases, fetches, saving, backlog
        self.acquires: dict[int, Acquire] = {}
        self.stores: dict[int, Stores] = {}
        self.drains: dict[int, None] = {}
        self._acquired: dict[int, CoreLease] = {}
        self._rids: dict[str, int] = {}
        self._last = 0

    # -- acquire ------------------------------------------------------------------------------------------------------------

    def acquire(
        self, tokens: Tokens, rid: str, deadline_s: float | None, priority: int, room: int, used_tokens: int
    ) -> int:
        self.check_new(rid, used_tokens)
        self._last += 1
        waiter = self._last
        acquire = Acquire(tokens, rid, deadline_s, priority)
        acquire.room, acquire.used_tokens = room, used_tokens
        self._fetch(acquire)
        self.acquires[waiter] = acquire
        self._rids[rid] = waiter
        self.state.note(Note.ACQUIRE, waiter, acquire.job, self.state.text(rid))
        return waiter

    def check_new(self, rid: str, used_tokens: int) -> None:
        if rid in self.state.leases or rid in self._rids:
            raise UsageError(f"request {rid!r} has a lease or a pending acquire already; end that first")
        if used_tokens < 0:
            raise UsageError(f"used_tokens = {used_tokens}: a count of tokens is not negative")

    def _fetch(self, acquire: Acquire) -> None:
        state = self.state
        left_s = acquire.deadline_s
        if left_s is not None and acquire.started_ms is not None:
            left_s -= (state.now_ms - acquire.started_ms) / 1000
        acquire.job = 0
        if left_s is not None and left_s <= 0:
            return
        known = state.jobs.last
        if self.fetches.missing_pages(acquire.tokens):
            acquire.job = self.fetches.open(acquire.tokens, acquire.rid, left_s, acquire.priority) or 0
        acquire.joined = 0 < acquire.job <= known

    def on_apply(self) -> None:
        """The time of new acquires begins.  ``best_effort``: at the first apply after its HIT a fetch is stopped; what has arrived
        counts.

        Called before the values of this apply, so a job that runs has had its HIT in an earlier one.
        """
        for acquire in self.acquires.values():
            if acquire.started_ms is None:
                acquire.started_ms = self.state.now_ms
        if self.state.config.prefetch_policy == "best_effort":
            for acquire in self.acquires.values():
                job = self.state.jobs.open.get(acquire.job)
                if job is not None and job.phase is Phase.RUN:
                    self.fetches.stop(acquire.job, acquire.rid)

    def settle_acquires(self) -> None:
        """Give their lease to those whose prefetch has settled, or who have none."""
        for waiter, acquire in list(self.acquires.items()):
            if acquire.job:
                outcome = self.fetches.outcome(acquire.job)
                if outcome is None:
                    continue
                if self._asks_on(acquire, outcome):
                    self._fetch(acquire)
                    if acquire.job:
                        continue
                elif outcome.reason == "host_capacity" and not outcome.pages:
                    acquire.job, acquire.refused = 0, outcome.ended
            if acquire.refused is not None and self._waits_for_room(acquire):
                continue
            lease = self._admit(waiter, acquire)
            # Not before: if Core breaks in admitting it, it is admitted to what is left.
            del self.acquires[waiter], self._rids[acquire.rid]
            self.state.effects.append(Wake(waiter, lease))

    def _asks_on(self, acquire: Acquire, outcome: Fetched) -> bool:
        """It joined somebody else's prefetch, which brought all of its part: the rest is asked for now."""
        return acquire.joined and outcome.pages > 0 and outcome.reason is None

    def _waits_for_room(self, acquire: Acquire) -> bool:
        """The prefetches of others have the room that its own lacked: once one of them has ended, it asks again."""
        due_ms = acquire.due_ms
        late = due_ms is not None and due_ms <= self.state.now_ms
        if late or self.state.degraded or self.state.config.prefetch_policy == "best_effort":
            return False
        room, under_way = self.fetches.room()
        if room and self.fetches.ended > (acquire.refused or 0):
            acquire.refused = None
            self._fetch(acquire)
            return acquire.job > 0
        return under_way

    @property
    def has_dues(self) -> bool:
        return bool(self.acquires)

    @property
    def next_due_ms(self) -> int | None:
        """When the first of those who wait for room stops waiting; now, if somebody's time is still to begin."""
        if any(acquire.started_ms is None and acquire.deadline_s is not None for acquire in self.acquires.values()):
            return self.state.now_ms
        due = [acquire.due_ms for acquire in self.acquires.values()]
        return min((ms for ms in due if ms is not None), default=None)

    def _admit(self, waiter: int, acquire: Acquire) -> CoreLease:
        """Lease and load; if there is no room for all that is on the host, load what fits."""
        lease = self.state.leases.get(acquire.rid)
        if lease is not None:  # made before Core broke
            return lease
        lease = self.leases.lease(acquire.tokens, acquire.rid, acquire.priority, used_tokens=acquire.used_tokens)
        lease.waiter, lease.room = waiter, acquire.room
        self._acquired[waiter] = lease
        refused = self.leases.load(lease, None)
        if isinstance(refused, Shortfall) and refused.reason == "device_capacity":
            fits = self.leases.loads.rooms.within_reach(lease)
            if fits:
                self.leases.load(lease, fits * self.state.page, limit="device_capacity")
        return lease

    def cancel_acquire(self, waiter: int) -> None:
        acquire = self.acquires.pop(waiter, None)
        if acquire is not None:
            del self._rids[acquire.rid]
            if acquire.job:
                self.fetches.leave(acquire.job, acquire.rid)
            self.fetches.take(acquire.rid)
            return
        lease = self._acquired.pop(waiter, None)
        if lease is not None and not lease.closed:
            for job_id in lease.loads:
                self.leases.loads.forget(job_id, lease.number)
            self.leases.release(lease, None)

    def on_release(self, lease: CoreLease) -> None:
        self._acquired.pop(lease.waiter, None)

    # -- stored and drained -------------------------------------------------------------------------------------------------

    def stored(self, tokens: Tokens) -> int:
        self._last += 1
        self.stores[self._last] = Stores(tokens)
        if self.state.policies.write == "write_back":
            self._save_path(tokens)
        self.state.changed = True
        return self._last

    def next_waiter(self) -> int:
        """A number for a waiter that is kept elsewhere."""
        self._last += 1
        return self._last

    def room(self, n_tokens: int, deadline_s: float | None) -> int:
        self.leases.loads.rooms.ask(self._last + 1, n_tokens, deadline_s)
        self._last += 1
        return self._last

    def _save_path(self, tokens: Tokens) -> None:
        """write_back saves when it must; who waits for it need not."""
        tree, key, stop = self.state.tree, tokens.packed, len(tokens) // self.state.page
        node = tree.root(tokens.scope)
        while node.end < stop:
            child = tree.child(node, key, node.end)
            if child is None or not child.at[DEVICE].state:
                break
            if tree.shared(child, key, node.end, stop) < child.end:
                self.saving.want_host(child, None)  # some of its pages are the prompt's
                return
            node = child
        self.saving.want_host(node, tokens)

    def ask_stored(self) -> None:
        """Before a section ends: what has come to the host of a prompt that somebody waits for is stored now."""
        state, tree = self.state, self.state.tree
        if not state.changed or not state.storage or state.degraded or state.policies.stores_on_publish:
            return
        for entry in self.stores.values():
            key, stop = entry.tokens.packed, len(entry.tokens) // state.page
            node, asked, follows = tree.root(entry.tokens.scope), False, True
            while follows and node.end < stop:
                child = tree.child(node, key, node.end)
                if child is None or child.at[HOST].state != READY:
                    break
                follows = (
                    tree.shared(child, key, node.end, stop) == child.end
                )  # else some of its pages are the prompt's
                asked = asked or (child.stored == UNSTORED and child.end > entry.asked_pages)
                node = child
            if asked:
                self.saving.want_stored(node, entry.tokens if follows else None)
                entry.asked_pages = node.end

    def drained(self) -> int:
        self._last += 1
        if not self.drains and not self.state.policies.stores_on_publish:
            self.backlog.take_in()
        self._set_drains({**self.drains, self._last: None})
        self.state.changed = True
        return self._last

    def _set_drains(self, drains: dict[int, None]) -> None:
        self.drains = drains
        self.saving.ahead.draining = bool(drains)
        if not drains and not self.state.policies.stores_on_publish:
            self.state.backlog.clear()  # nobody waits for the rest

    @property
    def needs_clock(self) -> bool:
        """`stored` or `drained` waits for a retry, or for the backlog."""
        return bool(self.saving.retries or self.state.backlog) and bool(self.stores or self.drains)

    def cancel(self, waiter: int) -> object:
        """Drop a waiter of `stored` or `drained` -> its answer as of now; None for an unknown id."""
        entry = self.stores.pop(waiter, None)
        if entry is not None:
            return self._stored_now(entry)
        if waiter in self.drains:
            self._set_drains({number: None for number in self.drains if number != waiter})
            return self.pages_left()
        return None

    def end_section(self) -> None:
        state = self.state
        if not state.changed:
            return
        state.changed = False
        for waiter, entry in list(self.stores.items()):
            answer = self._stored_now(entry)
            if answer[1] != "pending":
                del self.stores[waiter]
                state.effects.append(Wake(waiter, answer))
        if self.drains and (state.degraded or self.saving.idle):
            left = self.pages_left()
            for waiter in self.drains:
                state.effects.append(Wake(waiter, left))
            self._set_drains({})

    def pages_left(self) -> int:
        """Pages in the tree that the write policy wants saved and that are not (with a storage: stored, without: on the host).

        O(nodes) under write_through_selective, else O(1).
        """
        state, tree = self.state, self.state.tree
        least = state.policies.least_hits
        if state.policies.write == "none":
            return 0
        if least:
            wanted = (node for node in tree.table.values() if node.hits >= least)
            return sum(
                node.end - tree.start(node)
                for node in wanted
                if (node.stored != STORED if state.storage else not node.at[HOST].state)
            )
        return tree.pages - (tree.stored_pages if state.storage else state.residents.resident[HOST])

    def _stored_now(self, entry: Stores) -> tuple[int, str | None]:
        """-> (tokens of the acknowledged leading run, why not more: None if that is all, "pending" if more may come)."""
        state, tree, key = self.state, self.state.tree, entry.tokens.packed
        stop = len(entry.tokens) // state.page
        node, page = tree.root(entry.tokens.scope), 0
        unproven, reason = False, None
        while page < stop:
            child = tree.child(node, key, page)
            if child is None:
                break
            depth = tree.shared(child, key, page, stop)
            unproven = unproven or child.at[DEVICE].state == FILLING
            if reason is None:
                if child.stored == STORED:
                    entry.run_pages = max(entry.run_pages, depth)
                elif depth > entry.run_pages:
                    reason = self._why_not(child, unproven)
            page = depth
            if depth < child.end:
                break
            node = child
        entry.whole = entry.whole or page >= stop
        if entry.run_pages >= stop:
            return stop * state.page, None
        if state.degraded:
            reason = "degraded"
        elif not state.storage:
            reason = "no_storage"
        elif reason is None:
            reason = "evicted" if entry.whole else "not_committed"
        return entry.run_pages * state.page, reason

    def _why_not(self, node: Node, unproven: bool) -> str:
        """Why a node in the tree is not stored: still under way, or given up."""
        host = node.at[HOST]
        under_way = node.stored in (SAVING, WAITING) or host.state == FILLING or (unproven and host.state != READY)
        under_way = under_way or (bool(self.state.backlog) and host.state == READY)
        if not under_way and not host.state and node.hits < self.state.policies.least_hits:
            return "policy"
        return "pending" if under_way else "given_up"
