"""How many threads read at once: one, of small objects that come from memory; all, of what a disk is waited for."""

from __future__ import annotations

import anyio
import pytest
from anyio.abc import TaskStatus

from hicache_actors.backends.turns import Turns

pytestmark = pytest.mark.parametrize("anyio_backend", ["virtual"], indirect=True)

SMALL, LARGE = 64 << 10, 1 << 20


async def read(turns: Turns, object_bytes: int, seconds: float, task_status: TaskStatus[None]) -> None:
    async with turns.turn(object_bytes):
        task_status.started()
        await anyio.sleep(seconds)


async def begun_after_s(turns: Turns, object_bytes: int, other_s: float, other_bytes: int = SMALL) -> float:
    """When a read can begin beside one that lasts ``other_s``."""
    async with anyio.create_task_group() as group:
        await group.start(read, turns, other_bytes, other_s)
        begun_s = anyio.current_time()
        async with turns.turn(object_bytes):
            waited_s = anyio.current_time() - begun_s
    return waited_s


async def test_at_first_all_go_at_once() -> None:
    assert await begun_after_s(Turns(), SMALL, 0.02) == 0


async def test_what_comes_from_memory_is_read_by_one() -> None:
    turns = Turns()
    turns.saw(SMALL, disk=False)
    assert await begun_after_s(turns, SMALL, 0.02) == pytest.approx(0.02)
    assert await begun_after_s(turns, LARGE, 0.02) == 0
    assert await begun_after_s(turns, SMALL, 0.02, LARGE) == 0


async def test_what_comes_from_a_disk_is_read_by_all_again() -> None:
    turns = Turns()
    turns.saw(SMALL, disk=False)
    turns.saw(LARGE, disk=True)  # says nothing about small ones
    assert await begun_after_s(turns, SMALL, 0.02) == pytest.approx(0.02)
    turns.saw(SMALL, disk=True)
    assert await begun_after_s(turns, SMALL, 0.02) == 0


async def test_who_waits_is_let_in_when_a_disk_is_seen() -> None:
    turns = Turns()
    turns.saw(SMALL, disk=False)
    async with anyio.create_task_group() as group:
        await group.start(read, turns, SMALL, 0.04)
        begun_s = anyio.current_time()
        waiting = anyio.Event()

        async def second() -> None:
            async with turns.turn(SMALL):
                waiting.set()

        group.start_soon(second)
        await anyio.sleep(0.01)
        assert not waiting.is_set()
        turns.saw(SMALL, disk=True)
        await waiting.wait()
        assert anyio.current_time() - begun_s == pytest.approx(0.01)


async def test_nobody_waits_for_a_read_that_hangs() -> None:
    turns = Turns()
    turns.saw(SMALL, disk=False)
    assert await begun_after_s(turns, SMALL, 10.0) == pytest.approx(0.05)
