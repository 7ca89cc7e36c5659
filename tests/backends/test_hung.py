"""A call that never returns costs its caller a deadline, and never keeps the process from exiting."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from hicache_actors.backends import FileBackend, Hanging, MemoryBackend, Stored
from hicache_actors.runtime.workers import Workers

PROGRAM = """
import asyncio, os, sys, threading
from hicache_actors.backends import FileBackend, Hanging, MemoryBackend, file_batches
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import room

os.environ["HICACHE_NATIVE"] = "off"  # nobody changes the flags of that
file_batches._READ &= ~os.O_NONBLOCK  # now a pipe blocks

async def main():
    workers = Workers("io", 4)
    url = sys.argv[1]
    backend = Hanging(MemoryBackend(url), workers=workers) if url == "memory://" else FileBackend(url, workers)
    await backend.open()
    await backend.write(["a"], [memoryview(b"12345")])
    try:
        async with asyncio.timeout(0.2):
            await backend.read(["a", "pipe"], room(2, 5))
    except TimeoutError:
        print("gave up", workers.lost)
    assert await backend.exists(["a", "b"]) == 1
    await backend.close()
    print("lost", await workers.aclose(0.1))

asyncio.run(main())
print("threads", threading.active_count())
"""


def run(url: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("test", 2)
    yield workers
    assert workers.close(10.0) == ()


def test_the_process_exits_over_a_read_that_hangs_in_the_kernel(tmp_path: Path, workers: Workers) -> None:
    """A named pipe without a writer: `open` blocks for ever, as it does on a dead network file system."""

    async def prepare() -> None:
        backend = FileBackend(f"file://{tmp_path}", workers)
        await backend.open()
        assert await backend.write(["pipe"], [memoryview(b"12345")]) == [Stored.WRITTEN]
        await backend.close()

    anyio.run(prepare)
    [file] = tmp_path.glob("objects/*/pipe.kv")
    file.unlink()
    os.mkfifo(file)
    gave_up, lost, threads = run(f"file://{tmp_path}")
    assert gave_up == "gave up 1"
    assert "read_many" in lost
    assert threads != "threads 1"


def test_the_process_exits_over_a_hanging_backend() -> None:
    gave_up, lost, threads = run("memory://")
    assert gave_up == "gave up 1"
    assert "wait" in lost
    assert threads != "threads 1"


def test_a_healthy_store_leaves_no_threads(tmp_path: Path) -> None:
    lost, threads = run(f"file://{tmp_path}/healthy")
    assert lost == "lost ()"
    assert threads == "threads 1"


async def test_a_hung_call_may_hold_a_thread(workers: Workers) -> None:
    hanging = Hanging(MemoryBackend(), ("write",), workers=workers)
    outcomes: list[Stored] = []

    async def write(key: str) -> None:
        outcomes.extend(await hanging.write([key], [memoryview(b"12345")]))

    async with anyio.create_task_group() as group:
        for key in "abc":  # one more than there are threads: it waits in the queue
            group.start_soon(write, key)
        await anyio.wait_all_tasks_blocked()
        assert (hanging.hung, outcomes) == (3, [])
        assert await hanging.exists(["a"]) == 0
        hanging.release()
    assert outcomes == [Stored.WRITTEN] * 3
    assert workers.lost == 0
