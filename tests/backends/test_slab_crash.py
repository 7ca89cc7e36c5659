"""Writers killed at random instants, and flipped bits: what is read is right or a miss, and no slot is lost."""

from __future__ import annotations

import hashlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hicache_actors.backends import Stored
from hicache_actors.backends.objects import HEADER_BYTES, Verdict, seal_many, verify, verify_many
from hicache_actors.backends.slab import SlabBackend, SlabOptions
from hicache_actors.backends.slab.store_file import StoreFile
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import room

KINDS = ("slab", "mmap", "shm")
N_BYTES = HEADER_BYTES + 4096
NAMESPACE = b"n" * 16

# Forks a writer for each line it reads: "URL SEED LINES".  The writer does all that the store can do until it is killed from
# outside, or kills itself at its LINES-th line of the store's code, in whatever thread (0: never).
NURSERY = """
import asyncio, hashlib, itertools, os, random, signal, sys, threading
from hicache_actors.backends.objects import seal
from hicache_actors.backends.slab import SlabBackend
from hicache_actors.runtime.workers import Workers

assert "torch" not in sys.modules

def sealed(key):
    page_hash = hashlib.sha256(key.encode()).digest()
    data = memoryview(bytearray(8192))
    data[4096:] = random.Random(key).randbytes(4096)
    seal(data, b"n" * 16, page_hash)
    return data

async def write(url, seed):
    chance = random.Random(seed)
    backend = SlabBackend(url, Workers("writer", 4))
    await backend.open()

    async def work():
        old = []
        while True:
            keys = [f"k{chance.randrange(400)}" for _ in range(chance.randrange(1, 12))]
            objects = [sealed(key) for key in keys]
            await backend.write(keys, objects)
            old = (old + keys)[-40:]
            some = chance.sample(old, min(3, len(old)))
            match chance.randrange(5):
                case 0: await backend.delete(some)
                case 1: await backend.quarantine(some[0])
                case 2: await backend.read(keys, objects)

    await asyncio.gather(work(), work(), work())

def die_at(lines):
    left = itertools.count(lines, -1)
    def line(frame, event, arg):
        if event == "line" and next(left) <= 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return line
    def call(frame, event, arg):
        return line if os.sep + "slab" + os.sep in frame.f_code.co_filename else None
    threading.settrace(call)
    sys.settrace(call)

for text in sys.stdin:
    url, seed, lines = text.split()
    pid = os.fork()
    if pid == 0:
        if int(lines):
            die_at(int(lines))
        asyncio.run(write(url, int(seed)))
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print("killed" if os.WIFSIGNALED(status) else f"ended with {status}", flush=True)
"""


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("test", 4)
    yield workers
    assert workers.close(10.0) == ()


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    where = f"crash-{tmp_path.parent.name}-{tmp_path.name}" if request.param == "shm" else f"{tmp_path}/store"
    url = f"{request.param}://{where}?gb=0.001"
    yield url
    shutil.rmtree(SlabOptions.parse(url).folder, ignore_errors=True)


class Nursery:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()  # closes its input: it ends
        assert self._process.returncode == 0

    def write_until_killed(self, url: str, seed: int, *, lines: int = 0, after_s: float = 0.0) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{url} {seed} {lines}\n")
        stdin.flush()
        pid = int(stdout.readline())
        if not lines:
            time.sleep(after_s)  # the instant of the kill, not a wait for anything
            subprocess.run(["kill", f"-{int(signal.SIGKILL)}", str(pid)], check=True)
        assert stdout.readline() == "killed\n"


async def file_of(backend: SlabBackend) -> StoreFile | None:
    store = await backend._found()
    return None if store is None else store.file


def hash_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def fill(backend: SlabBackend) -> int:
    """Have something new in every slot -> how many there are.  Fails if one is held by somebody who is dead."""
    slots = int(backend.stats()["slots"])
    [data] = room(1, N_BYTES)
    for start in range(0, slots * 8, 8):
        fillers = [f"filler{at}" for at in range(start, start + 8)]
        assert Stored.FAILED not in await backend.write(fillers, [data] * 8)
    return slots


async def check_all(url: str, workers: Workers) -> int:
    """A new life on the store -> how many objects it holds; every slot can be had."""
    backend = SlabBackend(url, workers)
    await backend.open()
    listed = backend.keys()
    keys = [key async for key in listed]
    assert len(set(keys)) == len(keys)
    for key in keys:
        [buffer] = room(1, N_BYTES)
        assert await backend.read([key], [buffer]) == [True]
        assert verify(buffer, NAMESPACE, hash_of(key)) is Verdict.OK
    if keys:
        slots = await fill(backend)
        listed = backend.keys()
        assert len([key async for key in listed]) == slots, "a slot was lost"
        await backend.clear()
    await backend.close()
    return len(keys)


async def kill(url: str, workers: Workers, seeds: Sequence[int]) -> None:
    most = 0
    with Nursery() as nursery:
        for seed in seeds:
            chance = random.Random(seed)
            if seed % 4:
                nursery.write_until_killed(url, seed, lines=chance.randrange(1, 30_000))
            else:
                nursery.write_until_killed(url, seed, after_s=chance.uniform(0, 0.15))
            most = max(most, await check_all(url, workers))
    assert most > 50


async def test_writers_killed_at_20_instants(url: str, workers: Workers) -> None:
    await kill(url, workers, range(20))


@pytest.mark.slow
async def test_writers_killed_at_300_instants(url: str, workers: Workers) -> None:
    await kill(url, workers, range(1000, 1300))


async def test_a_writer_killed_beside_a_living_one(url: str, workers: Workers) -> None:
    survivor = SlabBackend(url, workers)
    await survivor.open()
    [data] = room(1, N_BYTES)
    assert await survivor.write(["first"], [data]) == [Stored.WRITTEN]
    with Nursery() as nursery:
        for seed in range(3):
            nursery.write_until_killed(url, seed, lines=5000 + seed)
            assert list(await survivor.write([f"after{seed}"], [data])) == [Stored.WRITTEN]
            assert await survivor.exists([f"after{seed}"]) == 1
    slots = int(survivor.stats()["slots"])
    fillers = [f"filler{at}" for at in range(slots * 8)]
    assert Stored.FAILED not in await survivor.write(fillers, [data] * len(fillers)), (
        "a dead writer's slot is still held"
    )
    await survivor.close()


async def flip(url: str, workers: Workers, rounds: int) -> None:
    """One flip in each of 50 objects, ``rounds`` times, read and verified as the storage tier does."""
    backend = SlabBackend(url, workers)
    await backend.open()
    keys = [f"page{i}" for i in range(50)]
    hashes = [hash_of(key) for key in keys]
    objects, back = room(50, N_BYTES), room(50, N_BYTES)
    seal_many(objects, NAMESPACE, hashes)
    chance = random.Random(5)
    for _ in range(rounds):
        assert await backend.write(keys, objects) == [Stored.WRITTEN] * 50
        file = await file_of(backend)
        assert file is not None
        with open(file.path, "r+b", buffering=0) as medium:  # noqa: ASYNC230
            for key in keys:
                found = file.table.find(key)
                assert found is not None
                at = file.geometry.data_at + found.slot * file.geometry.slot_bytes + chance.randrange(N_BYTES)
                medium.seek(at)
                [byte] = medium.read(1)
                medium.seek(at)
                medium.write(bytes([byte ^ 1 << chance.randrange(8)]))
        assert await backend.read(keys, back) == [True] * 50
        assert Verdict.OK not in verify_many(back, NAMESPACE, hashes)
        assert [await backend.quarantine(key) for key in keys] == [True] * 50
        assert await backend.exists(keys) == 0
    assert await backend.write(keys, objects) == [Stored.WRITTEN] * 50
    assert await backend.read(keys, back) == [True] * 50
    assert verify_many(back, NAMESPACE, hashes) == [Verdict.OK] * 50
    assert backend.stats()["quarantined"] == rounds * 50
    await backend.close()


async def test_of_500_flipped_bits_none_is_served(url: str, workers: Workers) -> None:
    await flip(url, workers, 10)


@pytest.mark.slow
async def test_of_10_000_flipped_bits_none_is_served(url: str, workers: Workers) -> None:
    await flip(url, workers, 200)
