"""Reports about decisions: what the engine's thread pays, and what is decided for nothing."""

from __future__ import annotations

from array import array
from time import perf_counter
from typing import Final

from hicache_actors.bench.figures import Figures, spread
from hicache_actors.bench.rig import PAGE_TOKENS, Rig, open_rig
from hicache_actors.cache.assembly import DriverKind
from hicache_actors.cache.handles import Lease
from hicache_actors.core import Core, CoreConfig
from hicache_actors.core.words import Shortfall
from hicache_actors.keys.prompt import Prompt
from hicache_actors.ranks import StepDriver

REQUESTS: Final = 64
STEP_MS: Final = 11.0  #: the reporter's GPU step
END_PAGES: Final = 8
EVICTED_PAGES: Final = 16


async def ends_of_requests(folder: str, divisor: int) -> Figures:
    """P04: 64 requests with a backup each end in one step; what the thread of decisions pays for commits and releases."""
    figures: dict[str, float | str | Figures] = {}
    drivers: tuple[DriverKind, ...] = ("step", "auto")
    for driver in drivers:
        async with open_rig(f"file://{folder}", page_bytes=64 << 10, pages=REQUESTS * END_PAGES, driver=driver) as rig:
            took_ms = [await _end_requests(rig, round_) for round_ in range(max(2, 12 // divisor))]
            await rig.backend.forget()
        figures[f"{driver}_ms"] = spread(took_ms[1:])
    return figures | {"ms_limit": STEP_MS}


async def _end_requests(rig: Rig, round_: int) -> float:
    """-> milliseconds.  With steps all requests end in one; else each call decides at once."""
    cache, stepped = rig.cache, isinstance(rig.cache.driver, StepDriver)
    if stepped:
        await cache.begin_step_async()
    leases = [_leased(rig, round_ * REQUESTS + number, END_PAGES) for number in range(REQUESTS)]
    begun_s = perf_counter()
    for lease in leases:
        lease.commit(END_PAGES * PAGE_TOKENS)
        lease.release()
    if stepped:
        cache.end_step()
    took_ms = (perf_counter() - begun_s) * 1e3
    if stepped:
        await _step_until_idle(rig)
    else:
        await rig.clear()
    return took_ms


async def _step_until_idle(rig: Rig) -> None:
    while rig.cache.needs_step:
        await rig.cache.begin_step_async()
        rig.cache.end_step()


async def submits(folder: str, divisor: int) -> Figures:
    """P05: copies submitted to the device for one step that commits 64 requests, and for loading them again."""
    pages, layers = 4, 2
    async with open_rig(f"file://{folder}", page_bytes=64 << 10, pages=REQUESTS * pages, driver="step") as rig:
        cache = rig.cache

        def submitted() -> int:
            return int(cache.snapshot().device.device["submitted"])

        await cache.begin_step_async()
        leases = [_leased(rig, number, pages) for number in range(REQUESTS)]
        for lease in leases:
            lease.commit(pages * PAGE_TOKENS)
            lease.release()
        cache.end_step()
        await _step_until_idle(rig)
        written = submitted()
        await cache.begin_step_async()
        filler = _leased(rig, REQUESTS, REQUESTS * pages)
        filler.release()
        cache.end_step()
        await _step_until_idle(rig)
        before = submitted()
        await cache.begin_step_async()
        lease = cache.lease(rig.prompt(1, pages), "again")
        loading = lease.load()
        assert not isinstance(loading, Shortfall), loading
        cache.end_step()
        await _step_until_idle(rig)
        loaded = submitted() - before
        lease.release()
        await cache.begin_step_async()
        cache.end_step()
        await _step_until_idle(rig)
        await rig.backend.forget()
    return {
        "nodes": REQUESTS,
        "write_back_submits": written,
        "write_back_submits_limit": REQUESTS * pages * layers * 2,  # one a page, layer, and K or V
        "load_submits": loaded,
        "load_submits_limit": layers,  # one a layer, so that a forward pass can follow
    }


async def evictions(folder: str, divisor: int) -> Figures:
    """P06: one call that evicts 16 pages, in trees of 1,000, 10,000 and 50,000 leaves."""
    figures: dict[str, float | str | Figures] = {}
    for leaves in (1_000, 10_000, 50_000):
        core = Core(CoreConfig(PAGE_TOKENS, leaves // divisor, 0, write_policy="none", storage=False))
        for number in range(leaves // divisor):
            _publish(core, number)
        took_us: list[float] = []
        lease = core.lease(Prompt([]), "evictor")
        for _ in range(min(50, leaves // divisor // EVICTED_PAGES)):
            begun_s = perf_counter()
            refused = core.allocate(lease, EVICTED_PAGES * PAGE_TOKENS)
            took_us.append((perf_counter() - begun_s) * 1e6)
            assert refused is None, refused
        figures[f"evict_16_of_{leaves}_us"] = spread(took_us, digits=1)
        core.release(lease)
        core.close()
    return figures


async def misses_evict(folder: str, divisor: int) -> Figures:
    """P26: useful host pages that are lost to 64 fetches of prompts that the store does not have."""
    pages, prompts = 8, 16
    async with open_rig(
        f"file://{folder}", page_bytes=64 << 10, pages=pages * prompts, host_pages=pages * prompts
    ) as rig:
        for number in range(prompts):
            await rig.store(rig.prompt(number, pages), f"useful-{number}")
        before = _on_host(rig)
        for number in range(REQUESTS // divisor):
            await rig.cache.prefetch(rig.prompt(1000 + number, pages), f"missing-{number}").wait()
        after = _on_host(rig)
        await rig.clear()
        await rig.backend.forget()
    return {"host_pages_before": before, "host_pages_lost": before - after, "host_pages_lost_limit": 0}


def _on_host(rig: Rig) -> int:
    return rig.cache.core.usage().host.owned_pages


def _leased(rig: Rig, number: int, pages: int) -> Lease:
    lease = rig.cache.lease(rig.prompt(number, pages), f"request-{number}")
    refused = lease.allocate(pages * PAGE_TOKENS)
    assert not isinstance(refused, Shortfall), refused
    return lease


def _publish(core: Core, number: int) -> None:
    lease = core.lease(Prompt(array("q", range(number << 16, (number << 16) + PAGE_TOKENS))), "maker")
    core.allocate(lease, PAGE_TOKENS)
    core.commit(lease, PAGE_TOKENS)
    core.release(lease)
