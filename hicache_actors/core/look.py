"""What a request has found by `lookup`, and what it has loaded: its pins and its account, from the first lookup to `finish`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Protocol

from hicache_actors.core.fetch import Fetched
from hicache_actors.core.pins import Pin
from hicache_actors.core.words import Account, Tokens


class Loaded(Protocol):
    """What the account needs of a load."""

    start: int
    pages: int
    valid_pages: int | None


class Look:
    """``found_pages`` (from token 0) are on the host and held by ``pin``, as far as they are still there."""

    __slots__ = (
        "computed_tokens",
        "epoch",
        "fetch_job",
        "found_pages",
        "joined",
        "loads",
        "may_fetch",
        "pin",
        "seen",
        "tokens",
        "used",
    )

    def __init__(self, tokens: Tokens, epoch: int) -> None:
        self.tokens, self.epoch = tokens, epoch
        self.computed_tokens = self.found_pages = 0
        self.pin: Pin | None = None
        self.fetch_job = 0  # that it waits for
        self.joined = False  # somebody else's
        self.may_fetch = True  # once for each request
        self.seen = False  # its hit has been counted
        self.used = False  # it has loaded or saved: it computes
        self.loads: list[Loaded] = []

    @property
    def pins(self) -> list[Pin]:
        return [] if self.pin is None else [self.pin]


def account(look: Look, fetched: Fetched | None, page: int) -> Account:
    """Where the prompt's tokens came from; what the engine's own blocks held counts as device.  The reasons add up to computed."""
    asked_tokens = len(look.tokens)
    device = min(look.computed_tokens, asked_tokens)
    got = {"host": 0, "storage": 0}
    failed = 0
    for load in look.loads:
        valid = load.pages if load.valid_pages is None else load.valid_pages
        from_storage = _overlap(fetched, load.start, load.start + valid)
        got["storage"] += from_storage * page
        got["host"] += (valid - from_storage) * page
        failed += (load.pages - valid) * page
    computed = max(0, asked_tokens - device - got["host"] - got["storage"])
    reasons: dict[str, int] = {}
    left = computed
    open_page = asked_tokens - max(0, (asked_tokens - 1) // page) * page
    on_host = max(0, look.found_pages * page - device - sum(got.values()) - failed)
    for reason, n_tokens in (("open_page", open_page), ("load_failed", failed), ("not_loaded", on_host)):
        if taken := min(left, n_tokens):
            reasons[reason] = taken
            left -= taken
    if left:
        missing = (fetched.reason if fetched is not None else None) or "not_cached"
        reasons[missing] = reasons.get(missing, 0) + left
    return Account(device, got["host"], got["storage"], computed, reasons)


def _overlap(fetched: Fetched | None, start: int, stop: int) -> int:
    if fetched is None:
        return 0
    return max(0, min(stop, fetched.first_page + fetched.pages) - max(start, fetched.first_page))


def block_ids(pages: Sequence[int]) -> tuple[int, ...]:
    """The engine's block ids as plain integers: what it gives may be a view of its table, which changes."""
    return tuple(map(operator.index, pages))
