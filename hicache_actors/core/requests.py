"""What every engine calls of `Core` for its requests: match, lease, load, allocate, commit, release; or acquire."""

from __future__ import annotations

from hicache_actors.core.lease import CoreLease
from hicache_actors.core.leases import Leases
from hicache_actors.core.loads import Loads
from hicache_actors.core.state import State
from hicache_actors.core.waiting import Waiting
from hicache_actors.core.words import Committed, LoadResult, Match, Shortfall, Tokens


class RequestCalls:
    """``slots="owned"``, but for `match` and the verdicts of loads."""

    state: State
    _leases: Leases
    _loads: Loads
    _waiting: Waiting

    def match(self, tokens: Tokens) -> Match:
        """How much of the prompt is where.  Changes nothing: no split, no pin, no touch."""
        page = self.state.page
        ready, present, depth, hint = self.state.tree.match(
            tokens.packed, tokens.scope, max(0, (len(tokens) - 1) // page)
        )
        return Match(ready * page, present * page, depth * page, hint * page)

    def lease(
        self, tokens: Tokens, rid: str, priority: int = 0, *, blank: bool = False, room: int = 0, used_tokens: int = 0
    ) -> CoreLease:
        """Pin what is on the device, filling pages included, for request ``rid``.

        ``blank``: take nothing that is cached (and do not `load`): the request computes all of its prompt, and its commit finds
        twins where others have published.  ``room``: as for `acquire`.  ``used_tokens``: so many of the first tokens were in a
        lease of this request before (it has been preempted, or tried in vain), so it counts as no other user of their pages.

        :raises UsageError: ``rid`` has a lease or a pending acquire already, or a negative count.
        """
        self.state.check_owned()
        self._waiting.check_new(rid, used_tokens)
        lease = self._leases.lease(tokens, rid, priority, blank=blank, used_tokens=used_tokens)
        lease.room = room
        return lease

    def find_lease(self, rid: str) -> CoreLease | None:
        """The open lease of a request."""
        return self.state.leases.get(rid)

    def load(self, lease: CoreLease, max_tokens: int | None = None) -> tuple[int, ...] | Shortfall:
        """Load what the host holds beyond the lease's pages (at most ``max_tokens``), all of it or nothing; may be called again.

        -> the load jobs that the lease waits for, joined ones included (maybe none), or a `Shortfall`, which has loaded and evicted
        nothing.  Either way the lease takes what others have brought to the device meanwhile.

        :raises UsageError: the lease has been released.
        """
        return self._leases.load(lease, max_tokens)

    def load_result(self, job: int) -> LoadResult | None:
        """The verdict of a load: None until its RESULT has been applied.  Answerable until everybody has dropped it."""
        return self._loads.result(job)

    def forget_load(self, job: int, lease: int = 0) -> None:
        """Lease number ``lease`` had ``job`` in its ``loads`` and will not ask for the verdict any more.  Any thread; idempotent.

        For a load into blocks of the engine's own the number is 0.
        """
        self._loads.forget(job, lease)

    def allocate(self, lease: CoreLease, n_tokens: int) -> Shortfall | None:
        """Append private pages for ``n_tokens`` tokens beyond ``capacity_tokens`` to ``lease.pages``, evicting if need be.

        A `Shortfall` has changed and evicted nothing.

        :raises UsageError: the lease has been released, or a negative count.
        """
        return self._leases.allocate(lease, n_tokens)

    def commit(self, lease: CoreLease, n_tokens: int, after: object | None = None) -> Committed:
        """Tokens [0, n_tokens) of the prompt are computed once ``after`` has fired: publish their whole pages.

        :raises UsageError: the lease has been released, or more tokens than it has room for or than the prompt holds.
        """
        return self._leases.commit(lease, n_tokens, after)

    def hold(self, lease: CoreLease, event: object) -> None:
        """Keep the lease's slots beyond its release, until ``event`` has fired.

        :raises UsageError: the lease has been released.
        """
        self._leases.hold(lease, event)

    def release(self, lease: CoreLease, after: object | None = None) -> None:
        """End the lease.  Idempotent, never raises.  With events or holds, ever given, its slots go to a drain job."""
        self._leases.release(lease, after)
        self._waiting.on_release(lease)

    def acquire(
        self,
        tokens: Tokens,
        rid: str,
        deadline_s: float | None = None,
        priority: int = 0,
        room: int = 0,
        used_tokens: int = 0,
    ) -> int:
        """Prefetch if that is worth it, then lease and load in the apply that settles it -> waiter; ``Wake(waiter, CoreLease)``.

        ``room``: the waiter of a reservation (`room`) that the lease takes pages of first, as long as it is held.  ``used_tokens``:
        as for `lease`.

        :raises UsageError: ``rid`` has a lease or a pending acquire, or a negative count.
        """
        self.state.check_owned()
        return self._waiting.acquire(tokens, rid, deadline_s, priority, room, used_tokens)

    def cancel_acquire(self, waiter: int) -> None:
        """Give up a pending acquire, or release the lease it has made (its verdicts are dropped).  Idempotent."""
        self._waiting.cancel_acquire(waiter)
