"""Field reports, section F: what a request is refused, what a setting is turned into, and what a size counts.

Sizes are scaled to pages of 4 tokens.  B106 is here in its write_through form.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.to_thread
import pytest

from hicache_actors import ConfigError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Slow
from hicache_actors.config import PrefetchPolicy
from hicache_actors.core.words import Account
from hicache_actors.keys.prompt import Prompt
from hicache_actors.testing.small import Small, prompt

from .kit import PAGE, VIRTUAL, opened, store

VIRTUAL_ONCE = pytest.mark.parametrize("anyio_backend", ["virtual:1"], indirect=True)


# -- B101: the cap on what may be fetched -----------------------------------------------------------------------------


async def _ask_at_once(small: Small, prompts: Sequence[Prompt], deadline_s: float | None = None) -> list[Account]:
    """Acquire all prompts at the same time -> their accounts, in the order of the prompts."""
    accounts: list[Account | None] = [None] * len(prompts)

    async def ask(number: int) -> None:
        async with small.cache.acquire(prompts[number], deadline_s=deadline_s) as lease:
            accounts[number] = lease.account

    async with anyio.create_task_group() as group:
        for number in range(len(prompts)):
            group.start_soon(ask, number)
    return [account for account in accounts if account is not None]


@pytest.mark.parametrize("host_per_device", [1, 2])
@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
@VIRTUAL_ONCE
async def test_b101_a_fetch_that_finds_the_budget_used_up_is_tried_again(
    anyio_backend: object, policy: PrefetchPolicy, host_per_device: int
) -> None:
    """Given 24 stored prompts of 60 pages, and a host of the device's size or twice that, half of which may be in fetches.
    When all are asked for at once on an empty cache.
    Then every prompt is hit whole: who finds the budget used up asks again when a fetch has ended."""
    backend = MemoryBackend()
    prompts = [prompt(60, family=family) for family in range(24)]
    await store(backend, *prompts)
    device_pages = 24 * 60
    async with opened(
        device_pages=device_pages,
        host_pages=device_pages * host_per_device,
        backend=Slow(backend, 0.02, jitter_s=0.01),
        prefetch_policy=policy,
    ) as small:
        accounts = await _ask_at_once(small, prompts)
        assert [account.storage for account in accounts] == [60 * PAGE] * 24
        assert all("host_capacity" not in account.reasons for account in accounts)
        assert (small.cache.snapshot().counts.get("prefetch_host_capacity", 0) > 0) == (host_per_device == 1)
        assert small.cache.core.usage().staged_pages == 0


@VIRTUAL
async def test_b101_who_waits_for_budget_waits_no_longer_than_its_deadline(anyio_backend: object) -> None:
    """Given a fetch that holds the whole budget for a second.
    When two others are asked for, one of which will not wait that long.
    Then that one is served without its pages in time, and says why; the other gets them."""
    backend = MemoryBackend()
    large, hasty, patient = (prompt(8, family=family) for family in range(3))
    await store(backend, large, hasty, patient)
    ended_s: dict[str, float] = {}
    got: dict[str, Account] = {}
    slow = Slow(backend, 1.0)
    async with opened(device_pages=40, host_pages=16, backend=slow, prefetch_policy="wait_complete") as small:

        async def ask(name: str, asked: Prompt, deadline_s: float) -> None:
            async with small.cache.acquire(asked, deadline_s=deadline_s) as lease:
                ended_s[name], got[name] = anyio.current_time() - begun_s, lease.account

        begun_s = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(ask, "large", large, 10.0)
            await anyio.sleep(0.1)
            group.start_soon(ask, "hasty", hasty, 1.5)
            group.start_soon(ask, "patient", patient, 10.0)
        assert got["large"].storage == got["patient"].storage == 8 * PAGE
        assert (got["hasty"].storage, got["hasty"].reasons["host_capacity"]) == (0, 8 * PAGE)
        assert 1.5 <= ended_s["hasty"] - 0.1 < 1.51
        assert small.cache.core.usage().pending_acquires == 0


@VIRTUAL
async def test_b101_who_waits_for_budget_may_leave(anyio_backend: object) -> None:
    """Given a fetch that holds the whole budget, and another request that waits for it.
    When the second is cancelled, the first ends, and the second is asked for anew.
    Then nothing of it has been left behind, and it gets its pages."""
    backend = MemoryBackend()
    first, second = prompt(8, family=1), prompt(8, family=2)
    await store(backend, first, second)
    async with opened(device_pages=40, host_pages=16, backend=Slow(backend, 0.5)) as small:
        async with anyio.create_task_group() as group:
            group.start_soon(_ask_at_once, small, [first])
            await anyio.sleep(0.1)
            with anyio.move_on_after(0.7) as scope:
                await _ask_at_once(small, [second])
            assert scope.cancelled_caught
            assert small.cache.core.usage().pending_acquires == 1
        (account,) = await _ask_at_once(small, [second])
        assert account.storage == 8 * PAGE


async def test_b101_a_budget_of_nothing_is_refused_at_the_start() -> None:
    """Given a host of one page, of which half a page may be in fetches.
    When a cache with storage is opened.
    Then it is refused, and the setting, the reason and what is allowed are named."""
    with pytest.raises(ConfigError, match="at most half of the slots") as caught:
        async with opened(host_pages=1, backend=MemoryBackend()):
            pass
    assert (caught.value.field, caught.value.value) == ("host.pages", 1)
    assert caught.value.allowed.startswith("at least 2 pages")
