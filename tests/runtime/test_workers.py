"""Worker threads: results, abandoned calls, bounds, close, and that nothing keeps the interpreter alive."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading

import anyio
import pytest

from hicache_actors.errors import BackendError, StoppedError
from hicache_actors.runtime import Workers
from hicache_actors.testing.loop import run_virtual

real_loops = pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)
every_loop = pytest.mark.parametrize("anyio_backend", ["virtual:3", "asyncio", "uvloop"], indirect=True)

GIVE_UP_S = 60


class Gate:
    """A blocking call that ends when it is told to."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        self._open.wait(GIVE_UP_S)
        return "through"

    def open(self) -> None:
        self._open.set()


async def _entered(gate: Gate) -> None:
    with anyio.fail_after(GIVE_UP_S):
        await anyio.to_thread.run_sync(gate.entered.wait)


async def _abandon(workers: Workers, gate: Gate) -> None:
    """Start a call, and leave it while its thread is inside."""
    task = asyncio.create_task(workers.run(gate))
    await _entered(gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def _threads(name: str) -> int:
    return sum(thread.name.startswith(f"hicache-{name}-") for thread in threading.enumerate())


@every_loop
async def test_results_and_exceptions_come_back(anyio_backend_name: str) -> None:
    workers = Workers("plain", 2)

    def divide(a: int, b: int) -> float:
        return a / b

    assert await workers.run(divide, 6, 3) == 2
    with pytest.raises(ZeroDivisionError):
        await workers.run(divide, 1, 0)
    assert await asyncio.gather(*(workers.run(divide, number, 1) for number in range(20))) == list(range(20))
    assert workers.snapshot().running == workers.snapshot().queued == workers.lost == 0
    assert await workers.aclose(GIVE_UP_S) == ()
    assert _threads("plain") == 0
    with pytest.raises(StoppedError):
        await workers.run(divide, 1, 1)


@real_loops
async def test_calls_run_beside_the_loop_and_beside_each_other(anyio_backend_name: str) -> None:
    workers = Workers("beside", 2)
    meeting = threading.Barrier(2)
    assert sorted(await asyncio.gather(*(workers.run(meeting.wait, GIVE_UP_S) for _ in range(2)))) == [0, 1]
    assert _threads("beside") == 2
    assert await workers.aclose(GIVE_UP_S) == ()


@real_loops
async def test_an_abandoned_call_is_lost_until_it_returns_and_its_thread_is_replaced(anyio_backend_name: str) -> None:
    workers, gate = Workers("lost", 1, max_lost=1), Gate()
    await _abandon(workers, gate)
    assert workers.snapshot().lost == 1
    assert await workers.run(lambda: 7) == 7  # by a second thread
    gate.open()
    assert await workers.aclose(GIVE_UP_S) == ()
    assert workers.lost == 0
    assert _threads("lost") == 0


@real_loops
async def test_beyond_the_bound_calls_are_refused_until_lost_ones_return(anyio_backend_name: str) -> None:
    workers, gates = Workers("bound", 1, max_lost=1), [Gate(), Gate()]
    for gate in gates:
        await _abandon(workers, gate)
    assert (workers.lost, _threads("bound")) == (2, 2)
    ends: list[str] = []
    with pytest.raises(BackendError, match="2 calls hang, 1 are allowed"):
        await workers.run(print, on_end=lambda: ends.append("refused"))
    assert ends == ["refused"]
    returned = asyncio.Event()
    loop = asyncio.get_running_loop()
    queued = None
    for gate in gates:
        gate.open()
    with anyio.fail_after(GIVE_UP_S):
        while queued is None:
            try:
                queued = workers.submit(loop.call_soon_threadsafe, returned.set)
            except BackendError:
                await anyio.sleep(0.001)
        await returned.wait()
    assert await workers.aclose(GIVE_UP_S) == ()


@real_loops
async def test_a_call_that_has_not_begun_is_dropped_by_cancellation(anyio_backend_name: str) -> None:
    workers, gate = Workers("drop", 1), Gate()
    ends: list[str] = []
    first = asyncio.create_task(workers.run(gate, on_end=lambda: ends.append("first")))
    await _entered(gate)
    with anyio.move_on_after(0.01):
        await workers.run(ends.append, "ran", on_end=lambda: ends.append("dropped"))
    assert ends == ["dropped"]
    assert workers.lost == 0
    gate.open()
    assert await first == "through"
    assert await workers.aclose(GIVE_UP_S) == ()
    assert ends == ["dropped", "first"]


@real_loops
async def test_on_end_of_an_abandoned_call_waits_for_its_real_end(anyio_backend_name: str) -> None:
    """What holds memory for a call in a thread must hold it until the thread has left, whatever became of the caller."""
    workers, gate = Workers("hold", 1), Gate()
    ended = threading.Event()
    task = asyncio.create_task(workers.run(gate, on_end=ended.set))
    await _entered(gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended.is_set()
    gate.open()
    with anyio.fail_after(GIVE_UP_S):
        await anyio.to_thread.run_sync(ended.wait)
    assert await workers.aclose(GIVE_UP_S) == ()


@real_loops
async def test_close_names_what_still_runs_and_drops_what_waits(anyio_backend_name: str) -> None:
    workers, gate = Workers("close", 1), Gate()
    running = asyncio.create_task(workers.run(gate))
    await _entered(gate)
    waiting = asyncio.create_task(workers.run(print, "never"))
    await anyio.wait_all_tasks_blocked()
    assert workers.snapshot().queued == 1
    assert len(await workers.aclose(0.01)) == 1
    with pytest.raises(StoppedError):
        await waiting
    gate.open()
    assert await running == "through"
    assert workers.close(GIVE_UP_S) == ()
    assert _threads("close") == 0


def test_submit_works_without_a_loop() -> None:
    workers = Workers("sync", 1)
    assert workers.submit(divmod, 7, 2).result(GIVE_UP_S) == (3, 1)
    assert workers.close(GIVE_UP_S) == ()


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="size = 0"):
        Workers("none", 0)


def test_on_a_virtual_loop_calls_run_inline_in_seeded_orders() -> None:
    async def main() -> tuple[int, ...]:
        workers = Workers("inline", 4)
        order: list[int] = []
        before = threading.active_count()
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(workers.run, order.append, number)
        assert threading.active_count() == before
        with anyio.CancelScope() as scope:
            scope.cancel()
            await workers.run(order.append, -1)
        assert await workers.aclose(1) == ()
        return tuple(order)

    orders = {run_virtual(main, seed) for seed in range(50)}
    assert len({order[:4] for order in orders}) > 5
    assert all(sorted(order[:4]) == [0, 1, 2, 3] for order in orders)
    assert run_virtual(main, 4) == run_virtual(main, 4)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_hung_call_does_not_keep_the_process_alive(loop: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The executors of asyncio and anyio are joined at the end: there, this program never exits."""
    program = textwrap.dedent(
        """
        import os, sys
        import anyio
        from hicache_actors.runtime import System, Workers

        fifo = sys.argv[1]
        os.mkfifo(fifo)

        def read():
            with open(fifo, "rb") as stream:  # nobody ever writes
                return stream.read()

        async def main():
            workers = Workers("storage", 2)
            async with System(stop_deadline_s=0.2) as system:
                async def pipeline():
                    with anyio.move_on_after(0.1) as scope:
                        await workers.run(read)
                    assert scope.cancelled_caught
                await system.spawn("read", pipeline).wait()
            print("lost:", workers.lost, await workers.aclose(0.2))

        anyio.run(main, backend_options={"use_uvloop": sys.argv[2] == "uvloop"})
        """
    )
    fifo = tmp_path_factory.mktemp("fifo") / "hung"
    done = subprocess.run(
        [sys.executable, "-c", program, str(fifo), loop], capture_output=True, text=True, timeout=GIVE_UP_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "lost: 1 ('read',)\n"
