"""Why a prompt is served as it is: where each span of it is, or why it is nowhere.  For people, not for engines."""

from __future__ import annotations

from itertools import islice
from typing import Final, Literal, TypeAlias

import msgspec

from hicache_actors.core.evictions import Eviction
from hicache_actors.core.fetch import PrefetchJob
from hicache_actors.core.node import NOWHERE, SAVING, STORED, WAITING, Node
from hicache_actors.core.state import State
from hicache_actors.core.words import DEVICE, FILLING, HOST, READY, TIER_NAMES, Phase, Tokens
from hicache_actors.keys.scope import Scope

Place: TypeAlias = Literal["device", "loading", "host", "saving", "nowhere"]
Reason: TypeAlias = Literal[
    "open_page",
    "evicted",
    "fetching",
    "in_storage",
    "scope_differs",
    "forgotten",
    "never_seen",
    "below_threshold",
    "no_storage",
    "breaker_open",
    "disabled",
    "degraded",
]

_SCOPES_LOOKED_AT: Final = 4096
_STORED_TEXT: Final = {STORED: "stored", SAVING: "being stored", WAITING: "not stored yet: failed, to be tried again"}


class Span(msgspec.Struct, frozen=True):
    """Tokens [first_token, end_token).  ``place``: the fastest tier that has them ("loading": on their way to the device,
    "saving": to the host).  ``reason``: why not faster, or why nowhere; ``detail`` says more, in words.
    """

    first_token: int
    end_token: int
    place: Place
    reason: Reason | None = None
    detail: str = ""


class Explanation(msgspec.Struct, frozen=True):
    """``spans`` cover the prompt, in order.  ``fetch_refused``: why what is missing would not be fetched from storage now; None if
    it would.  ``now_ms`` is the clock that the times in details are of.
    """

    n_tokens: int
    page_size: int
    now_ms: int
    spans: tuple[Span, ...]
    fetch_refused: Reason | None

    def __str__(self) -> str:
        lines = [f"{self.n_tokens} tokens, pages of {self.page_size}, at {self.now_ms} ms"]
        for span in self.spans:
            why = ": ".join(filter(None, (span.reason, span.detail)))
            lines.append(f"{span.first_token:>9} ...{span.end_token:>9}  {span.place:<8} {why}".rstrip())
        if any(span.place == "nowhere" and span.reason != "open_page" for span in self.spans):
            refused = self.fetch_refused
            lines.append("what is missing would be fetched" if refused is None else f"nothing is fetched: {refused}")
        return "\n".join(lines)


def explain(state: State, tokens: Tokens) -> Explanation:
    """O(nodes of the prompt's path + open jobs), and a look at other scopes' roots if nothing of the prompt is known."""
    walk = _Walk(state, tokens)
    stop = state.pages_asked(tokens)
    node, page, inside = walk.present(stop)
    missing = stop - page
    walk.missing(node, page, stop, inside)
    walk.add(stop, None, "nowhere", "open_page", "the last page is always computed")
    return Explanation(len(tokens), state.page, state.now_ms, tuple(walk.spans), _refusal(state, missing))


def _refusal(state: State, missing_pages: int) -> Reason | None:
    if state.degraded:
        return "degraded"
    if not state.config.enabled:
        return "disabled"
    if not state.storage:
        return "no_storage"
    return "below_threshold" if missing_pages < state.config.threshold_pages else None


class _Walk:
    def __init__(self, state: State, tokens: Tokens) -> None:
        self.state, self.tree, self.tokens, self.key = state, state.tree, tokens, tokens.packed
        self.spans: list[Span] = []

    def add(
        self, page: int, end_page: int | None, place: Place, reason: Reason | None = None, detail: str = ""
    ) -> None:
        """One more span; it is joined with the last one if they say the same."""
        first = page * self.state.page
        end = len(self.tokens) if end_page is None else end_page * self.state.page
        if end <= first:
            return
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.place, last.reason, last.detail) == (place, reason, detail):
            first = self.spans.pop().first_token
        self.spans.append(Span(first, end, place, reason, detail))

    def present(self, stop: int) -> tuple[Node, int, bool]:
        """What is on some tier -> (last node, page where the prompt leaves the tree, whether that is inside a node)."""
        tree, node, page = self.tree, self.tree.roots.get(self.tokens.scope, NOWHERE), 0
        unproven = False
        while page < stop:
            child = tree.child(node, self.key, page)
            if child is None:
                return node, page, False
            depth = tree.shared(child, self.key, page, stop)
            device, host = child.at[DEVICE].state, child.at[HOST].state
            unproven = unproven or device == FILLING
            detail = _STORED_TEXT.get(child.stored, "not stored") if self.state.storage else ""
            if device == READY and not unproven:
                self.add(page, depth, "device", None, detail)
            elif device:
                self.add(page, depth, "loading", None, detail)
            elif host == READY:
                gone = self.state.evictions.find(child.key)
                left = gone is not None and gone.place == DEVICE
                self.add(page, depth, "host", "evicted" if left else None, _gone(gone) if left and gone else detail)
            else:
                self.add(page, depth, "saving", None, "on its way from the engine's blocks to the host")
            if depth < child.end:
                return child, depth, True
            node, page = child, depth
        return node, page, False

    def missing(self, node: Node, page: int, stop: int, inside: bool) -> None:
        """Pages [page, stop) are nowhere: remembered evictions first, then what else is known."""
        tag = b"" if inside else node.tag
        while page < stop and tag:
            gone = self.state.evictions.find(tag + self._page(page))
            if gone is None:
                break
            end = min(stop, page + gone.pages)
            self.add(page, end, "nowhere", "evicted", _gone(gone))
            page, tag = end, gone.tag
        if page >= stop:
            return
        fetching = self._fetching(page)
        if fetching > page:
            self.add(page, min(stop, fetching), "nowhere", "fetching", "on its way from storage")
            page = min(stop, fetching)
        hinted = min(stop, self.tree.hints.get(tag + self._page(page), 0)) if tag and page < stop else 0
        if hinted > page:
            self.add(page, hinted, "nowhere", "in_storage", "by the last agreed answer")
            page = hinted
        self._unknown(page, stop)

    def _unknown(self, page: int, stop: int) -> None:
        if page >= stop:
            return
        elsewhere = self._other_scope(stop)
        reset_ms = self.state.evictions.reset_ms
        if elsewhere is not None and elsewhere[0] > page:
            depth, scope = elsewhere
            name = f"lora {scope.lora!r}" if scope.lora != self.tokens.scope.lora else "another salt"
            self.add(page, depth, "nowhere", "scope_differs", f"these tokens are cached under {name}")
            page = depth
        if self.state.degraded:
            self.add(page, stop, "nowhere", "degraded")
        elif not self.state.config.enabled:
            self.add(page, stop, "nowhere", "disabled")
        elif reset_ms is not None and not self.spans:
            self.add(
                page, stop, "nowhere", "forgotten", f"nothing is known of the time before the reset at {reset_ms} ms"
            )
        else:
            self.add(page, stop, "nowhere", "never_seen", "not seen, or not remembered any more")

    def _page(self, page: int) -> bytes:
        begin = page * self.tree.page_bytes
        return bytes(self.key[begin : begin + self.tree.page_bytes])

    def _fetching(self, page: int) -> int:
        """Where the open prefetch that brings this page ends; 0: there is none."""
        stop = (page + 1) * self.tree.page_bytes
        for job in self.state.jobs.open.values():
            if (
                isinstance(job, PrefetchJob)
                and job.phase is not Phase.LIMBO
                and job.start <= page < job.stop
                and job.tokens.scope == self.tokens.scope
                and bytes(self.key[:stop]).startswith(job.key[:stop])
            ):
                return job.stop
        return 0

    def _other_scope(self, stop: int) -> tuple[int, Scope] | None:
        """The scope under which most of these tokens are cached -> (pages, scope)."""
        others = (scope for scope in islice(self.tree.roots, _SCOPES_LOOKED_AT) if scope != self.tokens.scope)
        found = ((self.tree.match(self.key, scope, stop)[2], scope) for scope in others)
        return max(found, key=lambda pair: pair[0], default=None)


def _gone(gone: Eviction) -> str:
    return f"left the {TIER_NAMES[gone.place]} at {gone.at_ms} ms for {gone.cause}"
