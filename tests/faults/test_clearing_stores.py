"""Emptying the store while requests run: what is under way is answered by misses, what device and host hold is stored again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import msgspec
import pytest

from hicache_actors.backends.backend import Backend
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Hanging, Slow, Wrapper
from hicache_actors.config import ModelFacts
from hicache_actors.errors import BackendError, StoppedError, UsageError
from hicache_actors.testing.lives import reference_token, request, run_checked
from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.small import open_small, prompt, small_config

from .kit import stepping

LOOPS = pytest.mark.parametrize("anyio_backend", ["virtual:1", "virtual:2", "asyncio"], indirect=True)


class Gated(Wrapper):
    """Removing waits for ``gate``, and fails as long as there is an ``error``."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.gate = anyio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.asked = 0

    async def delete(self, keys: Sequence[str]) -> int:
        self.asked += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().delete(keys)


@LOOPS
async def test_what_was_stored_goes_and_what_the_host_holds_is_stored_again(anyio_backend: object) -> None:
    backend = MemoryBackend()
    foreign = {"README": b"not ours", "ab" * 32 + "_of_another_model": b"nor that"}
    backend._objects.update(foreign)
    async with open_small(device_pages=40, host_pages=10, backend=backend) as small:
        cache = small.cache
        for family in range(3):  # the host holds the last ten pages of fifteen
            await small.engine.answer(prompt(5, family=family))
            await cache.drain(5.0)
        assert len(backend._objects) == 15 + len(foreign)
        assert await cache.clear_storage() == 15
        await cache.drain(5.0)
        assert len(backend._objects) - len(foreign) == 10
        assert backend._objects.items() >= foreign.items()
        assert cache.core.usage().stored_pages == 10
        assert cache.match(prompt(5)).device == 20, "the device keeps what it has"
        await cache.reset()
        assert (await small.engine.answer(prompt(5))).account.storage == 0
        assert (await small.engine.answer(prompt(5, family=2))).account.storage == 20


@LOOPS
async def test_others_keep_their_pages_in_the_same_store(anyio_backend: object, tmp_path: Path) -> None:
    threadless = getattr(asyncio.get_running_loop(), "threadless", False)
    url = f"memory://{tmp_path.name}" if threadless else f"file://{tmp_path}/kv"
    other = msgspec.structs.replace(small_config(url=url), model=ModelFacts(model_id="other", weights="v1"))
    async with open_small(config=small_config(url=url)) as ours, open_small(config=other) as theirs:
        for small in (ours, theirs):
            await small.engine.answer(prompt(5))
            await small.cache.drain(5.0)
        assert await ours.cache.clear_storage() == 5
        for small, tokens in ((ours, 20), (theirs, 20)):
            await small.cache.drain(5.0)
            await small.cache.reset()
            assert (await small.engine.answer(prompt(5))).account.storage == tokens, "stored again, or still there"
        await theirs.cache.detach_storage(1.0)
        await ours.cache.reset()
        assert await ours.cache.clear_storage() == 5
        assert (await ours.engine.answer(prompt(5))).account.storage == 0


@LOOPS
async def test_a_fetch_that_is_under_way_gets_a_shorter_prefix(anyio_backend: object) -> None:
    backend = Hanging(MemoryBackend(), ("read",))
    async with open_small(backend=backend) as small:
        asked = prompt(5)
        first = await small.engine.answer(asked)
        await small.cache.drain(5.0)
        await small.cache.reset()
        fetching = asyncio.ensure_future(small.engine.answer(asked))
        while not backend.hung:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        assert await small.cache.clear_storage() == 5
        backend.release()
        answer = await fetching
        assert (answer.tokens, answer.account.storage) == (first.tokens, 0)


@LOOPS
async def test_half_done_is_told_and_counts_for_nothing(anyio_backend: object) -> None:
    backend = Gated(MemoryBackend())
    async with open_small(backend=backend) as small:
        cache = small.cache
        await small.engine.answer(prompt(5))
        await cache.drain(5.0)
        backend.error = BackendError("it is read-only")
        with pytest.raises(BackendError, match=r"the store has failed on rank 0; 0 objects of this rank have gone"):
            await cache.clear_storage()
        assert cache.state == "open"
        snapshot = cache.snapshot().storage
        assert snapshot is not None
        assert {lane.breaker.state for lane in snapshot.lanes.values()} == {"closed"}, "it may serve all the same"
        await cache.drain(5.0)
        assert cache.core.usage().stored_pages == 5, "they were there still"
        backend.error = None
        assert await cache.clear_storage() == 5


@LOOPS
async def test_a_store_that_hangs_is_left_in_time(anyio_backend: object) -> None:
    backend = Gated(MemoryBackend())
    async with open_small(backend=backend) as small:
        cache = small.cache
        await small.engine.answer(prompt(5))
        await cache.drain(5.0)
        backend.gate = anyio.Event()
        with anyio.fail_after(10.0), pytest.raises(BackendError, match="not all is removed in time"):
            await cache.clear_storage(0.5)
        await small.engine.answer(prompt(5, family=1))
        backend.gate.set()
        await cache.drain(5.0)
        assert await cache.clear_storage() > 0


async def test_who_asked_may_go_and_so_may_the_cache() -> None:
    backend = Gated(MemoryBackend())
    async with open_small(backend=backend, close_timeout_s=0.2) as small:
        cache = small.cache
        await small.engine.answer(prompt(5))
        await cache.drain(5.0)
        backend.gate = anyio.Event()
        asking = asyncio.ensure_future(cache.clear_storage())
        while not backend.asked:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await cache.pipelines.idle()
        last = asyncio.ensure_future(cache.clear_storage())
        while backend.asked < 2:  # noqa: ASYNC110
            await anyio.sleep(0.001)
    backend.gate.set()
    (outcome,) = await asyncio.gather(last, return_exceptions=True)
    assert isinstance(outcome, BackendError | StoppedError), outcome


async def test_what_cannot_be_cleared_says_what_can_be_done() -> None:
    class Silent(MemoryBackend):
        keys = Backend.keys

    async with open_small() as small:
        with pytest.raises(UsageError, match="no storage is attached"):
            await small.cache.clear_storage()
        await small.cache.attach_storage(Silent())
        with pytest.raises(UsageError, match=r"Silent cannot list its objects; .* advance_epoch"):
            await small.cache.clear_storage()
        with pytest.raises(UsageError, match="deadline_s"):
            await small.cache.clear_storage("soon")  # type: ignore[arg-type]
    with pytest.raises(StoppedError):
        await small.cache.clear_storage()


async def test_a_listing_that_fails_is_no_empty_store() -> None:
    class Broken(MemoryBackend):
        async def keys(self) -> AsyncIterator[str]:
            yield "the first"
            raise BackendError("planted")

    async with open_small(backend=Broken()) as small:
        with pytest.raises(BackendError, match="the store has failed"):
            await small.cache.clear_storage()


async def test_an_engine_with_steps_clears_in_its_steps() -> None:
    backend = MemoryBackend()
    async with open_small(driver="step", backend=backend) as small:
        with anyio.fail_after(10.0), pytest.raises(BackendError, match=r"no step within 0\.1 s"):
            await small.cache.clear_storage(0.1)
        async with stepping(small.cache):
            assert await small.cache.clear_storage() == 0


@pytest.mark.parametrize("seed", range(6))
def test_it_is_cleared_under_load(seed: int) -> None:
    """Requests come and go while it is emptied again and again; every answer is right, and what counts as stored is there."""

    async def main() -> None:
        draw = random.Random(seed)
        objects = MemoryBackend()
        backend = Slow(objects, 0.002, jitter_s=0.02, seed=seed)
        async with open_small(backend=backend, host_pages=24) as small:
            wanted = {family: reference_token(small, prompt(4, family=family)) for family in range(8)}

            async def serve() -> None:
                for _ in range(12):
                    family = draw.randrange(8)
                    assert await request(small, prompt(4, family=family)) == wanted[family]
                    if draw.random() < 0.1:
                        await small.cache.reset()
                    await asyncio.sleep(draw.random() * 0.05)

            cleared = 0
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(serve)
                for _ in range(8):
                    await asyncio.sleep(draw.random() * 0.1)
                    cleared += await small.cache.clear_storage()
                    check_conservation(small.cache.core)
            assert cleared > 0
            assert await small.cache.drain(60.0) == 0
            assert len(objects._objects) >= small.cache.core.usage().stored_pages
            for family in range(8):
                assert await request(small, prompt(4, family=family)) == wanted[family]

    run_checked(main, seed)
