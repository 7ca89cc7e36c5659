"""A write-back of one batch that waits for no event is copied without a pipeline of its own, and ends in all the same ways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
import pytest

from hicache_actors import Shortfall
from hicache_actors.cache.handles import Lease
from hicache_actors.config import Deadlines
from hicache_actors.cuda_ext.device import Ticket, Work
from hicache_actors.errors import HiCacheError
from hicache_actors.memory.shapes import BATCH_PAGES
from hicache_actors.testing.lives import run_checked
from hicache_actors.testing.small import Small, open_small, prompt
from hicache_actors.transfer.completions import Completion

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2])
PAGES = 6


def _lease(small: Small, pages: int = PAGES) -> Lease:
    """All of a prompt is allocated, nothing committed."""
    asked = prompt(pages)
    lease = small.cache.lease(asked, "r")
    assert not isinstance(lease.allocate(len(asked)), Shortfall)
    small.model.forward(asked, lease.pages, 0, len(asked))
    return lease


def _pipelines(small: Small) -> int:
    """How many write-backs have had one."""
    return sum(jobs.started for jobs in small.cache._parts.system.snapshot().jobs if jobs.name == "write_back")


def _written_pages(small: Small) -> int:
    return small.cache.movers.flows.snapshot()["write_back"].pages


@SEEDS
def test_one_batch_of_computed_pages_needs_no_pipeline(seed: int | None) -> None:
    async def main() -> None:
        async with open_small(device_pages=PAGES + 2, host_pages=PAGES + 2) as small:
            lease = _lease(small)
            lease.commit(len(lease.prompt))
            lease.release()
            await small.cache.pipelines.idle()
            assert (_written_pages(small), _pipelines(small)) == (PAGES, 0)
            assert small.cache.core.usage().host.evictable_pages == PAGES

    run_checked(main, seed)


@SEEDS
@pytest.mark.parametrize("why", ["an event", "two batches"])
def test_who_has_to_wait_or_to_go_on_has_a_pipeline(why: str, seed: int | None) -> None:
    async def main() -> None:
        pages = PAGES if why == "an event" else BATCH_PAGES + 1
        async with open_small(device_pages=pages + 2, host_pages=pages + 2) as small:
            lease, passed = _lease(small, pages), Completion()
            lease.commit(len(lease.prompt), after=passed if why == "an event" else None)
            lease.release()
            passed.finish()
            await small.cache.pipelines.idle()
            assert (_written_pages(small), _pipelines(small)) == (pages, 1)

    run_checked(main, seed)


@SEEDS
def test_a_copy_that_is_late_is_given_up_and_still_keeps_its_slots(seed: int | None) -> None:
    async def main() -> None:
        async with open_small(
            device_pages=PAGES + 2, host_pages=PAGES + 2, deadlines=Deadlines(write_back_s=1.0)
        ) as small:
            with small.device.gate("write_back"):
                lease = _lease(small)
                lease.commit(len(lease.prompt))
                lease.release()
                await anyio.sleep(0.9)
                assert "write_back_failed_pages" not in small.cache.snapshot().counts
                await anyio.sleep(0.2)
                assert small.cache.snapshot().counts["write_back_failed_pages"] == PAGES
                assert small.cache.core.usage().host.limbo_pages == PAGES
            await small.cache.pipelines.idle()
            assert small.cache.core.usage().host.limbo_pages == 0
            assert (_written_pages(small), _pipelines(small)) == (0, 0)

    run_checked(main, seed)


async def test_nothing_is_submitted_once_the_task_group_has_died() -> None:
    """The failure comes between the decision and the copy."""

    async def bug() -> None:
        raise KeyError("planted")

    async def life() -> None:
        async with open_small(device_pages=PAGES + 2, host_pages=PAGES + 2, check_pools=False) as small:
            lease = _lease(small)
            small.cache._parts.system.spawn("bug", bug)  # begins in the next turn of the loop, before the copy
            lease.commit(len(lease.prompt))
            lease.release()
            await small.cache.pipelines.idle()
            assert small.cache.core.degraded
            assert small.device.stream("write_back").counts().submitted == 0

    with pytest.raises(HiCacheError, match="planted"):
        await life()


async def test_passes_and_readers_go_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is scheduled in the section that decides runs before the copy is planned."""
    async with open_small(device_pages=PAGES + 2, host_pages=PAGES + 2) as small:
        seen: list[str] = []
        stream = small.device.stream("write_back")
        submit: Callable[[Work], Ticket] = stream.submit

        def watched(work: Work) -> Ticket:
            seen.append("copy")
            return submit(work)

        monkeypatch.setattr(stream, "submit", watched)
        lease = _lease(small)
        with small.cache.driver.together():
            lease.commit(len(lease.prompt))
            lease.release()
            asyncio.get_running_loop().call_soon(seen.append, "reader")
        await small.cache.pipelines.idle()
        assert seen == ["reader", "copy"]
