"""Writers killed at random points, and flipped bits: what is read is right or a miss, and the count is that of the disk."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hicache_actors.backends import FileBackend, Stored
from hicache_actors.backends.ledger import disk_bytes
from hicache_actors.backends.objects import HEADER_BYTES, Verdict, verify
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import room

from .crash import NAMESPACE, Nursery, flip_a_bit, flips, hash_of

CAP_GB = 0.003

# Kills itself at a call of the system; of a write it does one half first.
WRITER = """
from hicache_actors.backends import FileBackend, file_batches, folder

def payload_bytes(page_hash):
    return page_hash[0] * 64

async def write(url, seed):
    if seed % 4 == 1:  # so that it is also killed in the middle of a file
        file_batches.native.files = lambda: None
    chance = random.Random(seed)
    backend = FileBackend(url, Workers("writer", 4))
    await backend.open()
    numbers = itertools.count()

    async def work():
        old = []
        while True:
            keys = [f"s{seed}-{next(numbers)}" for _ in range(chance.randrange(1, 12))]
            objects = [sealed(key, payload_bytes) for key in keys]
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
"""


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("test", 4)
    yield workers
    assert workers.close(10.0) == ()


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
    with Nursery(WRITER) as nursery:
        for seed in seeds:
            chance = random.Random(seed)
            if seed % 2:
                nursery.write_until_killed(url, seed, at=chance.randrange(1, 1500))
            else:
                nursery.write_until_killed(url, seed, after_s=chance.uniform(0, 0.15))
            most = max(most, await check_all(tmp_path, workers))
    assert most > 100


async def test_writers_killed_at_20_points(tmp_path: Path, workers: Workers) -> None:
    await kill(tmp_path, workers, range(20))


@pytest.mark.slow
async def test_writers_killed_at_300_points(tmp_path: Path, workers: Workers) -> None:
    await kill(tmp_path, workers, range(1000, 1300))


async def test_a_writer_killed_beside_a_living_one(tmp_path: Path, workers: Workers) -> None:
    """The survivor's count is right as soon as somebody has looked."""
    url = f"file://{tmp_path}/store?max_gb={CAP_GB}"
    survivor = FileBackend(url, workers)
    await survivor.open()
    with Nursery(WRITER) as nursery:
        for seed in range(3):
            nursery.write_until_killed(url, seed, at=300 + seed)
            assert list(await survivor.write([f"after{seed}"], [memoryview(bytes(5000))])) == [Stored.WRITTEN]
    assert await survivor.reconcile()
    files = list((tmp_path / "store").glob("objects/*/*"))
    assert {path.suffix for path in files} == {".kv"}
    assert survivor.stats()["objects"] == len(files)
    assert survivor.stats()["bytes"] == sum(disk_bytes(path.stat().st_size) for path in files)
    await survivor.close()


async def flip(tmp_path: Path, workers: Workers, rounds: int) -> None:
    backend = FileBackend(f"file://{tmp_path}/store", workers)
    await backend.open()

    async def flip(keys: Sequence[str], chance: random.Random) -> None:
        for key in keys:
            [path] = (tmp_path / "store").glob(f"objects/*/{key}.kv")
            with open(path, "r+b") as file:  # noqa: ASYNC230
                flip_a_bit(file, chance.randrange(path.stat().st_size), chance)

    await flips(backend, HEADER_BYTES + 3000, rounds, flip)
    await backend.close()


async def test_of_1000_flipped_bits_none_is_served(tmp_path: Path, workers: Workers) -> None:
    await flip(tmp_path, workers, 20)


@pytest.mark.slow
async def test_of_10_000_flipped_bits_none_is_served(tmp_path: Path, workers: Workers) -> None:
    await flip(tmp_path, workers, 200)
