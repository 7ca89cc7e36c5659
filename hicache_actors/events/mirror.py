"""From Core's records to events.

Core's records name nodes; here each of them is kept with the hashes of its pages, which are made once, when it is told of.  So an
event costs what it says, however deep in the tree it happens.  Pure and synchronous; made for a worker thread, since hashing takes
about 1 us a page.
"""

from __future__ import annotations

from hicache_actors.core.node import TAG_BYTES
from hicache_actors.core.records import Added, Came, Changed, Cleared, Gone, Joined, Left, Split, Told
from hicache_actors.core.words import TOKEN_BYTES
from hicache_actors.events.batches import (
    TIERS,
    Cause,
    EventBatch,
    PagesRemoved,
    PagesStored,
    ResidencyEvent,
    TierName,
    TiersCleared,
)
from hicache_actors.keys.hashes import chain, scope_root
from hicache_actors.keys.scope import Scope


class _Span:
    """A node: consecutive pages, and the places where they are."""

    __slots__ = ("hashes", "parent", "places", "scope", "tokens")

    def __init__(
        self, scope: Scope, parent: bytes | None, hashes: list[bytes], tokens: bytes, places: set[int]
    ) -> None:
        self.scope, self.parent, self.hashes, self.tokens, self.places = scope, parent, hashes, tokens, places

    @property
    def last(self) -> bytes:
        return self.hashes[-1]


class Mirror:
    """``complete``: all that was there when the records began has been told.  ``last``: id of the last batch, 0 before."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.complete = False
        self.last = self.epoch = self.at_ms = 0
        self._spans: dict[bytes, _Span] = {}
        self._events: list[ResidencyEvent] = []

    def apply(self, changed: Changed) -> EventBatch | None:
        """Take in the records of the next section -> what subscribers are told of it; None while not `complete`."""
        self._events = []
        told = self.complete
        for record in changed.records:
            self._apply(record)
        self.epoch, self.at_ms = changed.epoch, changed.now_ms
        if not told:
            self.last = changed.decided
            return None
        if not self._events:
            return None
        batch = EventBatch(changed.decided, self.last, self.epoch, self.at_ms, tuple(self._events))
        self.last = batch.id
        return batch

    def snapshot(self, cause: Cause = "snapshot", lost: int = 0) -> EventBatch:
        """All that is there, in one batch: prefixes before what follows them."""
        events: list[ResidencyEvent] = [TiersCleared(TIERS, cause)]
        events += [
            self._stored(span, TIERS[place]) for span in self._in_order() for place in sorted(span.places, reverse=True)
        ]
        return EventBatch(self.last, self.last, self.epoch, self.at_ms, tuple(events), lost)

    def _in_order(self) -> list[_Span]:
        """Parents first; a split leaves the head of a node behind it in the table."""
        by_last = {span.last: span for span in self._spans.values()}
        done: set[bytes] = set()
        out: list[_Span] = []
        for span in self._spans.values():
            path = []
            at: _Span | None = span
            while at is not None and at.last not in done:
                done.add(at.last)
                path.append(at)
                at = None if at.parent is None else by_last[at.parent]
            out += reversed(path)
        return out

    def _apply(self, record: object) -> None:
        spans = self._spans
        match record:
            case Came(tag, place):
                span = spans[tag]
                span.places.add(place)
                self._events.append(self._stored(span, TIERS[place]))
            case Left(tag, place):
                span = spans[tag]
                span.places.discard(place)
                self._removed(TIERS[place], span.hashes)
            case Added():
                self._add(record)
            case Split(tag, head, pages):
                self._split(tag, head, pages)
            case Joined(tags):
                self._join([spans.pop(tag) for tag in tags], tags[-1])
            case Gone(tag):
                del spans[tag]
            case Cleared(why):
                self._clear(why)
            case Told(left):
                self.complete = self.complete or not left

    def _stored(self, span: _Span, tier: TierName) -> PagesStored:
        return PagesStored(tier, tuple(span.hashes), span.parent, span.tokens, self.page_size, span.scope)

    def _removed(self, tier: TierName, hashes: list[bytes]) -> None:
        """Evictions come in runs: one event for each."""
        before = self._events[-1] if self._events else None
        if isinstance(before, PagesRemoved) and before.tier == tier:
            self._events[-1] = PagesRemoved(tier, (*before.hashes, *hashes))
        else:
            self._events.append(PagesRemoved(tier, tuple(hashes)))

    def _add(self, node: Added) -> None:
        tokens = node.key[TAG_BYTES:] + node.rest
        if node.scope is not None:
            scope, parent, before = node.scope, None, scope_root(node.scope)
        else:
            above = self._spans[node.parent]
            scope, parent, before = above.scope, above.last, above.last
        self._spans[node.tag] = _Span(scope, parent, chain(before, tokens, self.page_size), tokens, set())

    def _split(self, tag: bytes, head: bytes, pages: int) -> None:
        tail = self._spans[tag]
        cut = pages * self.page_size * TOKEN_BYTES
        upper = _Span(tail.scope, tail.parent, tail.hashes[:pages], tail.tokens[:cut], set(tail.places))
        tail.parent, tail.hashes, tail.tokens = upper.last, tail.hashes[pages:], tail.tokens[cut:]
        self._spans[head] = upper

    def _join(self, parts: list[_Span], tag: bytes) -> None:
        top = parts[0]
        hashes = [page for part in parts for page in part.hashes]
        tokens = b"".join([part.tokens for part in parts])
        self._spans[tag] = _Span(top.scope, top.parent, hashes, tokens, top.places)

    def _clear(self, why: str) -> None:
        match why:
            case "begin":
                self._spans = {}
                self.complete = False
            case "storage":
                for span in self._spans.values():
                    span.places.discard(TIERS.index("storage"))
                self._events.append(TiersCleared(("storage",), "storage"))
            case _:
                self._spans = {}
                cause: Cause = "reset" if why == "reset" else "degraded"
                self._events.append(TiersCleared(("device", "host"), cause))
