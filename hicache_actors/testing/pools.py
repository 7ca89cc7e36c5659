"""The leak test of all leak tests: when everybody has gone, every pool is whole."""

from __future__ import annotations

import anyio

from hicache_actors.cache.api import HiCache
from hicache_actors.core import Core


def check_conservation(core: Core) -> None:
    """At any time: each slot is free, owned, in limbo or closed, and nothing else."""
    usage = core.usage()
    for tier in (usage.device, usage.host):
        in_use = tier.free_pages + tier.owned_pages + tier.limbo_pages
        assert in_use + tier.closed_pages == tier.total_pages, tier


def check_whole(core: Core) -> None:
    """After the last release, the last RELEASED and a reset: nothing is owned, pinned, open or waiting."""
    usage = core.usage()
    for tier in (usage.device, usage.host):
        assert tier.free_pages == tier.total_pages, f"a pool is not whole: {tier}"
    assert usage.leases == usage.pending_acquires == 0, f"{usage.leases} leases were never released"
    assert not usage.jobs, f"jobs are still open: {usage.jobs}"


def check_staging(cache: HiCache) -> None:
    """While no storage call runs: no staging slot is held."""
    storage = cache.snapshot().storage
    staging = {} if storage is None else storage.staging
    for direction, slots in staging.items():
        assert slots.held_pages == slots.hung_pages == 0, (
            f"staging slots of a {direction} were never given back: {slots}"
        )


async def pools_whole(cache: HiCache, *, deadline_s: float = 10.0) -> None:
    """Let everything end, forget everything, and find every slot free.  driver="auto"; no lease may be open."""
    await cache.drain(deadline_s)
    with anyio.fail_after(deadline_s):
        await cache.pipelines.idle()
    check_conservation(cache.core)
    await cache.reset()
    with anyio.fail_after(deadline_s):
        await cache.pipelines.idle()
    check_whole(cache.core)
    check_staging(cache)
