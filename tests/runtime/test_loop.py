"""The virtual-time loop: time, seeds, determinism, deadlocks."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest

from hicache_actors.errors import UsageError
from hicache_actors.testing.loop import Deadlock, VirtualLoop, run_virtual, virtual_backend


async def _orders(tasks: int = 3, steps: int = 2) -> tuple[tuple[int, int], ...]:
    out: list[tuple[int, int]] = []

    async def walk(number: int) -> None:
        for step in range(steps):
            await asyncio.sleep(0)
            out.append((number, step))

    async with anyio.create_task_group() as group:
        for number in range(tasks):
            group.start_soon(walk, number)
    return tuple(out)


def test_sleeping_costs_no_time() -> None:
    async def main() -> float:
        started = asyncio.get_running_loop().time()
        with anyio.move_on_after(3600) as scope:
            await anyio.sleep(7200)
        assert scope.cancelled_caught
        async with anyio.create_task_group() as group:
            for seconds in range(100):
                group.start_soon(anyio.sleep, seconds)
        return asyncio.get_running_loop().time() - started

    started = time.monotonic()
    assert run_virtual(main, 1) == pytest.approx(3699)
    assert time.monotonic() - started < 60


def test_same_seed_same_order() -> None:
    for seed in range(20):
        assert run_virtual(_orders, seed) == run_virtual(_orders, seed)


def test_many_seeds_many_orders() -> None:
    shuffled = {run_virtual(_orders, seed) for seed in range(200)}
    without_defer = {run_virtual(_orders, seed, defer=False) for seed in range(200)}
    assert len(without_defer) > 10
    assert len(shuffled) > len(without_defer)  # only a deferred callback lets one task run ahead by a whole turn


def test_no_seed_is_plain_order() -> None:
    assert run_virtual(_orders) == tuple((number, step) for step in range(2) for number in range(3))


def test_cancelling_many_tasks_is_repeatable() -> None:
    """A scope keeps its tasks in a set, whose order follows addresses; the seed must decide alone."""

    async def main() -> tuple[int, ...]:
        order: list[int] = []

        async def sleeper(number: int) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                order.append(number)

        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(sleeper, number)
            await anyio.sleep(1)
            group.cancel_scope.cancel()
        return tuple(order)

    ballast = []
    runs = set()
    for size in range(20):
        ballast.append([object() for _ in range(size * 37)])  # moves the addresses of the next run's tasks
        runs.add(run_virtual(main, 7))
    assert len(runs) == 1


def test_deadlock_names_who_waits_and_where() -> None:
    async def wait_for_nobody() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for_nobody(), name="the-patient-one")

    with pytest.raises(Deadlock, match=r"seed 5[\s\S]*the-patient-one at Event\.wait"):
        run_virtual(main, 5)


def test_a_deferred_callback_is_no_deadlock_and_moves_no_clock() -> None:
    async def main() -> float:
        async def spin() -> None:
            for _ in range(50):
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(spin())
            group.create_task(asyncio.sleep(0))
        return asyncio.get_running_loop().time()

    for seed in range(30):
        assert run_virtual(main, seed) == 0.0


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().run_in_executor(None, print)

    with pytest.raises(UsageError, match="threads do not run in virtual time"):
        run_virtual(main)


def test_anyio_runs_on_it() -> None:
    async def main() -> tuple[bool, float]:
        await anyio.sleep(50)
        return isinstance(asyncio.get_running_loop(), VirtualLoop), anyio.current_time()

    backend, options = virtual_backend(3)
    assert anyio.run(main, backend=backend, backend_options=options) == (True, 50.0)


@pytest.mark.parametrize("anyio_backend", ["virtual:3"], indirect=True)
async def test_pytest_runs_on_it() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    assert loop.seed == 3
    before = loop.time()
    await anyio.sleep(3600)
    assert loop.time() - before == pytest.approx(3600)
