"""Who gets pages: the waiting line of an engine.  Owner thread only.

First come, first served, in order of arrival, preempted requests included.  Two kinds of request let others pass: those whose pages
are being fetched from storage, and those whose prefix a running request is just computing (they will find it in the cache).  A
request that does not fit waits in the line and holds nothing; those behind it wait as well.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Final

from hicache_actors.cache.api import HiCache
from hicache_actors.cache.handles import Lease, Load, Prefetch
from hicache_actors.core.words import Shortfall
from hicache_actors.integrations.serving.request import Request
from hicache_actors.integrations.serving.words import ServingConfig
from hicache_actors.keys.prompt import Prompt

_RETRY_S: Final = 0.005  #: room that running copies free is looked for this often
_MOST_FETCHES: Final = 4  #: of one admission: who always loses its pages again computes them

Watch = Callable[[Prefetch | Load], None]
"""Have the engine look again when this is settled."""


class Admission:
    """``freed`` is set by whoever gives pages back; ``paused`` after a preemption, until somebody's pages are free for good."""

    def __init__(self, cache: HiCache, config: ServingConfig, watch: Watch) -> None:
        self.cache, self.config = cache, config
        self.waiting: list[Request] = []
        self.freed = True
        self.paused = False
        self._watch = watch
        self._page_size = cache.page_size
        self._attempts = 0
        self._next_try_s = 0.0

    def enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda other: other.number)

    def leave(self, request: Request) -> None:
        """It has been aborted while it waited."""
        self.waiting.remove(request)
        if request.prefetch is not None:
            request.prefetch.stop()
            request.prefetch = None

    def admit(self, running: Sequence[Request]) -> list[Request]:
        """Give leases to those whose turn it is -> them, in order of arrival."""
        self._fetch()
        if self.paused and running:
            return []
        self.paused = False
        if not self.freed and time.monotonic() < self._next_try_s:
            return []
        self.freed = True
        admitted: list[Request] = []
        for request in tuple(self.waiting):
            holders = [*running, *admitted]
            if len(holders) >= self.config.max_running:
                break
            if request.prefetch is None or not request.prefetch.settled or self._follows(request, holders):
                continue
            if self._has_lost_pages(request) or self._lacked_room(request):
                self._prefetch(request)
                if not request.prefetch.settled:
                    continue
            if request.crowded:
                continue
            if not self._lease(request, len(holders)):
                self.freed = False
                self._next_try_s = time.monotonic() + _RETRY_S
                break
            self.waiting.remove(request)
            admitted.append(request)
        return admitted

    def _fetch(self) -> None:
        """Ask storage for the pages of those in front."""
        fetching = 0
        for request in self.waiting:
            if fetching >= self.config.max_fetching:
                break
            if request.prefetch is None:
                self._prefetch(request)
            assert request.prefetch is not None
            fetching += not request.prefetch.settled

    def _prefetch(self, request: Request) -> None:
        request.covered_tokens = self.cache.match(request.prompt).host
        request.prefetch = self.cache.prefetch(request.prompt, request.rid, deadline_s=self.config.fetch_deadline_s)
        request.fetches += 1
        request.crowded = False
        if not request.prefetch.settled:
            self._watch(request.prefetch)

    def _has_lost_pages(self, request: Request) -> bool:
        """Whether pages that it counted on have left device and host while it waited: then storage is asked once more."""
        assert request.prefetch is not None
        if request.fetches >= _MOST_FETCHES:
            return False
        covered = request.covered_tokens + request.prefetch.agreed_tokens
        return self.cache.match(request.prompt).host < min(covered, len(request.prompt) - self._page_size)

    def _lacked_room(self, request: Request) -> bool:
        """Whether storage is asked again, for the host had no room beside what others fetched.

        It is ``crowded``, and waits, while one that came before it still fetches.
        """
        assert request.prefetch is not None
        refused = request.prefetch.reason == "host_capacity" and not request.prefetch.agreed_tokens
        if not refused or request.fetches >= _MOST_FETCHES:
            request.crowded = False
            return False
        waited, request.crowded = request.crowded or request.fetches == 1, self._fetching_before(request)
        return waited and not request.crowded

    def _fetching_before(self, request: Request) -> bool:
        before = (other for other in self.waiting if other.number < request.number)
        return any(other.prefetch is not None and not other.prefetch.settled for other in before)

    def _follows(self, request: Request, holders: Sequence[Request]) -> bool:
        """Whether a running request is about to compute pages that this one could use."""
        usable = (len(request.prompt) - 1) // self._page_size
        cached: int | None = None
        for other in holders:
            if other.committed_pages * self._page_size >= len(other.prompt) - self._page_size:
                continue  # it decodes
            shared = _shared_pages(request.prompt, other.prompt, self._page_size, usable)
            if shared <= other.committed_pages:
                continue
            if cached is None:
                cached = self.cache.match(request.prompt).host // self._page_size
            if shared > cached:
                return True
        return False

    def _lease(self, request: Request, n_holders: int) -> bool:
        """Lease, load and allocate all known tokens, or nothing at all."""
        lease = self.cache.lease(request.prompt, request.rid, used_tokens=request.used_tokens)
        taken = self._take(request, lease, n_holders)
        request.used_tokens = max(request.used_tokens, lease.usable_tokens)
        if taken:
            return True
        lease.release()
        return False

    def _take(self, request: Request, lease: Lease, n_holders: int) -> bool:
        known = len(request.prompt)
        device = self.cache.core.usage().device
        # One page for each running sequence stays free, so that admitting does not mean preempting.
        needed = -(-(known + 1) // self._page_size) - len(lease.pages) + n_holders
        if needed > device.free_pages + device.evictable_pages:
            return False
        if not request.recompute and isinstance(lease.load(), Shortfall):
            return False
        if isinstance(lease.allocate(known - lease.capacity_tokens), Shortfall):
            return False
        self._attempts += 1
        request.lease, request.load, request.attempt = lease, lease.loading, self._attempts
        request.launched_tokens = request.computed_tokens = lease.usable_tokens
        request.committed_pages = lease.usable_tokens // self._page_size
        request.prefetch = request.last_pass = request.short_since_s = None
        request.fetches = 0
        if request.account is None or (request.recompute and not request.new_tokens):
            request.account = lease.account
        request.recompute = False
        if request.load is not None:
            self._watch(request.load)
        return True


def _shared_pages(one: Prompt, other: Prompt, page_size: int, limit: int) -> int:
    """Whole pages that both prompts begin with, at most ``limit``."""
    low, high = 0, min(limit, len(other) // page_size)
    first = 8 * page_size
    if one.scope != other.scope or not high or bytes(one.packed[:first]) != bytes(other.packed[:first]):
        return 0
    left, right = bytes(one.packed[: 8 * high * page_size]), bytes(other.packed[: 8 * high * page_size])
    while low < high:
        middle = (low + high + 1) // 2
        end = 8 * middle * page_size
        if left[:end] == right[:end]:
            low = middle
        else:
            high = middle - 1
    return low
