"""A bug anywhere inside: the cache gives up caching, the engine lives, one error says what happened, and closing names it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from hicache_actors import HiCacheError, Shortfall
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.core.words import Match
from hicache_actors.pipelines.observer import BatchEnd, CommitEnd, Observation
from hicache_actors.testing.lives import LIFE_PAGES, live, other_tasks, reference_token, request, run_checked
from hicache_actors.testing.pools import check_conservation, check_whole
from hicache_actors.testing.small import Small, open_small, prompt
from hicache_actors.testing.witness import Witness
from hicache_actors.tiers.device import CopyEnded, DeviceTier
from hicache_actors.tiers.host import HostTier, Reserved
from hicache_actors.tiers.storage import StorageTier
from hicache_actors.tiers.storage.words import Counted

from .kit import nothing_left, stepping

SEEDS = pytest.mark.parametrize("seed", [None, 1, 2])
Plant = Callable[[Small, pytest.MonkeyPatch], None]


def _always(actor: type, message: type) -> Plant:
    """Each message of a kind is too much for its handler."""

    def plant(small: Small, patch: pytest.MonkeyPatch) -> None:
        def fail(self: object, message: object) -> None:
            raise KeyError("planted")

        patch.setitem(actor._table, message, fail)  # type: ignore[attr-defined]

    return plant


def _observer(wanted: Callable[[Observation], bool]) -> Plant:
    def plant(small: Small, patch: pytest.MonkeyPatch) -> None:
        def observe(what: Observation) -> None:
            if wanted(what):
                raise KeyError("planted")

        small.cache.observe(observe)

    return plant


def _batch(kind: str) -> Plant:
    return _observer(lambda what: isinstance(what, BatchEnd) and what.kind == kind)


def _core(path: str, *, once: bool = True) -> Plant:
    """Something that Core calls raises: the first time, or whenever it is called."""

    def plant(small: Small, patch: pytest.MonkeyPatch) -> None:
        owner: Any = small.cache.core
        *way, name = path.split(".")
        for part in way:
            owner = getattr(owner, part)
        original, calls = getattr(type(owner), name), 0

        def fail(self: object, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if once and calls > 1:
                return original(self, *args, **kwargs)
            raise KeyError("planted")

        patch.setattr(type(owner), name, fail)

    return plant


PLANTS: dict[str, Plant] = {
    "a handler that is told": _always(DeviceTier, CopyEnded),
    "a handler that is called": _always(HostTier, Reserved),
    "a handler of the storage tier": _always(StorageTier, Counted),
    "an observer of write-backs": _batch("write_back"),
    "an observer of backups": _batch("backup"),
    "an observer of loads": _batch("load"),
    "an observer of prefetches": _batch("prefetch"),
    "an observer of commits": _observer(lambda what: isinstance(what, CommitEnd)),
    "core: opening a load": _core("_loads.open", once=False),
    "core: the result of a load": _core("_loads.settle", once=False),
    "core: a lease": _core("_leases._descend"),
    "core: the first allocation": _core("state.evictor.device_room"),
    "core: a publication": _core("state.tree.add", once=False),
    "core: the wish to save": _core("_saving._write_back_run", once=False),
    "core: the result of a write-back": _core("_saving.written", once=False),
    "core: the result of a backup": _core("_saving.stored", once=False),
    "core: the end of a section": _core("_saving.end_section"),
    "core: answering waiters": _core("_waiting.end_section"),
    "core: a pending acquire": _core("_waiting._admit"),
    "core: opening a fetch": _core("_fetches.open"),
    "core: granting a fetch": _core("_fetches.grant", once=False),
    "core: publishing a fetch": _core("_fetches.publish", once=False),
    "core: a release": _core("_leases.release"),
    "core: ending a pin": _core("state.pins.unpin"),
    "core: closing a job": _core("state.close"),
}


@SEEDS
@pytest.mark.parametrize("where", PLANTS)
def test_a_bug_ends_caching_and_nothing_else(
    where: str, seed: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with pytest.raises(HiCacheError, match="planted"):
            await _lives_through(where, monkeypatch)
        assert not other_tasks()

    run_checked(main, seed)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1, errors
    assert "rings=" in errors[0]
    assert "planted" in errors[0]


async def _lives_through(where: str, patch: pytest.MonkeyPatch) -> None:
    async with open_small(device_pages=24, backend=MemoryBackend(), check_pools=False) as small:
        cache = small.cache
        witness = Witness(cache, patch)
        wanted = reference_token(small, prompt(LIFE_PAGES))
        held = cache.lease(prompt(2, family=5), "held")
        PLANTS[where](small, patch)
        assert await live(small) == [wanted] * 4
        await anyio.sleep(5.0)
        assert cache.state == "degraded"
        assert cache.match(prompt(LIFE_PAGES)) == Match(0, 0, 0)
        for lease in (held, cache.lease(prompt(2, family=6), "later")):
            assert not isinstance(lease.allocate(8), Shortfall)
            committed = lease.commit(8)
            assert committed.published_pages == 0
            assert committed.failed == "degraded" or lease is held  # which may have failed by the reset before
            lease.release()
        assert await request(small, prompt(3)) == reference_token(small, prompt(3))
        assert await cache.drain(1.0) == 0
        assert (await cache.stored(prompt(3), 1.0)).reason == "degraded"
        snapshot = cache.snapshot()
        assert snapshot.failure is not None
        assert "planted" in snapshot.failure
        with anyio.fail_after(5.0):
            await cache.pipelines.idle()
        check_conservation(cache.core)
        await cache.reset()
        check_whole(cache.core)
        witness.check(core_broke=where.startswith("core"))


@SEEDS
def test_a_match_that_breaks_answers_nothing(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with open_small(check_pools=False) as small:
            assert await request(small, prompt(3)) == reference_token(small, prompt(3))
            _core("state.tree.match")(small, monkeypatch)
            assert small.cache.match(prompt(3)) == Match(0, 0, 0)
            await anyio.sleep(0.1)
            assert small.cache.state == "degraded"
            assert await request(small, prompt(3)) == reference_token(small, prompt(3))

    async def main() -> None:
        with pytest.raises(HiCacheError, match="planted"):
            await body()

    run_checked(main, seed)


def test_the_blocks_own_error_comes_before_the_bugs() -> None:
    async def body() -> None:
        async with open_small(check_pools=False) as small:

            async def bug() -> None:
                raise KeyError("planted")

            small.cache._parts.system.spawn("bug", bug)
            await anyio.sleep(0.1)
            assert small.cache.state == "degraded"
            raise ZeroDivisionError("of the engine")

    async def main() -> None:
        with pytest.raises(ZeroDivisionError, match="of the engine"):
            await body()

    run_checked(main, None)


@SEEDS
@pytest.mark.parametrize("where", ["core: a pending acquire", "core: opening a fetch", "core: granting a fetch"])
def test_a_bug_in_an_apply_loses_no_intent(where: str, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With driver="step" async verbs wait for an apply: each of them is answered, whatever became of that apply."""

    async def body() -> None:
        store = MemoryBackend()
        async with open_small(backend=store) as small:
            await request(small, prompt(4))
            await small.cache.drain(10.0)
        async with open_small(backend=store, driver="step") as small, stepping(small.cache):
            PLANTS[where](small, monkeypatch)

            async def one(family: int) -> None:
                async with small.cache.acquire(prompt(4, family=family)) as lease:
                    assert lease.rid

            with anyio.fail_after(10.0):
                async with anyio.create_task_group() as group:
                    for family in (0, 0, 1, 2):
                        group.start_soon(one, family)
                    group.start_soon(small.cache.drain, 5.0)
                    group.start_soon(small.cache.stored, prompt(4), 5.0)
            assert small.cache.state == "degraded"
            await nothing_left(small)

    async def main() -> None:
        with pytest.raises(HiCacheError, match="planted"):
            await body()

    run_checked(main, seed)
