"""From `lease` to `release`: pages, commits, twins, accounts, drains."""

from __future__ import annotations

import pytest

from hicache_actors.core.words import Shortfall, StartDrain, StartWriteBack, unpack_slots
from hicache_actors.errors import UsageError

from .kit import PAGE, Toks, answer, cached, compute, host_only, make, of_type, pages_of, settle, whole

A = Toks(range(41))


def test_pages_are_in_prompt_order() -> None:
    core = make()
    cached(core, Toks(range(21)))
    lease = core.lease(A, "a")
    found = list(lease.pages)
    assert (lease.ready_tokens, lease.usable_tokens, lease.capacity_tokens, len(found)) == (20, 20, 20, 5)
    assert core.allocate(lease, 10) is None
    assert list(lease.pages)[:5] == found
    assert (len(lease.pages), lease.capacity_tokens) == (8, 30)
    assert core.allocate(lease, 2) is None, "fits the open page"
    assert (len(lease.pages), lease.capacity_tokens) == (8, 32)
    core.release(lease)
    whole(core)


def test_commit_publishes_whole_pages_and_keeps_the_open_one() -> None:
    core = make()
    lease = core.lease(A, "a")
    core.allocate(lease, 41)
    first = core.commit(lease, 10)
    assert (first.published_pages, first.private_pages, first.failed) == (2, 9, None)
    assert core.commit(lease, 11).published_pages == 0
    assert core.commit(lease, 5).published_pages == 0, "less than before takes nothing back"
    last = core.commit(lease, 41)
    assert (last.published_pages, last.private_pages) == (8, 1)
    assert pages_of(core.match(A)) == (10, 10, 10)
    core.release(lease)
    whole(core)


def test_generated_tokens_are_published_too() -> None:
    core = make()
    lease = core.lease(A, "a")
    core.allocate(lease, 60)
    core.commit(lease, 41)
    longer = A.plus(range(500, 519))
    lease.tokens = longer  # a Prompt grows in place; this one does not
    assert core.commit(lease, 59).published_pages == 4
    assert pages_of(core.match(longer)) == (14, 14, 14)
    core.release(lease)
    whole(core)


@pytest.mark.parametrize("n_tokens", [-1, 42, 45])
def test_commit_of_what_is_not_there_is_an_error(n_tokens: int) -> None:
    core = make()
    lease = core.lease(A, "a")
    core.allocate(lease, 41 if n_tokens != 42 else 44)
    with pytest.raises(UsageError, match="commit"):
        core.commit(lease, n_tokens)
    core.release(lease)
    whole(core)


def test_a_request_has_one_lease() -> None:
    core = make()
    lease = core.lease(A, "a")
    with pytest.raises(UsageError, match="'a' has a lease"):
        core.lease(A, "a")
    core.release(lease)
    core.release(core.lease(A, "a"))
    whole(core)


def test_a_released_lease_is_refused() -> None:
    core = make()
    lease = compute(core, A, "a")
    settle(core)
    core.release(lease)
    for call in (
        lambda: core.load(lease),
        lambda: core.allocate(lease, 1),
        lambda: core.commit(lease, 4),
        lambda: core.hold(lease, object()),
    ):
        with pytest.raises(UsageError, match="has been released"):
            call()
    with pytest.raises(UsageError, match="not negative"):
        core.allocate(core.lease(A, "b"), -1)
    core.release(core.state.leases["b"])
    whole(core)


def test_release_is_idempotent() -> None:
    core = make()
    lease = compute(core, A, "a")
    settle(core)
    free = core.usage().device.free_pages
    core.release(lease)
    core.release(lease, after="event")
    assert not of_type(core.take_effects(), StartDrain)
    assert core.usage().device.free_pages == free + 1, "the open page, once"
    whole(core)


def test_two_requests_one_prefix_keep_their_own_pages() -> None:
    """The second to commit moves its lock to the twin; no page table is rewritten; later pages hang below the twin."""
    core = make()
    first, second = (core.lease(A, rid) for rid in "ab")
    for lease in (first, second):
        core.allocate(lease, 41)
    pages = [list(lease.pages) for lease in (first, second)]
    assert core.commit(first, 40).published_pages == 10
    done = core.commit(second, 28)
    assert (done.published_pages, done.private_pages) == (0, 11)
    assert [list(lease.pages) for lease in (first, second)] == pages
    settle(core)
    core.release(first)
    core.check()
    assert core.usage().device.evictable_pages == 3, "the twin is pinned by the second"
    longer = A.plus(range(100, 111))
    second.tokens = longer
    core.allocate(second, 11)
    done = core.commit(second, 52)
    assert (done.published_pages, done.private_pages) == (3, 10)
    assert pages_of(core.match(longer)) == (12, 12, 12)
    settle(core)
    free = core.usage().device.free_pages
    core.release(second)
    assert core.usage().device.free_pages == free + 10
    whole(core)


def test_pages_on_the_host_take_over_fresh_device_pages() -> None:
    core = make()
    host_only(core, A)
    lease = core.lease(A, "a")
    core.allocate(lease, 41)
    assert core.commit(lease, 40).published_pages == 10
    assert not of_type(core.take_effects(), StartWriteBack), "they have a host copy"
    assert pages_of(core.match(A)) == (10, 10, 10)
    core.release(lease)
    whole(core)


# -- account ----------------------------------------------------------------------------------------------------------------


def test_account_of_a_prompt_on_two_tiers() -> None:
    core = make()
    host_only(core, A)
    core.release(compute(core, Toks(range(9)), "a"))
    settle(core)
    prompt = A.plus(range(600, 610))
    lease = core.lease(prompt, "b")
    assert lease.account.reasons == {"open_page": 3, "not_loaded": 32, "not_cached": 8}
    core.load(lease)
    account = lease.account
    assert (account.device, account.host, account.storage, account.computed) == (8, 32, 0, 11)
    assert account.reasons == {"open_page": 3, "not_cached": 8}
    settle(core)
    core.release(lease)
    whole(core)


def test_account_names_why_host_pages_were_not_loaded() -> None:
    core = make(12, 40)
    host_only(core, A)
    held = core.lease(Toks([9]), "held")
    core.allocate(held, 4 * PAGE)
    lease = core.lease(A, "a")
    assert isinstance(core.load(lease), Shortfall)
    assert lease.account.reasons == {"open_page": 1, "device_capacity": 40}
    core.load(lease, 12)
    assert lease.account.reasons == {"open_page": 1, "load_limit": 28}
    settle(core)
    for other in (held, lease):
        core.release(other)
    whole(core)


# -- drains -----------------------------------------------------------------------------------------------------------------


def test_an_event_ever_given_makes_a_drain() -> None:
    """Whether it has fired is local; that it was given is not."""
    core = make()
    lease = core.lease(A, "a")
    core.allocate(lease, 41)
    core.commit(lease, 20, after="forward 1")
    core.commit(lease, 40, after="forward 2")
    settle(core)
    core.release(lease)
    (drain,) = of_type(core.take_effects(), StartDrain)
    assert drain.events == ("forward 1", "forward 2")
    usage = core.usage()
    assert (usage.device.limbo_pages, usage.device.evictable_pages, usage.leases) == (1, 0, 0)
    assert pages_of(core.match(A)) == (10, 10, 10), "published pages stay matchable"
    answer(core)
    usage = core.usage()
    assert (usage.device.limbo_pages, usage.device.evictable_pages) == (0, 10)
    whole(core)


def test_one_drain_per_section_and_one_for_each_hold() -> None:
    core = make(60)
    leases = [compute(core, Toks([n] * 9), f"r{n}") for n in range(4)]
    settle(core)
    core.hold(leases[0], "thread")
    slots = [unpack_slots(lease.private_slots()) for lease in leases]
    for lease in leases[:3]:
        core.release(lease, after=f"event {lease.rid}")
    core.release(leases[3])
    drains = of_type(core.take_effects(), StartDrain)
    assert {(drain.events, drain.holds) for drain in drains} == {
        (("event r0",), ("thread",)),
        (("event r1", "event r2"), ()),
    }
    assert core.usage().device.limbo_pages == sum(map(len, slots[:3]))
    assert core.wire().rows == tuple(sorted(drain.job for drain in drains))
    (held,) = [drain.job for drain in drains if drain.holds]
    answer(core, only=lambda job: job != held)
    assert core.usage().device.limbo_pages == len(slots[0])
    assert core.needs_step
    whole(core)


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_what_a_failed_pass_should_have_computed_leaves_the_device(policy: str) -> None:
    """Nothing is saved yet, so no write-back learns of it."""
    core = make(write_policy=policy)
    core.release(compute(core, Toks(range(20)), "well"))
    lease = compute(core, A, "a", after="pass")
    other = core.lease(A, "b")
    beside = compute(core, Toks([7] * 9), "beside")
    for ended in (lease, beside):
        core.release(ended, after="pass")
    (drain,) = of_type(core.take_effects(), StartDrain)
    assert pages_of(core.match(A)) == (10, 10, 10)
    core.apply(0, [], [-drain.job])
    core.check()
    assert pages_of(core.match(A)) == (5, 5, 5), "what was computed before stays"
    assert pages_of(core.match(Toks([7] * 9))) == (2, 2, 2), "it was there when its commit was made"
    assert (other.failed, core.state.counts["uncomputed_pages"]) == ("load_failed", 5)
    core.release(other)
    settle(core)
    assert core.usage().device.limbo_pages == 0
    whole(core)


@pytest.mark.parametrize("shared", [True, False])
def test_which_events_are_one_object_decides_nothing(shared: bool) -> None:
    """It is this rank's own affair: others may have an event for each request, or one for each pass."""
    core = make(write_policy="write_back")
    first = compute(core, Toks(range(20)), "first", after="pass")
    second = compute(core, A, "second", after="pass" if shared else "its own")
    core.release(second)
    (drain,) = of_type(core.take_effects(), StartDrain)
    core.apply(0, [], [-drain.job])
    core.check()
    assert pages_of(core.match(A)) == (5, 5, 5)
    assert first.failed is None
    core.release(first)
    settle(core)
    whole(core)
