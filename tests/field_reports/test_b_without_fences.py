"""Field reports, section B, turned round: take a fence away, and on a gated device the early reuse shows as wrong bytes.

A test that never fails proves nothing.  These are the scenarios of `test_b_late_copies` with the one thing removed that makes them
safe there: who waits for a copy takes its submission for its end, or the engine says too early that pages have been computed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hicache_actors import Shortfall
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Hanging
from hicache_actors.core.words import Slots, pack_slots
from hicache_actors.cuda_ext import ControlledDevice, NativeCpuDevice, TorchCpuDevice
from hicache_actors.cuda_ext.native.library import library, why_not
from hicache_actors.errors import TransferError
from hicache_actors.pipelines.job import OpenJob
from hicache_actors.pipelines.observer import BatchEnd
from hicache_actors.testing.small import prompt
from hicache_actors.testing.toy_model import WrongBytes
from hicache_actors.transfer.completions import fired

from .kit import PAGE, clear_device, compute, ended, opened, quiet, scribble, scribbled, store, take, until


@pytest.fixture(params=[NativeCpuDevice, TorchCpuDevice], ids=["native", "python"])
def device(request: pytest.FixtureRequest) -> ControlledDevice[Any]:
    """Real threads: in virtual time the loop itself moves the bytes."""
    if request.param is NativeCpuDevice and library() is None:
        pytest.skip(f"the native library is not in use: {why_not()}")
    made: ControlledDevice[Any] = request.param()
    return made


@pytest.fixture
def fenceless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines take a submitted copy for an ended one, and no job waits for what still touches its pages."""

    async def at_once(event: object) -> None:
        return None

    def ended(end: object) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    monkeypatch.setattr("hicache_actors.pipelines.load.fired", at_once)
    monkeypatch.setattr("hicache_actors.pipelines.write_back.fired", at_once)
    monkeypatch.setattr("hicache_actors.pipelines.write_back.end_of", ended)
    monkeypatch.setattr(OpenJob, "hold", lambda self, ending: None)


async def test_b014_without_a_fence_a_late_read_writes_into_pages_of_others(
    device: ControlledDevice[Any], fenceless: None
) -> None:
    """Given a fetch that was given up while its read still runs, and a job that does not wait for it.
    When its host pages are filled by others, and the read ends.
    Then the others' pages hold what was read."""
    backend = MemoryBackend()
    asked = prompt(6, family=1)
    await store(backend, asked)
    slow = Hanging(backend)
    async with opened(device_pages=8, host_pages=12, backend=slow, device=device) as small:
        async with small.cache.acquire(asked, deadline_s=0.1) as lease:
            assert lease.usable_tokens == 0
        await until(lambda: small.cache.core.usage().host.limbo_pages == 0)  # too early: the read has not ended
        others = [prompt(6, family=2), prompt(6, family=3)]
        for other in others:
            await compute(small, other)
            await ended(small, "write_back", "backup")
        slow.release()
        await until(lambda: slow.hung == 0)
        wrong = 0
        for other in others:
            await clear_device(small)
            try:
                await compute(small, other)
            except WrongBytes:
                wrong += 1
        assert wrong


async def test_b020_without_a_fence_a_load_copies_what_others_have_put_there(
    device: ControlledDevice[Any], fenceless: None
) -> None:
    """Given a full host pool and a held host-to-device copy of 4 of its pages, whose job does not wait for it.
    When a new prompt takes all 8 host pages.
    Then the loaded bytes are those of the new one."""
    async with opened(device_pages=20, host_pages=8, device=device, check_pools=False) as small:
        loaded, other, new = prompt(4, family=1), prompt(4, family=2), prompt(8, family=3)
        await compute(small, loaded)
        await compute(small, other)
        await quiet(small)
        await clear_device(small)
        with small.device.gate("load") as gate:
            lease = small.cache.lease(loaded, "r")
            load = lease.load()
            assert not isinstance(load, Shortfall)
            await fired(gate.reached)
            assert (await load.verdict()).valid_tokens == 4 * PAGE  # too early: nothing has been copied
            await compute(small, new)
            await ended(small, "write_back")
        await fired(small.device.stream("load").record())
        assert not isinstance(lease.allocate(len(loaded) - lease.usable_tokens), Shortfall)
        with pytest.raises(WrongBytes):
            small.model.forward(loaded, lease.pages, lease.usable_tokens, len(loaded))
        lease.release()


async def test_b021_without_a_fence_the_host_copy_is_of_who_came_later(
    device: ControlledDevice[Any], fenceless: None
) -> None:
    """Given a held device-to-host copy of 4 pages, whose job does not wait for it.
    When all device pages are asked for and overwritten.
    Then all are had, and the host copy is the pattern."""
    async with opened(device_pages=12, host_pages=12, device=device) as small:
        asked = prompt(4)
        with small.device.gate("write_back") as gate:
            await compute(small, asked)
            await fired(gate.reached)
            await quiet(small)
            taker = take(small, 12)
            scribble(small, taker)
        await fired(small.device.stream("write_back").record())
        taker.release()
        await clear_device(small)
        with pytest.raises(WrongBytes):
            await compute(small, asked)


async def test_b023_without_an_event_what_was_there_before_is_saved(device: ControlledDevice[Any]) -> None:
    """Given pages that the engine commits before its forward pass has run, without an event.
    When they are saved, and then computed.
    Then the host holds what was there before."""
    async with opened(device_pages=8, host_pages=16, device=device) as small:
        asked = prompt(4)
        lease = small.cache.lease(asked, "r")
        assert not isinstance(lease.allocate(len(asked)), Shortfall)
        scribble(small, lease)
        lease.commit(len(asked))
        lease.release()
        await ended(small, "write_back")
        small.model.forward(asked, lease.pages, 0, len(asked))
        await clear_device(small)
        with pytest.raises(WrongBytes):
            await compute(small, asked)


async def test_b034_without_a_lease_a_match_is_loaded_from_pages_of_others(device: ControlledDevice[Any]) -> None:
    """Given the host pages of a match, remembered by an engine that takes no lease on them.
    When the host is flooded before they are loaded.
    Then the load brings bytes of others."""
    async with opened(device_pages=24, host_pages=8, device=device) as small:
        asked = prompt(8)
        await compute(small, asked)
        await quiet(small)
        await clear_device(small)
        seen: list[Slots] = []
        small.cache.observe(
            lambda what: seen.append(what.source or b"") if isinstance(what, BatchEnd) and what.kind == "load" else None
        )
        await compute(small, asked)  # a load, so as to see where its pages lie
        await quiet(small)
        remembered = b"".join(seen)
        assert len(remembered) == 8 * len(pack_slots([0]))
        await clear_device(small)
        await compute(small, prompt(8, family=1))
        await quiet(small)
        lease = take(small, 9)
        plan = small.cache.movers.device.load_plan(remembered, pack_slots(lease.pages[:8]))
        assert await fired(small.device.stream("load").submit(plan.work())) is None
        with pytest.raises(WrongBytes):
            small.model.forward(asked, lease.pages, 8 * PAGE, len(asked))
        lease.release()


async def test_b036_without_a_fence_the_other_parts_write_into_a_page_of_others(
    device: ControlledDevice[Any], fenceless: None
) -> None:
    """Given a load of several copies: the first fails at once, the others are held, and its job waits for none of them.
    When all device pages are asked for and overwritten, and the copies go on.
    Then they write into pages that are somebody else's."""
    async with opened(device_pages=12, host_pages=12, device=device) as small:
        asked = prompt(4)
        await compute(small, asked)
        await quiet(small)
        await clear_device(small)
        small.device.fail_next(TransferError("planted"), stream="load")
        with small.device.gate("load") as gate:
            lease = small.cache.lease(asked, "r")
            load = lease.load()
            assert not isinstance(load, Shortfall)
            gate.allow(1)
            with pytest.raises(TransferError):
                await load.ready(0)
            lease.release()
            await quiet(small)
            taker = take(small, 12)
            scribble(small, taker)
            assert scribbled(small, taker)
        await fired(small.device.stream("load").record())
        assert not scribbled(small, taker)
        taker.release()
