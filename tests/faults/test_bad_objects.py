"""Stored objects that are torn, cut, flipped, misfiled, foreign or empty: a miss, counted, and out of the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.config import ModelFacts
from hicache_actors.testing.lives import reference_token, request, run_checked
from hicache_actors.testing.small import Small, open_small, prompt, small_config

PAGES = 6
BAD_PAGE = 3  #: 1 is the first
HEADER = 4096

Damage = Callable[[bytes], bytes]


def _flip(at: int) -> Damage:
    def damage(data: bytes) -> bytes:
        place = at % len(data)
        return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]

    return damage


DAMAGES: dict[str, Damage] = {
    "a bit of the payload flipped": _flip(HEADER + 7),
    "the last bit flipped": _flip(-1),
    "a bit of the magic flipped": _flip(0),
    "a bit of the page hash flipped": _flip(40),
    "a bit of the checksum flipped": _flip(HEADER - 1),
    "torn: the second half never came": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "all zero": lambda data: bytes(len(data)),
    "cut short": lambda data: data[:-1],
    "only the header": lambda data: data[:HEADER],
    "empty": lambda data: b"",
    "too long": lambda data: data + b"more",
}
EVERY_DAMAGE = pytest.mark.parametrize("damage", DAMAGES)
RESIZES = {"cut short", "only the header", "empty", "too long"}


@pytest.mark.parametrize("seed", [None, 1])
@EVERY_DAMAGE
def test_a_damaged_object_in_memory_is_a_miss(damage: str, seed: int | None) -> None:
    async def main() -> None:
        async with open_small(url=f"memory://{damage.replace(' ', '-').replace(':', '')}-{seed}") as small:
            objects = _objects(small)

            def spoil(number: int) -> None:
                key = list(objects)[number - 1]  # stored in prefix order
                objects[key] = DAMAGES[damage](objects[key])

            await _check_damage(small, spoil, damage)
            assert len(objects) == PAGES

    run_checked(main, seed)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)
@EVERY_DAMAGE
async def test_a_damaged_file_is_a_miss(anyio_backend: object, damage: str, tmp_path: Path) -> None:
    async with open_small(url=f"file://{tmp_path}") as small:

        def spoil(number: int) -> None:
            hashes = prompt(PAGES).page_hashes(small.cache.page_size, PAGES)
            key = small.store.keys.keys([hashes[number - 1]])[0]
            (path,) = _files(tmp_path, f"objects/*/{key}.kv")
            path.write_bytes(DAMAGES[damage](path.read_bytes()))

        await _check_damage(small, spoil, damage)
        assert len(_files(tmp_path, "objects/*/*.kv")) == PAGES
        if damage != "empty":  # then there is nothing to look at later
            assert len(_files(tmp_path, "quarantine/*.bad")) == 1


def _files(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


async def _put_away(small: Small) -> None:
    """Wait until the bad object is out of sight: who reads it before counts it once more."""
    with anyio.fail_after(60):
        while (storage := small.cache.snapshot().storage) is None or not storage.backend["quarantined"]:  # noqa: ASYNC110
            await anyio.sleep(0.001)


async def _check_damage(small: Small, spoil: Callable[[int], None], damage: str) -> None:
    """The run before the bad page comes, the rest is computed and stored anew, and comes the next time."""
    asked = prompt(PAGES)
    wanted = reference_token(small, asked)
    assert await request(small, asked) == wanted
    assert await small.cache.drain(10.0) == 0
    spoil(BAD_PAGE)
    await small.cache.reset()
    async with small.cache.acquire(asked, deadline_s=5.0) as lease:
        assert lease.usable_tokens == 4 * (BAD_PAGE - 1)
        assert lease.account.storage == 4 * (BAD_PAGE - 1)
    if damage not in RESIZES:
        await _put_away(small)
    assert await request(small, asked) == wanted
    assert await small.cache.drain(10.0) == 0
    snapshot = small.cache.snapshot()
    assert snapshot.state == "open"
    assert snapshot.storage is not None
    if damage not in RESIZES:
        assert snapshot.storage.corrupt_pages == 1
        assert snapshot.storage.backend["quarantined"] == 1
    await small.cache.reset()
    async with small.cache.acquire(asked, deadline_s=5.0) as lease:
        assert lease.account.storage == 4 * PAGES
    assert await request(small, asked) == wanted


@pytest.mark.parametrize("seed", [None, 1])
def test_an_object_under_a_foreign_key_is_corrupt(seed: int | None) -> None:
    """Whole and of our namespace, but another page's bytes: the worst thing that a store could serve."""

    async def main() -> None:
        async with open_small(url=f"memory://misfiled-{seed}") as small:
            objects = _objects(small)

            def spoil(number: int) -> None:
                keys = list(objects)
                objects[keys[number - 1]] = objects[keys[number]]

            await _check_damage(small, spoil, "misfiled")

    run_checked(main, seed)


@pytest.mark.parametrize(
    "facts", [ModelFacts(model_id="another", weights="v1"), ModelFacts(model_id="toy", weights="v2")]
)
def test_a_foreign_namespace_is_a_plain_miss(facts: ModelFacts) -> None:
    """Another model's objects, even under our keys, are neither served nor destroyed."""

    async def main() -> None:
        theirs = msgspec.structs.replace(small_config(url=f"memory://theirs-{facts.weights}"), model=facts)
        async with open_small(config=theirs) as small:
            await request(small, prompt(PAGES))
            await small.cache.drain(10.0)
            foreign = list(_objects(small).values())
        async with open_small(url=f"memory://ours-{facts.weights}") as small:
            objects = _objects(small)
            hashes = prompt(PAGES).page_hashes(small.cache.page_size, PAGES)
            keys = small.store.keys.keys(hashes)
            objects.update(zip(keys, foreign, strict=True))
            async with small.cache.acquire(prompt(PAGES), deadline_s=5.0) as lease:
                assert lease.usable_tokens == 0
            storage = small.cache.snapshot().storage
            assert storage is not None
            assert storage.foreign_pages >= 1
            assert storage.corrupt_pages == 0
            await asyncio.sleep(0.1)  # whatever would be quarantined is by then
            assert objects.keys() >= set(keys)
            assert await request(small, prompt(PAGES)) == reference_token(small, prompt(PAGES))

    run_checked(main, None)


def _objects(small: Small) -> dict[str, bytes]:
    """What lies in a store in memory."""
    backend = small.store.backend
    assert isinstance(backend, MemoryBackend)
    return backend._objects
