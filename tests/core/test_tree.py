"""Walking, splitting and joining: what `match` sees."""

from __future__ import annotations

import random

import pytest

from hicache_actors.core.words import DEVICE, HOST, READY, encode_result
from hicache_actors.keys.scope import Scope

from .kit import PAGE, Toks, answer, cached, clear_device, compute, host_only, make, pages_of, settle, whole

A = Toks(range(41))


def test_match_leaves_one_token_to_compute() -> None:
    core = make()
    cached(core, Toks(range(40)))
    assert [core.match(Toks(range(n))).device for n in (0, 1, 4, 5, 8, 9, 40, 41, 60)] == [0, 0, 0, 4, 4, 8, 36, 40, 40]
    whole(core)


def test_match_ends_inside_a_node_at_a_page() -> None:
    core = make()
    cached(core, A)
    for same in range(41):
        prompt = Toks([*range(same), *range(900, 950)])
        assert core.match(prompt).device == same // PAGE * PAGE
    assert core.usage().nodes == 1, "match does not split"
    whole(core)


def test_device_loading_and_host_ends_differ() -> None:
    core = make()
    host_only(core, A)
    core.release(compute(core, Toks(range(17)), "a"))  # the first four pages are on the device again
    assert pages_of(core.match(A)) == (4, 4, 10)
    lease = core.lease(A, "b")
    core.load(lease, 3 * PAGE)
    assert pages_of(core.match(A)) == (4, 7, 10)
    settle(core)
    assert pages_of(core.match(A)) == (7, 7, 10)
    core.release(lease)
    whole(core)


def test_host_pages_that_fill_are_nothing_yet() -> None:
    core = make()
    lease = compute(core, A, "a")
    core.take_effects()
    assert pages_of(core.match(A)) == (10, 10, 10)
    usage = core.usage().host
    assert (usage.owned_pages, usage.evictable_pages) == (10, 0)
    core.release(lease)
    whole(core)


def test_scopes_do_not_mix() -> None:
    core = make()
    cached(core, A)
    for scope in (Scope(lora="a"), Scope(salt="a"), Scope(lora="a", salt="a")):
        assert core.match(Toks(range(41), scope)).host == 0
    cached(core, Toks(range(21), Scope(lora="a")))
    assert pages_of(core.match(A)) == (10, 10, 10)
    assert pages_of(core.match(Toks(range(41), Scope(lora="a")))) == (5, 5, 5)
    assert core.match(Toks(range(41), Scope(salt="a"))).host == 0
    whole(core)


@pytest.mark.parametrize("wide", [1 << 32, (1 << 32) + 1, (1 << 63) - 1])
def test_ids_beyond_32_bits_are_themselves(wide: int) -> None:
    core = make()
    cached(core, Toks([wide, *range(40)]))
    assert core.match(Toks([wide & 0xFFFFFFFF, *range(40)])).host == 0
    assert pages_of(core.match(Toks([wide, *range(40)]))) == (10, 10, 10)
    later = Toks([wide, *range(40), wide, 1, 2, 3, 4])
    assert pages_of(core.match(later)) == (10, 10, 10), "a wide id in a later turn changes nothing for the earlier ones"
    whole(core)


def test_a_split_keeps_residencies_hits_and_pins() -> None:
    core = make()
    cached(core, A)
    first = core.lease(A, "a")
    pages = list(first.pages)
    second = core.lease(Toks([*range(18), 7, 7, 7, 7]), "b")
    assert list(second.pages) == pages[:4]
    assert core.usage().nodes == 2
    core.release(first)
    assert core.usage().device.evictable_pages == 6, "the shared part is still pinned"
    core.release(second)
    core.check()
    assert core.usage().device.evictable_pages == 10
    whole(core)


def test_the_head_of_a_split_was_used_when_its_tail_was() -> None:
    """Also at a place where the pages are not yet: they come there as recent as they are."""
    core = make(write_policy="none")
    lease = compute(core, Toks(range(41)), "a")
    (node,) = core.state.tree.table.values()
    head = core.state.tree.split(node, 4)
    assert [residency.tick for residency in head.at] == [residency.tick for residency in node.at]
    assert head.at[HOST].tick > 0
    core.release(lease)
    whole(core)


def test_ranges_of_jobs_follow_a_split() -> None:
    """A partial RESULT inside the other half of a node that was split while it filled."""
    core = make()
    host_only(core, A)
    lease = core.lease(A, "a")
    (job,) = core.load(lease)  # type: ignore[misc]
    other = core.lease(Toks([*range(26), 7, 7, 7]), "b")
    assert other.usable_tokens == 24
    answer(core, {job: encode_result(8)}, only=lambda j: j == job)
    assert (lease.failed, other.failed) == ("load_failed", None)
    assert pages_of(core.match(A)) == (8, 8, 10)
    core.release(lease)
    core.release(other)
    whole(core)


def test_decode_commits_are_joined() -> None:
    core = make(400, 400)
    tokens = Toks(range(384 * PAGE + 1))
    lease = core.lease(tokens, "a")
    for page in range(1, 385):
        core.allocate(lease, page * PAGE - lease.capacity_tokens)
        core.commit(lease, page * PAGE)
    settle(core)
    assert core.usage().nodes == 384
    core.release(lease)
    core.check()
    assert core.usage().nodes <= 2
    assert pages_of(core.match(tokens)) == (384, 384, 384)
    again = core.lease(tokens, "b")
    assert again.usable_tokens == 384 * PAGE
    core.release(again)
    whole(core)


def test_unequal_nodes_are_not_joined() -> None:
    core = make()
    host_only(core, A)
    compute_more = core.lease(A, "a")
    core.load(compute_more, 4 * PAGE)  # device and host | host only
    settle(core)
    core.release(compute_more)
    core.check()
    assert core.usage().nodes == 2
    assert pages_of(core.match(A)) == (4, 4, 10)
    whole(core)


def test_the_hit_is_counted_once_per_request_and_node() -> None:
    core = make()
    host_only(core, A)
    for n in range(3):
        lease = core.lease(A, f"r{n}")
        core.load(lease)
        core.load(lease)
        settle(core)
        core.release(lease)
    (node,) = core.state.tree.table.values()
    assert node.hits == 4, "one commit, three leases"
    whole(core)


def test_priority_is_the_highest_that_used_the_node() -> None:
    core = make()
    cached(core, A)
    for n, priority in enumerate((1, 5, 2)):
        core.release(core.lease(A, f"r{n}", priority))
    assert [node.priority for node in core.state.tree.table.values()] == [5]
    whole(core)


def test_a_storage_hint_is_what_the_last_query_found() -> None:
    core = make(40, 40, prefetch_threshold_tokens=16)
    cached(core, Toks(range(9)))
    job = core.prefetch(A, "a")
    assert job is not None
    answer(core, hits={job: 3})  # below the threshold
    match = core.match(A)
    assert (match.host, match.storage_hint) == (8, 20)
    assert core.match(Toks(range(14))).storage_hint == 12, "no more than the prompt asks for"
    assert core.match(Toks([*range(8), *range(70, 80)])).storage_hint == 8
    whole(core)


def test_match_equals_a_look_at_every_page() -> None:
    """Random prompts over random trees."""
    rng = random.Random(5)
    for seed in range(20):
        core = make(300, 300)
        stored: set[tuple[int, ...]] = set()
        for n in range(30):
            length = rng.randrange(1, 60)
            tokens = [rng.randrange(2) if rng.random() < 0.1 else 0 for _ in range(length)]
            core.release(compute(core, Toks(tokens), f"{seed}.{n}"))
            stored.update(tuple(tokens[: (i + 1) * PAGE]) for i in range(length // PAGE))
            settle(core)
        for _ in range(50):
            tokens = [rng.randrange(2) if rng.random() < 0.1 else 0 for _ in range(rng.randrange(60))]
            expected = 0
            while (expected + 1) * PAGE < len(tokens) and tuple(tokens[: (expected + 1) * PAGE]) in stored:
                expected += 1
            assert pages_of(core.match(Toks(tokens))) == (expected,) * 3
        whole(core)


def test_children_are_counted_not_looked_at() -> None:
    """A counter says whether a node may go, however many children it has."""
    core = make(1000, 1, write_policy="none")
    for n in range(300):
        core.release(compute(core, Toks([0] * PAGE + [n] * PAGE), f"r{n}"))
    assert core.usage().nodes == 301
    (top,) = [node for node in core.state.tree.table.values() if node.kids]
    assert top.at[DEVICE].kids == 300
    clear_device(core)
    assert core.usage().nodes == 0
    assert top.at == ()
    whole(core)


def test_scopes_without_pages_are_forgotten() -> None:
    """Salts are often those of users or sessions: there is no end to them."""
    core = make(20, 20)
    early = Toks(range(9), Scope(salt="early"))
    kept = Toks(range(9), Scope(salt="kept"))
    cached(core, kept)
    lease = core.lease(early, "early")  # of a scope without a page so far
    for n in range(5000):
        tokens = Toks(range(9), Scope(salt=str(n)))
        core.release(core.lease(tokens, "r"))
        core.stored(tokens)
        core.explain(Toks(range(9), Scope(salt=f"asked {n}")))
        core.take_effects()
    assert len(core.state.tree.roots) < 2500
    assert core.allocate(lease, 9) is None
    core.commit(lease, 9)
    core.release(lease)
    settle(core)
    assert core.match(early).device == core.match(kept).device == 8
    core.explain(Toks(range(9), Scope(salt="never")))
    assert Scope(salt="never") not in core.state.tree.roots, "looking changes nothing"
    core.check()
    whole(core)


def test_residencies_are_kept_per_place() -> None:
    core = make()
    cached(core, A)
    (node,) = core.state.tree.table.values()
    assert [node.at[place].state for place in (DEVICE, HOST)] == [READY, READY]
    whole(core)
