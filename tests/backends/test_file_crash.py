"""Writers killed at random points, and flipped bits: what is read is right or a miss, and the count is that of the disk."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hicache_actors.backends import FileBackend, Stored
from hicache_actors.backends.ledger import disk_bytes
from hicache_actors.backends.objects import HEADER_BYTES, Verdict, seal_many, verify, verify_many
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import room

CAP_GB = 0.003
NAMESPACE = b"n" * 16

# Starts quickly and forks a writer for each line it reads: "URL SEED CALLS".  The writer does everything the store can do, until
# it is killed from outside, or kills itself at its CALLS-th call of the system (0: never); of a write it does one half first.
NURSERY = """
import asyncio, hashlib, itertools, os, random, signal, sys
from hicache_actors.backends import FileBackend, file_batches, folder, ledger
from hicache_actors.backends.objects import seal
from hicache_actors.errors import BackendError
from hicache_actors.runtime.workers import Workers

assert "torch" not in sys.modules

def sealed(key):
    page_hash = hashlib.sha256(key.encode()).digest()
    data = memoryview(bytearray(4096 + page_hash[0] * 64))
    data[4096:] = random.Random(key).randbytes(len(data) - 4096)
    seal(data, b"n" * 16, page_hash)
    return data

async def write(url, seed):
    chance = random.Random(seed)
    backend = FileBackend(url, Workers("writer", 4))
    await backend.open()
    numbers = itertools.count()
    print("ready", flush=True)

    async def work():
        old = []
        while True:
            keys = [f"s{seed}-{next(numbers)}" for _ in range(chance.randrange(1, 12))]
            objects = [sealed(key) for key in keys]
            await backend.write(keys, objects)
            old = (old + keys)[-40:]
            some = chance.sample(old, min(3, len(old)))
            match chance.randrange(6):
                case 0: await backend.delete(some)
                case 1: await backend.quarantine(some[0])
                case 2: await backend.read(keys, objects)
                case 3: await backend.reconcile()

    await asyncio.gather(work(), work(), work())

def die_at(calls):
    left = itertools.count(calls, -1)
    def counted(name, real):
        def call(*args, **kwargs):
            if next(left) == 1:
                if name in ("write", "pwrite"):
                    real(args[0], memoryview(args[1]).cast("B")[: len(memoryview(args[1]).cast("B")) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    for name in ("open", "write", "pwrite", "unlink", "rename", "utime", "close"):
        setattr(os, name, counted(name, getattr(os, name)))
    folder.Publisher.publish = counted("publish", folder.Publisher.publish)

for line in sys.stdin:
    url, seed, calls = line.split()
    pid = os.fork()
    if pid == 0:
        if int(seed) % 4 == 1:  # so that it is also killed in the middle of a file
            file_batches.native.files = lambda: None
        if int(calls):
            die_at(int(calls))
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

    def write_until_killed(self, url: str, seed: int, *, calls: int = 0, after_s: float = 0.0) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{url} {seed} {calls}\n")
        stdin.flush()
        lines = iter(stdout.readline, "")
        pid = int(next(line for line in lines if line != "ready\n"))
        if not calls:
            time.sleep(after_s)  # the point of the kill, not a wait for anything
            os.kill(pid, signal.SIGKILL)
        assert next(line for line in lines if line != "ready\n") == "killed\n"


def hash_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def flip_a_bit(path: Path, chance: random.Random) -> None:
    with open(path, "r+b") as file:
        at = chance.randrange(path.stat().st_size)
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


async def check_all(tmp_path: Path, workers: Workers) -> int:
    """A new life on the folder -> how many objects it holds."""
    root = tmp_path / "store"
    backend = FileBackend(f"file://{root}?max_gb={CAP_GB}", workers)
    await backend.open()
    listed = backend.keys()
    keys = [key async for key in listed]
    for key in keys:
        [buffer] = room(1, HEADER_BYTES + hash_of(key)[0] * 64)
        [found] = await backend.read([key], [buffer])
        assert found
        assert verify(buffer, NAMESPACE, hash_of(key)) is Verdict.OK
    stats = backend.stats()
    files = list(root.glob("objects/*/*"))
    assert {path.suffix for path in files} <= {".kv"}  # no half-written file is left
    assert stats["objects"] == len(keys) == len(files)
    assert stats["bytes"] == sum(disk_bytes(path.stat().st_size) for path in files)
    assert stats["quarantine_bytes"] == sum(disk_bytes(path.stat().st_size) for path in root.glob("quarantine/*"))
    assert int(stats["bytes"]) + int(stats["quarantine_bytes"]) <= CAP_GB * 1e9
    assert len(list(root.glob("writers/*"))) == 1
    await backend.close()
    return len(keys)


async def kill(tmp_path: Path, workers: Workers, seeds: Sequence[int]) -> None:
    url = f"file://{tmp_path}/store?max_gb={CAP_GB}"
    most = 0
    with Nursery() as nursery:
        for seed in seeds:
            chance = random.Random(seed)
            if seed % 2:
                nursery.write_until_killed(url, seed, calls=chance.randrange(1, 1500))
            else:
                nursery.write_until_killed(url, seed, after_s=chance.uniform(0, 0.15))
            most = max(most, await check_all(tmp_path, workers))
    assert most > 100


async def test_writers_killed_at_20_points(tmp_path: Path, workers: Workers) -> None:
    await kill(tmp_path, workers, range(20))


@pytest.mark.slow
async def test_writers_killed_at_100_points(tmp_path: Path, workers: Workers) -> None:
    await kill(tmp_path, workers, range(1000, 1100))


async def test_a_writer_killed_beside_a_living_one(tmp_path: Path, workers: Workers) -> None:
    """The survivor's count is right as soon as somebody has looked."""
    url = f"file://{tmp_path}/store?max_gb={CAP_GB}"
    survivor = FileBackend(url, workers)
    await survivor.open()
    with Nursery() as nursery:
        for seed in range(3):
            nursery.write_until_killed(url, seed, calls=300 + seed)
            assert list(await survivor.write([f"after{seed}"], [memoryview(bytes(5000))])) == [Stored.WRITTEN]
    assert await survivor.reconcile()
    files = list((tmp_path / "store").glob("objects/*/*"))
    assert {path.suffix for path in files} == {".kv"}
    assert survivor.stats()["objects"] == len(files)
    assert survivor.stats()["bytes"] == sum(disk_bytes(path.stat().st_size) for path in files)
    await survivor.close()


async def test_of_1000_flipped_bits_none_is_served(tmp_path: Path, workers: Workers) -> None:
    """Read and verified as the storage tier does, with one flip in each of 50 objects, 20 times."""
    n_bytes = HEADER_BYTES + 3000
    backend = FileBackend(f"file://{tmp_path}/store", workers)
    await backend.open()
    keys = [f"page{i}" for i in range(50)]
    hashes = [hash_of(key) for key in keys]
    objects = room(50, n_bytes)
    seal_many(objects, NAMESPACE, hashes)
    back = room(50, n_bytes)
    chance = random.Random(5)
    for _ in range(20):
        assert list(await backend.write(keys, objects)) == [Stored.WRITTEN] * 50
        for key in keys:
            [path] = (tmp_path / "store").glob(f"objects/*/{key}.kv")
            flip_a_bit(path, chance)
        assert list(await backend.read(keys, back)) == [True] * 50
        verdicts = verify_many(back, NAMESPACE, hashes)
        assert Verdict.OK not in verdicts
        assert [await backend.quarantine(key) for key in keys] == [True] * 50
        assert await backend.exists(keys) == 0
    assert list(await backend.write(keys, objects)) == [Stored.WRITTEN] * 50
    assert list(await backend.read(keys, back)) == [True] * 50
    assert verify_many(back, NAMESPACE, hashes) == [Verdict.OK] * 50
    assert backend.stats()["quarantined"] == 1000
    await backend.close()
