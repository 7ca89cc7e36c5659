"""Verbs of `Core` that not everybody needs: who owns blocks, fetches ahead, waits for room or for the store, operates the cache."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_actors.core.attaching import Attaching
from hicache_actors.core.backlog import Backlog
from hicache_actors.core.blocks import Blocks
from hicache_actors.core.changes import Changes
from hicache_actors.core.clearing import Clearing
from hicache_actors.core.config import StoreOn, WritePolicy
from hicache_actors.core.explain import Explanation, explain
from hicache_actors.core.fetch import Fetches
from hicache_actors.core.order import Eviction
from hicache_actors.core.room import Rooms
from hicache_actors.core.state import Note, State
from hicache_actors.core.waiting import Waiting
from hicache_actors.core.words import PolicyRefused, Shortfall, Tokens, UseStorage, UseWeights


class BlockCalls:
    """``slots="engine"``."""

    _blocks: Blocks

    def lookup(self, tokens: Tokens, rid: str, computed_tokens: int = 0) -> int | None:
        """Tokens of the prompt beyond ``computed_tokens`` that the host holds, pinned until `finish`; may be asked again.

        None: a fetch is under way, ask again.  One token is always left to compute.

        :raises UsageError: ``computed_tokens`` is not a multiple of the page size within the prompt.
        """
        return self._blocks.lookup(tokens, rid, computed_tokens)

    def load_into(
        self, rid: str, pages: Sequence[int], first_token: int, after: object | None = None
    ) -> tuple[str, int] | Shortfall:
        """Copy what `lookup` has found, from ``first_token`` on, into blocks ``pages`` once ``after`` has fired -> (id, job).

        The blocks are the engine's again when the id has been named ended.  A `Shortfall` ("reset", "load_failed": what was found
        has gone since; "degraded") has taken none of them.

        :raises UsageError: no lookup, beyond what it found, not the start of a page, or no such block.
        """
        return self._blocks.load_into(rid, pages, first_token, after)

    def save_from(
        self, tokens: Tokens, rid: str, pages: Sequence[int], first_token: int, after: object | None = None
    ) -> str:
        """Save what the host lacks of whole pages that blocks ``pages`` hold from ``first_token`` on, once ``after`` has fired.

        -> id; the blocks are the engine's again when it has been named ended, also those that needed no copy.  Give all pages from
        token 0: if the host has lost what is before ``first_token``, nothing is saved ("gap").

        :raises UsageError: not the start of a page, more than the prompt's whole pages, or no such block.
        """
        return self._blocks.save_from(tokens, rid, pages, first_token, after)

    def finish(self, rid: str, after: object | None = None) -> None:
        """End what `lookup` has pinned, at once or when ``after`` has fired.  Idempotent; loads and saves run on."""
        self._blocks.finish(rid, after)


class FetchCalls:
    """Fetches from storage; `Core.acquire` makes its own."""

    state: State
    _fetches: Fetches

    def prefetch(self, tokens: Tokens, rid: str, deadline_s: float | None = None, priority: int = 0) -> int | None:
        """Fetch what no tier holds -> the job (its own, or the one that fetches that already), None if there is nothing to do."""
        return self._fetches.open(tokens, rid, deadline_s, priority)

    def stop_prefetch(self, job: int, rid: str) -> None:
        """``rid`` does not want the rest; with nobody left a `StopJob` effect follows.  Idempotent."""
        self._fetches.stop(job, rid)

    def prefetch_agreed(self, job: int) -> int | None:
        """Tokens that a prefetch has brought, None while it runs; 0 if it is not one of the last few thousand."""
        outcome = self._fetches.outcome(job)
        return None if outcome is None else outcome.pages * self.state.page

    def prefetch_reason(self, job: int) -> str | None:
        """Why a prefetch that has ended has not brought all; of the last few thousand, else None."""
        outcome = self._fetches.outcome(job)
        return None if outcome is None else outcome.reason


class StoreCalls:
    """Waiting until pages are stored."""

    _waiting: Waiting

    def stored(self, tokens: Tokens) -> int:
        """-> waiter; ``Wake(waiter, (stored_tokens, reason))`` when all whole pages are acknowledged, or no more will be.

        Reasons: None (all), "not_committed", "evicted", "given_up", "policy" (not saved by the write policy so far), "degraded",
        "no_storage".  Who waits is served now: under write_back what is dirty of the prompt is saved, and under ``store_on =
        "host_evict"`` it is backed up as soon as it is on the host.
        """
        return self._waiting.stored(tokens)

    def drained(self) -> int:
        """-> waiter; ``Wake(waiter, pages_left)`` when no write-back, backup or retry is open.

        Under write_back all dirty pages are saved, roots first, as far as the host has room; under ``store_on = "host_evict"`` all
        that is on the host is backed up, roots first, and what comes there meanwhile.
        """
        return self._waiting.drained()

    @property
    def unsaved_pages(self) -> int:
        """Pages that the write policy wants saved and that are not.  The one thing here that any thread may read."""
        return self._waiting.pages_left()


class RoomCalls:
    """``slots="owned"``."""

    state: State
    _rooms: Rooms
    _waiting: Waiting

    def room(self, n_tokens: int, deadline_s: float | None = None) -> int:
        """Wait, in order, for device pages for ``n_tokens`` -> waiter; ``Wake(waiter, CoreRoom)`` when they are reserved.

        ``Wake(waiter, Shortfall)`` after ``deadline_s`` (by the agreed clock), or if that can never be: the pool is smaller, or the
        cache has degraded.  While somebody waits, leases opened later load and allocate nothing beyond their reservation
        ("device_capacity").

        :raises UsageError: not a positive count, or a negative deadline.
        """
        self.state.check_owned()
        return self._waiting.room(n_tokens, deadline_s)

    def leave_room(self, waiter: int) -> None:
        """Stop waiting, or give back what is left of the reservation.  Idempotent."""
        self._rooms.leave(waiter)


class OperatorCalls:
    """What is asked and decided about the cache itself while it runs."""

    state: State
    _attaching: Attaching
    _clearing: Clearing
    _backlog: Backlog
    _waiting: Waiting

    def explain(self, tokens: Tokens) -> Explanation:
        """Where each span of the prompt is, or why it is nowhere.  Changes nothing."""
        return explain(self.state, tokens)

    def watch(self, on: bool) -> None:
        """Write down from here on what comes and goes, from the beginning if that is being done already, or stop it.

        The records of a section come as its last effect, `Changed`.  They begin with `Cleared`; what was there before follows in
        the sections that call `tell`.  Local: nothing that is replicated depends on it.
        """
        state = self.state
        if on:
            state.watches += 1
            state.residents.changes = Changes(state.tree, state.watches)
        else:
            state.residents.changes = None

    def tell(self, nodes: int) -> None:
        """Write down about ``nodes`` more of the nodes that were there when `watch` began; `Told` says how many are left."""
        if self.state.residents.changes is not None:
            self.state.residents.changes.tell(nodes)

    def attach(self, number: int, url: str, deadline_s: float) -> int:
        """Each rank opens a store within ``deadline_s``; all use it from the same step on, or none does -> waiter.

        ``Wake(waiter, Attached)``.  `cancel_waiter` withdraws it.
        """
        waiter = self._waiting.next_waiter()
        self._attaching.open(waiter, number, url, deadline_s)
        return waiter

    def clear_storage(self, deadline_s: float) -> int:
        """Each rank removes what it has stored, within ``deadline_s``, while requests go on -> waiter.

        ``Wake(waiter, Cleared)``: from that section on nothing counts as stored, as after `set_storage`, and what the host holds
        is backed up again.  `cancel_waiter` ends it where it stands.
        """
        waiter = self._waiting.next_waiter()
        self._clearing.open(waiter, deadline_s)
        return waiter

    def set_storage(self, attached: bool, deadline_s: float = 0.0) -> None:
        """From here on there is a store, another than before, or there is none; ``UseStorage`` follows.

        Nothing counts as stored any more, O(nodes).  With a store, what the host holds is backed up, paths from their roots, one
        job at a time; under ``store_on = "host_evict"`` what would leave the host next.  Open storage jobs run on at the store that
        they began with: what they bring is published, what they save does not count.
        """
        self._backlog.set_storage(UseStorage(attached, deadline_s=deadline_s))

    def hurry(self) -> None:
        """The cache is closing: what gathers to be stored is stored now, and what comes later at once."""
        self._backlog.saving.hurry()

    def reset(self) -> None:
        raise NotImplementedError

    def advance_epoch(self, weights: str) -> None:
        """The model has other weights from here on: `reset`, and what is stored of the old ones is not found any more.

        ``UseWeights`` follows.  Open storage jobs run on under the old names: what they bring is not published.
        """
        state = self.state
        self._backlog.saving.end_backup()  # what this section wanted saved has the old name still
        self.reset()
        state.storage_epoch += 1
        if state.residents.changes is not None:
            state.residents.changes.cleared("storage")
        state.note(Note.WEIGHTS, state.storage_epoch, state.text(weights))
        state.effects.append(UseWeights(weights))

    def set_write_policy(self, policy: WritePolicy) -> PolicyRefused | None:
        """Save by another policy from now on -> None, or why not now.

        write_back is left only when nothing is left that only it would save, and what the host holds has its prefix there.

        :raises ConfigError: no such policy.
        """
        return self._changed_policy(self.state.policies.set_write_policy(self.state, policy))

    def set_eviction(self, eviction: Eviction) -> PolicyRefused | None:
        """Evict in another order from now on -> None, or why not now.

        The nodes change lists a few thousand in a section; what has not done so yet goes first, in the old order.  Times of last
        use serve as times of arrival, and the other way round.

        :raises ConfigError: no such order.
        """
        return self._changed_policy(self.state.policies.set_eviction(self.state, eviction))

    def set_store_on(self, store_on: StoreOn) -> PolicyRefused | None:
        """Store pages at another time from now on -> None, or why not now.

        "publish": what the host holds and is not stored is backed up as with a store that has just been attached.

        :raises ConfigError: no such time.
        """
        return self._changed_policy(self._backlog.set_store_on(store_on))

    def _changed_policy(self, refused: PolicyRefused | None) -> PolicyRefused | None:
        policies = self.state.policies
        when = f"{policies.write} {policies.store_on}"
        self.state.note(Note.POLICY, refused is None, self.state.text(when), self.state.text(policies.eviction.name))
        return refused
