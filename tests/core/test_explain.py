"""`explain`: each span of a prompt is somewhere, or there is a reason."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hicache_actors.core import Core
from hicache_actors.core.evictions import KEPT
from hicache_actors.core.explain import Explanation, Span
from hicache_actors.core.words import Phase, StartPrefetch, Tokens, encode_result
from hicache_actors.keys.scope import Scope

from .kit import PAGE, Toks, cached, clear_device, compute, host_only, make, of_type, settle, whole

A = Toks(range(41))
OPEN = Span(40, 41, "nowhere", "open_page", "the last page is always computed")


def explained(core: Core, tokens: Tokens) -> Explanation:
    """It covers the prompt, in order, and changes nothing."""
    before = core.state_digest()
    explanation = core.explain(tokens)
    assert core.state_digest() == before
    spans = explanation.spans
    assert spans[0].first_token == 0
    assert spans[-1].end_token == len(tokens)
    assert all(one.end_token == two.first_token for one, two in pairwise(spans))
    return explanation


def facts(core: Core, tokens: Tokens = A) -> list[tuple[Any, ...]]:
    return [(span.first_token, span.end_token, span.place, span.reason) for span in explained(core, tokens).spans[:-1]]


def test_what_was_never_seen() -> None:
    core = make()
    assert facts(core) == [(0, 40, "nowhere", "never_seen")]
    assert explained(core, A).spans[-1] == OPEN
    assert explained(core, A).fetch_refused is None
    whole(core)


def test_each_tier_and_what_diverges() -> None:
    core = make()
    lease = compute(core, A, "a")
    assert explained(core, A).spans[0] == Span(0, 40, "device", None, "not stored")
    settle(core)
    assert explained(core, A).spans[0] == Span(0, 40, "device", None, "stored")
    forked = Toks([*range(22), *range(900, 919)])
    assert facts(core, forked) == [(0, 20, "device", None), (20, 40, "nowhere", "never_seen")]
    core.release(lease)
    whole(core)


def test_what_has_left_the_device_says_when_and_for_whom() -> None:
    core = make(storage=False)
    cached(core, A)
    core.apply(1234, [], [])
    clear_device(core)
    assert explained(core, A).spans[0] == Span(0, 40, "host", "evicted", "left the device at 1234 ms for request clear")
    again = core.lease(A, "b")
    core.load(again, 12)
    assert [fact[2] for fact in facts(core)] == ["loading", "host"]
    settle(core)
    assert facts(core)[0] == (0, 12, "device", None)
    core.release(again)
    whole(core)


def test_what_has_left_the_cache_says_when_and_for_whom() -> None:
    core = make(device=12, host=12, storage=False)
    cached(core, A)
    core.apply(50, [], [])
    other = Toks(range(1000, 1045))
    cached(core, other)  # its pages need all of the device, its write-back all of the host
    spans = explained(core, A).spans
    assert {span.reason for span in spans[:-1]} == {"evicted"}
    assert "at 50 ms for write_back" in "".join(span.detail for span in spans)
    text = str(explained(core, A))
    assert "nothing is fetched: no_storage" in text
    assert "evicted: left the host at 50 ms for write_back" in text
    whole(core)


def test_a_path_that_left_leaf_by_leaf_is_remembered_page_by_page() -> None:
    core = make(device=12, host=0, storage=False)
    cached(core, A)
    shorter = core.lease(Toks(range(21)), "b")  # splits
    other = core.lease(Toks([]), "c")
    assert core.allocate(other, 7 * PAGE) is None
    assert facts(core) == [(0, 20, "device", None), (20, 40, "nowhere", "evicted")]
    core.release(shorter)
    assert core.allocate(other, 5 * PAGE) is None
    assert facts(core) == [(0, 40, "nowhere", "evicted")]
    core.release(other)
    whole(core)


def test_scopes() -> None:
    core = make(storage=False)
    cached(core, A)
    lora, salted = Toks(range(61), Scope(lora="a")), Toks(range(41), Scope(salt="secret"))
    assert facts(core, lora) == [(0, 40, "nowhere", "scope_differs"), (40, 60, "nowhere", "never_seen")]
    assert "lora None" in explained(core, lora).spans[0].detail
    text = str(explained(core, salted))
    assert "another salt" in text
    assert "secret" not in text
    whole(core)


def test_fetches_hints_and_thresholds() -> None:
    core = make(prefetch_threshold_tokens=12)
    core.prefetch(A, "a")
    (start,) = of_type(core.take_effects(), StartPrefetch)
    assert facts(core) == [(0, 40, "nowhere", "fetching")]
    core.apply(0, [(start.job, Phase.HIT, 8)], [])
    core.apply(0, [(start.job, Phase.RUN, encode_result(3))], [start.job])
    assert facts(core) == [(0, 12, "host", None), (12, 32, "nowhere", "in_storage"), (32, 40, "nowhere", "never_seen")]
    assert "would be fetched" in str(explained(core, A))
    assert explained(core, Toks(range(21))).fetch_refused == "below_threshold"
    whole(core)


def test_switched_off_forgotten_and_degraded() -> None:
    off = make(enabled=False)
    assert facts(off) == [(0, 40, "nowhere", "disabled")]
    assert explained(off, A).fetch_refused == "disabled"
    core = make()
    host_only(core, A)
    core.apply(77, [], [])
    core.reset()
    assert facts(core) == [(0, 40, "nowhere", "forgotten")]
    assert "77 ms" in explained(core, A).spans[0].detail
    core.degrade()
    assert facts(core) == [(0, 40, "nowhere", "degraded")]
    assert explained(core, A).fetch_refused == "degraded"
    whole(core)


def test_blocks_on_their_way_to_the_host() -> None:
    core = make(slots="engine")
    core.save_from(A, "a", list(range(5)), 0)
    assert facts(core)[0] == (0, 20, "saving", None)
    settle(core)
    assert facts(core)[0] == (0, 20, "host", None)
    whole(core)


def test_the_memory_is_bounded() -> None:
    core = make(device=2, host=0, storage=False)
    for at in range(KEPT + 100):
        lease = core.lease(Toks([10 * at, 10 * at + 1, 2, 3]), "r")
        assert core.allocate(lease, PAGE) is None
        core.commit(lease, PAGE)
        core.release(lease)
        core.take_effects()
    assert len(core.state.evictions) == KEPT
    last = KEPT + 100 - 3
    assert facts(core, Toks([10 * last, 10 * last + 1, 2, 3, 4])) == [(0, 4, "nowhere", "evicted")]
    assert facts(core, Toks([10, 11, 2, 3, 4])) == [(0, 4, "nowhere", "never_seen")]
    whole(core)


def test_spans_that_say_the_same_are_one() -> None:
    core = make()
    cached(core, A)
    lease = core.lease(Toks(range(13)), "b")  # splits the node
    assert facts(core) == [(0, 40, "device", None)]
    core.release(lease)
    whole(core)
