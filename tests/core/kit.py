"""Helpers of the Core tests: prompts, a driver that answers jobs, the usual beginnings."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hicache_actors.core import Core, CoreConfig, CoreLease
from hicache_actors.core.words import Effect, Match, Phase, Wake, encode_result
from hicache_actors.keys.scope import NO_SCOPE, Scope

PAGE = 4
ALL = 1 << 20  # more pages than any job has


class Toks:
    """The least that Core needs of a prompt."""

    def __init__(self, tokens: Iterable[int], scope: Scope = NO_SCOPE) -> None:
        self._tokens = array("q", tokens)
        self._scope = scope

    @property
    def packed(self) -> memoryview:
        return memoryview(self._tokens).cast("B")

    @property
    def scope(self) -> Scope:
        return self._scope

    def __len__(self) -> int:
        return len(self._tokens)

    def plus(self, tokens: Iterable[int]) -> Toks:
        return Toks([*self._tokens, *tokens], self._scope)


def make(device: int = 40, host: int = 40, **settings: Any) -> Core:
    settings.setdefault("prefetch_threshold_tokens", 0)
    return Core(CoreConfig(page_size=PAGE, device_pages=device, host_pages=host, **settings))


def answer(
    core: Core,
    results: dict[int, int] | None = None,
    hits: dict[int, int] | None = None,
    *,
    release: bool = True,
    only: Callable[[int], bool] = lambda _: True,
) -> list[Effect]:
    """One round: every job on the wire that ``only`` lets through answers fully, or as told -> effects.  Checks Core."""
    effects = core.take_effects()
    wire = core.wire()
    values: list[tuple[int, Phase, int]] = []
    for job, phase in wire.slots:
        if only(job):
            if phase is Phase.HIT:
                values.append((job, phase, (hits or {}).get(job, ALL)))
            else:
                values.append((job, phase, (results or {}).get(job, encode_result(ALL))))
    core.apply(core.now_ms, values, [job for job in wire.rows if release and only(job)])
    core.check()
    effects += core.take_effects()
    core.check()
    return effects


def settle(core: Core, results: dict[int, int] | None = None, hits: dict[int, int] | None = None) -> list[Effect]:
    """Rounds until no job is open."""
    effects = []
    for _ in range(100):
        effects += answer(core, results, hits)
        if not core.state.jobs.open:
            return effects
    raise AssertionError(f"jobs stay open: {core.usage().jobs}")


def compute(core: Core, tokens: Toks, rid: str, after: object | None = None) -> CoreLease:
    """Lease, allocate and commit all of a prompt."""
    lease = core.lease(tokens, rid)
    assert core.allocate(lease, len(tokens) - lease.capacity_tokens) is None
    core.commit(lease, len(tokens), after)
    core.check()
    return lease


def cached(core: Core, tokens: Toks) -> None:
    """The prompt is on both tiers (and stored), nobody leases it."""
    lease = compute(core, tokens, "maker")
    settle(core)
    core.release(lease)
    core.check()


def host_only(core: Core, tokens: Toks) -> None:
    """The prompt is on the host, everything unpinned has left the device."""
    cached(core, tokens)
    clear_device(core)


def clear_device(core: Core) -> None:
    lease = core.lease(Toks([]), "clear")
    pages = core.usage().device
    assert core.allocate(lease, (pages.free_pages + pages.evictable_pages) * PAGE) is None
    core.release(lease)
    core.check()


def whole(core: Core) -> None:
    """At the end: every job answers, everything is forgotten, no page is missing."""
    settle(core)
    core.reset()
    core.take_effects()
    core.check()
    usage = core.usage()
    assert usage.device.free_pages == usage.device.total_pages, usage
    assert usage.host.free_pages == usage.host.total_pages, usage
    assert not core.state.pins.all
    core.close()


def pages_of(match: Match) -> tuple[int, int, int]:
    return match.device // PAGE, match.loading // PAGE, match.host // PAGE


def of_type(effects: Sequence[Effect], kind: type) -> list[Any]:
    return [effect for effect in effects if type(effect) is kind]


def woken(effects: Sequence[Effect], waiter: int) -> Any:
    (wake,) = [effect for effect in effects if isinstance(effect, Wake) and effect.waiter == waiter]
    return wake.value
