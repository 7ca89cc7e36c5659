"""A device that is gone, and events that fail: caching ends, or the one copy; what was not computed is never stored."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import anyio
import msgspec
import pytest

from hicache_actors import Shortfall, TransferError, UsageError
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.config import WritePolicy
from hicache_actors.core.words import Match
from hicache_actors.testing.lives import LIFE_PAGES, live, reference_token, request, run_checked
from hicache_actors.testing.pools import check_conservation, check_whole
from hicache_actors.testing.small import evict_device, open_small, prompt, small_config
from hicache_actors.testing.witness import Witness
from hicache_actors.transfer.completions import Completion

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2, 3])


@SEEDS
@pytest.mark.parametrize("after_s", [0.0, 0.0021, 0.0025, 0.01, 0.015])
def test_a_device_that_is_lost_ends_caching_and_not_the_engine(
    after_s: float, seed: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with open_small(backend=MemoryBackend(), check_pools=False) as small:
            cache = small.cache
            witness = Witness(cache, monkeypatch)
            small.device.throttle(latency_s=0.001)
            wanted = reference_token(small, prompt(LIFE_PAGES))
            async with anyio.create_task_group() as group:

                async def lose() -> None:
                    await anyio.sleep(after_s)
                    small.device.lose(TransferError("planted"))

                group.start_soon(lose)
                assert await live(small) == [wanted] * 4
            other = prompt(3, family=4)  # something new to copy
            assert await request(small, other) == reference_token(small, other)
            await cache.pipelines.idle()
            with anyio.fail_after(1.0):  # the device's actor takes the news of a failed copy in a turn of its own
                while cache.state == "open":  # noqa: ASYNC110
                    await anyio.sleep(0.001)
            assert cache.state == "degraded"
            assert cache.match(prompt(LIFE_PAGES)) == Match(0, 0, 0)
            assert await request(small, prompt(3)) == reference_token(small, prompt(3))
            await cache.pipelines.idle()
            check_conservation(cache.core)
            await cache.reset()
            check_whole(cache.core)
            witness.check()
        # No bug of ours: closing does not raise.
        assert small.cache.state == "closed"
        assert "planted" in (small.cache.snapshot().failure or "")
        assert caplog.text.count("cache_degraded") == 1

    run_checked(main, seed)


@SEEDS
def test_a_request_whose_device_is_lost_during_its_load_is_computed(seed: int | None) -> None:
    async def main() -> None:
        async with open_small(check_pools=False) as small:
            asked = prompt(4)
            await request(small, asked)
            await small.cache.drain(5.0)
            await evict_device(small)
            gate = small.device.gate("load")
            gate.allow(1)
            async with small.cache.acquire(asked) as lease:
                assert lease.loading is not None
                await lease.loading.ready(0)
                small.device.lose(TransferError("planted"))
                with pytest.raises(TransferError):
                    await lease.loading.ready(1)
                verdict = await lease.loading.verdict()
                assert verdict.failed in ("load_failed", "degraded")
            assert await request(small, asked) == reference_token(small, asked)
            assert small.cache.state == "degraded"

    run_checked(main, seed)


@SEEDS
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("kind", ["ticket", "future"])
def test_pages_whose_forward_failed_are_nobodys(seed: int | None, kind: str, policy: WritePolicy) -> None:
    """The event of a commit ends with an error: what the forward should have written is not there.

    Who learns of it first: the write-back, or, where none is made, the drain that waits for the pass.
    """
    config = msgspec.structs.replace(small_config(), write_policy=policy)

    async def main() -> None:
        async with open_small(config=config, backend=MemoryBackend()) as small:
            failed: Any = Completion() if kind == "ticket" else Future()
            asked = prompt(3)
            async with small.cache.acquire(asked) as lease:
                assert not isinstance(lease.allocate(13), Shortfall)
                lease.commit(13, after=failed)
                lease.release(after=failed)
            other = small.cache.lease(prompt(3), "other")
            assert other.usable_tokens == 12
            error = TransferError("the forward failed")
            if isinstance(failed, Completion):
                failed.finish(error)
            else:
                failed.set_exception(error)
            while small.cache.pipelines.open_jobs:  # noqa: ASYNC110
                await anyio.sleep(0.001)
            assert other.failed is not None
            other.release()
            usage = small.cache.core.usage()
            assert small.cache.state == "open"
            assert usage.stored_pages == 0
            assert usage.host.owned_pages == usage.device.owned_pages == 0
            assert small.cache.match(asked).device == 0
            refused = small.cache.snapshot().counts.get("write_back_failed_pages", 0)
            assert refused == (3 if policy == "write_through" else 0)
            assert small.cache.snapshot().counts["uncomputed_pages"] == 3
            assert await request(small, asked) == reference_token(small, asked)

    run_checked(main, seed)


class Broken:
    """An event of a device that is gone."""

    def query(self) -> bool:
        raise RuntimeError("planted")


@SEEDS
def test_an_event_that_cannot_be_asked_means_that_the_device_is_gone(seed: int | None) -> None:
    async def main() -> None:
        async with open_small(check_pools=False) as small:
            async with small.cache.acquire(prompt(3, extra=0)) as lease:
                assert not isinstance(lease.allocate(12), Shortfall)
                lease.commit(12, after=Broken())
                lease.release(after=Broken())
            await anyio.sleep(0.1)
            assert small.cache.state == "degraded"
            assert await request(small, prompt(3)) == reference_token(small, prompt(3))
            await small.cache.pipelines.idle()
            await small.cache.reset()
            check_whole(small.cache.core)

    run_checked(main, seed)


@pytest.mark.parametrize("event", ["done", 7, object(), True])
def test_what_is_no_event_is_refused_at_once(event: object) -> None:
    async def main() -> None:
        async with open_small() as small:
            async with small.cache.acquire(prompt(3, extra=0)) as lease:
                assert not isinstance(lease.allocate(12), Shortfall)
                with pytest.raises(UsageError, match="no event"):
                    lease.commit(12, after=event)  # type: ignore[arg-type]
                with pytest.raises(UsageError, match="no event"):
                    lease.hold(event)  # type: ignore[arg-type]
                with pytest.raises(UsageError, match="no event"):
                    lease.release(after=event)  # type: ignore[arg-type]
                assert small.cache.core.usage().leases == 1
            assert small.cache.core.usage().leases == 0

    run_checked(main, None)
