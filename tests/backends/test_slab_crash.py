"""Writers killed at random instants, and flipped bits: what is read is right or a miss, and no slot is lost."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hicache_actors.backends import Stored
from hicache_actors.backends.objects import HEADER_BYTES, Verdict, verify
from hicache_actors.backends.slab import SlabBackend, SlabOptions
from hicache_actors.backends.slab.store_file import StoreFile
from hicache_actors.runtime.workers import Workers
from hicache_actors.testing.backend_contract import room

from .crash import NAMESPACE, Nursery, flip_a_bit, flips, hash_of

KINDS = ("slab", "mmap", "shm")
N_BYTES = HEADER_BYTES + 4096

# Kills itself at a line of the store's code, in whatever thread.
WRITER = """
from hicache_actors.backends.slab import SlabBackend

async def write(url, seed):
    chance = random.Random(seed)
    backend = SlabBackend(url, Workers("writer", 4))
    await backend.open()

    async def work():
        old = []
        while True:
            keys = [f"k{chance.randrange(400)}" for _ in range(chance.randrange(1, 12))]
            objects = [sealed(key, lambda page_hash: 4096) for key in keys]
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


async def file_of(backend: SlabBackend) -> StoreFile | None:
    store = await backend._found()
    return None if store is None else store.file


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
    with Nursery(WRITER) as nursery:
        for seed in seeds:
            chance = random.Random(seed)
            if seed % 4:
                nursery.write_until_killed(url, seed, at=chance.randrange(1, 30_000))
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
    with Nursery(WRITER) as nursery:
        for seed in range(3):
            nursery.write_until_killed(url, seed, at=5000 + seed)
            assert list(await survivor.write([f"after{seed}"], [data])) == [Stored.WRITTEN]
            assert await survivor.exists([f"after{seed}"]) == 1
    slots = int(survivor.stats()["slots"])
    fillers = [f"filler{at}" for at in range(slots * 8)]
    assert Stored.FAILED not in await survivor.write(fillers, [data] * len(fillers)), (
        "a dead writer's slot is still held"
    )
    await survivor.close()


async def flip(url: str, workers: Workers, rounds: int) -> None:
    backend = SlabBackend(url, workers)
    await backend.open()

    async def flip(keys: Sequence[str], chance: random.Random) -> None:
        file = await file_of(backend)
        assert file is not None
        with open(file.path, "r+b") as medium:  # noqa: ASYNC230
            for key in keys:
                found = file.table.find(key)
                assert found is not None
                at = file.geometry.data_at + found.slot * file.geometry.slot_bytes
                flip_a_bit(medium, at + chance.randrange(N_BYTES), chance)

    await flips(backend, N_BYTES, rounds, flip)
    await backend.close()


async def test_of_500_flipped_bits_none_is_served(url: str, workers: Workers) -> None:
    await flip(url, workers, 10)


@pytest.mark.slow
async def test_of_10_000_flipped_bits_none_is_served(url: str, workers: Workers) -> None:
    await flip(url, workers, 200)
