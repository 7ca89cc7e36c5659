"""Running sums since the cache was opened.  Each of them balances, whatever has happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from hicache_actors.core.words import Account


class FetchTotals(msgspec.Struct, frozen=True):
    """What agreed hits of the storage have promised: ``hit_pages = fulfilled_pages + sum(unfulfilled_pages.values())``.

    ``unfulfilled_pages``: reason -> pages.  A fetch that several requests wait for counts once.
    """

    hit_pages: int
    fulfilled_pages: int
    unfulfilled_pages: Mapping[str, int]


class Totals:
    """A lease is counted when it ends: served if it has computed, else given back (its request comes again, or has gone)."""

    def __init__(self) -> None:
        self.served_leases = self.returned_leases = 0
        self._tokens: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._hit_pages = self._fulfilled_pages = 0
        self._unfulfilled_pages: Counter[str] = Counter()

    def served(self, account: Account) -> None:
        self.served_leases += 1
        tokens = self._tokens
        tokens["device"] += account.device
        tokens["host"] += account.host
        tokens["storage"] += account.storage
        tokens["computed"] += account.computed
        self._reasons.update(account.reasons)

    def returned(self) -> None:
        self.returned_leases += 1

    def fetch_ended(self, hit: int, granted: int, pages: int, reason: str | None) -> None:
        """Of ``hit`` pages ``granted`` got a slot (0: declined) and ``pages`` were published; ``reason``: why not the rest."""
        self._hit_pages += hit
        self._fulfilled_pages += pages
        no_slot = hit - granted if granted else 0
        if no_slot:
            self._unfulfilled_pages["host_capacity"] += no_slot
        if lost := hit - no_slot - pages:
            self._unfulfilled_pages[reason or "fetch_incomplete"] += lost

    def account(self) -> Account:
        """The sum of the accounts of all served leases."""
        tokens = self._tokens
        return Account(tokens["device"], tokens["host"], tokens["storage"], tokens["computed"], self._reasons.copy())

    def fetches(self) -> FetchTotals:
        return FetchTotals(self._hit_pages, self._fulfilled_pages, self._unfulfilled_pages.copy())
