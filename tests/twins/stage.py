"""Calls that directed scenarios share: twins whose movers behave as the scenario says, and small engine moves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from hicache_actors.core import CoreLease
from hicache_actors.core.words import Effect, Shortfall, StartLoad
from hicache_actors.keys.prompt import Prompt
from hicache_actors.testing.mover import Faults
from hicache_actors.testing.twin_options import TwinOptions
from hicache_actors.testing.twins import TwinRank, Twins

PAGE = 4
CALM = Faults(hang=0.0, fail=0.0)
SEEDS = range(5)


def stuck_at(page: int) -> Faults:
    """A copy or read that moves the pages before ``page`` and then hangs, with no deadline to speak of."""
    return Faults(hang=1.0, fail=0.0, deadline_ms=10.0**9, page=page)


def stage(
    seed: int, *, lag: int | None = None, stored: Sequence[tuple[Prompt, Sequence[int]]] = (), **options: object
) -> Twins:
    """Calm twins.  ``stored``: for each prompt the pages that the store of rank 0, 1, ... holds."""
    given = {
        "faults": CALM,
        "device_pages": 40,
        "host_pages": 40,
        "prefetch_policy": "timeout",
        "lag": 1 + seed % 2 if lag is None else lag,
        **options,
    }
    twins = Twins(TwinOptions(seed=seed, **given))  # type: ignore[arg-type]  # options by name
    for rank in twins.ranks:
        rank.world.storage.clear()
        for prompt, pages in stored:
            rank.world.storage.update(rank.world.prompt_keys(prompt, pages[rank.rank]))
    return twins


def prompt_of(n_tokens: int, first: int = 0) -> Prompt:
    return Prompt(range(first, first + n_tokens))


def with_faults(twins: Twins, faults: Faults, ranks: Iterable[int] = (0, 1)) -> None:
    for number in ranks:
        twins.ranks[number].world.faults = faults


def idle(twins: Twins, steps: int, *, by_ms: float | None = None) -> None:
    for _ in range(steps):
        twins.step(lambda rank: None, by_ms=by_ms)


def until(twins: Twins, condition: Callable[[], object], *, by_ms: float | None = None) -> None:
    """Empty steps until it holds; it does so within some hundred."""
    for _ in range(500):
        if condition():
            return
        twins.step(lambda rank: None, by_ms=by_ms)
    raise AssertionError("it never happened")


def forward(rank: TwinRank, lease: CoreLease, prompt: Prompt, event: Hashable) -> None:
    """Room for the whole prompt, and a pass that computes what the lease lacks."""
    if len(prompt) > lease.capacity_tokens:
        assert rank.core.allocate(lease, len(prompt) - lease.capacity_tokens) is None
    first, whole = lease.usable_tokens // PAGE, len(prompt) // PAGE
    pairs = list(zip(lease.pages[:whole], rank.world.prompt_keys(prompt, whole), strict=True))
    rank.world.forward(event, pairs[:first], pairs[first:], tuple(lease.loads))


def begin(twins: Twins, prompt: Prompt, rid: str, *, load: bool = True) -> list[CoreLease]:
    """A step that leases, loads what it can and submits the pass ``(rid, "pass")``."""

    def act(rank: TwinRank) -> CoreLease:
        lease = rank.core.lease(prompt, rid)
        if load:
            assert not isinstance(rank.core.load(lease), Shortfall)
        forward(rank, lease, prompt, (rid, "pass"))
        return lease

    return twins.step(act)


def publish(twins: Twins, prompt: Prompt, rid: str) -> list[CoreLease]:
    """Two steps: compute the prompt, then commit all of it."""
    leases = begin(twins, prompt, rid)
    twins.step(lambda rank: rank.core.commit(leases[rank.rank], len(prompt), (rid, "pass")))
    return leases


def release(twins: Twins, leases: Sequence[CoreLease], after: object = None) -> None:
    twins.step(lambda rank: rank.core.release(leases[rank.rank], after))


def clear_device(twins: Twins) -> None:
    """Evict everything unpinned from the device: a request of other tokens takes all the room there is, and goes."""

    def act(rank: TwinRank) -> None:
        lease = rank.core.lease(prompt_of(1, 10**6), "filler")
        for pages in range(rank.options.device_pages, 0, -1):
            if rank.core.allocate(lease, pages * PAGE) is None:
                break
        rank.core.release(lease)

    twins.step(act)


def host_only(twins: Twins, prompt: Prompt) -> None:
    """The prompt's whole pages end on the host, and nowhere else."""
    leases = publish(twins, prompt, "seeding")
    twins.settle()
    release(twins, leases)
    twins.settle()
    clear_device(twins)
    whole = (len(prompt) - 1) // PAGE * PAGE
    for rank in twins.ranks:
        match = rank.core.match(prompt)
        assert (match.device, match.host) == (0, whole)


def started(rank: TwinRank, kind: type[Effect]) -> list[Effect]:
    """The effects of a kind that the last section had."""
    return [effect for effect in rank.effects if isinstance(effect, kind)]


def loads_of(twins: Twins) -> list[StartLoad]:
    return [effect for rank in twins.ranks for effect in rank.effects if isinstance(effect, StartLoad)]
