"""A request's lease: what it has, and where that came from."""

from __future__ import annotations

from array import array

from hicache_actors.core.fetch import Fetched
from hicache_actors.core.pins import Pin
from hicache_actors.core.words import Account, Failure, Slots, Tokens


class CoreLease:
    """A request's pins.  Readable by the engine; only Core writes it.

    ``pages`` are device page ids in prompt order; ``ready_tokens`` and ``usable_tokens`` (ready or loading) are what `lease` and
    `load` have found; ``capacity_tokens`` is what `commit` may cover; ``loads`` are the load jobs it waits for; ``failed`` says
    why it publishes nothing any more.  A failed lease keeps its pages until it is released.
    """

    __slots__ = (
        "_asked_tokens",
        "_credits",
        "_on_host_pages",
        "_page",
        "_reason",
        "_valid_pages",
        "allocated",
        "capacity_tokens",
        "closed",
        "done_pages",
        "events",
        "failed",
        "fetched",
        "holds",
        "loads",
        "number",
        "order",
        "pages",
        "pin",
        "priority",
        "ready_tokens",
        "rid",
        "room",
        "tokens",
        "twins",
        "unsure_page",
        "usable_tokens",
        "used_pages",
        "waiter",
    )

    def __init__(self, rid: str, tokens: Tokens, priority: int, pin: Pin, page: int, fetched: Fetched | None) -> None:
        self.rid, self.tokens, self.priority, self.pin = rid, tokens, priority, pin
        self.pages = array("I")
        self.ready_tokens = self.usable_tokens = self.capacity_tokens = 0
        self.done_pages = 0
        self.twins: list[tuple[int, int]] = []  # runs of committed pages that are duplicates of published ones
        self.loads: list[int] = []
        self.events: list[object] = []
        self.holds: list[object] = []
        self.unsure_page: int | None = None  # the first one that was published with an event
        self.failed: Failure | None = None
        self.closed = self.allocated = False
        self.number = 0  # how many leases there were before; unlike ``rid`` it is never used again
        self.waiter = 0  # of the `acquire` that made it
        self.order = 0  # of its opening, among leases and waits for room
        self.room = 0  # the reservation that it takes pages of first
        self.used_pages = 0  # the first so many were this request's in a lease before
        self.fetched = fetched
        self._page = page
        self._asked_tokens = len(tokens)
        self._credits: list[tuple[int, int, str]] = []
        self._valid_pages: int | None = None
        self._on_host_pages = 0
        self._reason: str | None = None

    @property
    def private_pages(self) -> int:
        """Pages that belong to this lease alone."""
        return len(self.pages) - self.done_pages + sum(stop - start for start, stop in self.twins)

    def private_slots(self) -> Slots:
        runs = [*self.twins, (self.done_pages, len(self.pages))]
        return b"".join([self.pages[start:stop].tobytes() for start, stop in runs])

    def fail(self, failure: Failure, page: int) -> None:
        """Publishes nothing from now on; pages from ``page`` on were never valid.  The first failure stays."""
        if self.failed is None:
            self.failed, self._valid_pages = failure, page

    def credit(self, start: int, stop: int, tier: str) -> None:
        """Pages [start, stop) came from ``tier``; those that this request waited for are storage's."""
        if self.fetched is not None:
            first = min(max(self.fetched.first_page, start), stop)
            last = min(max(self.fetched.first_page + self.fetched.pages, first), stop)
            self._credits += ((start, first, tier), (first, last, "storage"), (last, stop, tier))
        else:
            self._credits.append((start, stop, tier))

    def left_on_host(self, pages: int, reason: str | None) -> None:
        """``pages`` more are on the host; ``reason`` is why they were not loaded, if that was tried."""
        self._on_host_pages, self._reason = pages, reason

    @property
    def account(self) -> Account:
        """Where the tokens of the prompt (as long as it was at `lease`) come from; the reasons add up to ``computed``."""
        page, limit = self._page, self._valid_pages
        got = {"device": 0, "host": 0, "storage": 0}
        failed = 0
        for start, stop, tier in self._credits:
            valid = stop if limit is None else max(start, min(stop, limit))
            got[tier] += (valid - start) * page
            failed += (stop - valid) * page
        computed = self._asked_tokens - sum(got.values())
        open_page = self._asked_tokens - max(0, (self._asked_tokens - 1) // page) * page
        on_host = self._on_host_pages * page
        rest = computed - failed - open_page - on_host
        reasons = {
            "open_page": open_page,
            self.failed or "load_failed": failed,
            self._reason or "not_loaded": on_host,
        }
        missing = (self.fetched.reason if self.fetched is not None else None) or "not_cached"
        reasons[missing] = reasons.get(missing, 0) + rest
        return Account(
            got["device"], got["host"], got["storage"], computed, {why: n for why, n in reasons.items() if n}
        )
