"""Pages of one deployment in another that divides the model differently: real copies, real files, every bit."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from hicache_actors.testing.shards import HASHES, HEADS, PAGES, close, deployment, files, whole_model

MHA: dict[str, Any] = {"tp_lcm_size": 8}
GRIDS = [(4, (7,)), (8, (4, 3)), (2, (2, 2, 3)), (1, (6, 1))]


def file_of(folder: Path, key: str) -> Path:
    [file] = folder.glob(f"objects/*/{key}.kv")
    return file


@pytest.mark.parametrize(
    ("writer", "reader"),
    [(GRIDS[0], GRIDS[1]), (GRIDS[1], GRIDS[0]), (GRIDS[0], GRIDS[3]), (GRIDS[3], GRIDS[2]), (GRIDS[2], GRIDS[0])],
)
async def test_pages_of_one_grid_are_read_bit_equal_on_another(
    writer: tuple[int, tuple[int, ...]], reader: tuple[int, tuple[int, ...]], tmp_path: Path
) -> None:
    """tp=4 pp=1 and tp=8 pp=2 among them, both ways."""
    model = whole_model()
    writers = deployment(model, *writer, tmp_path, **MHA)
    for shard in writers:
        await shard.save()
    stored = files(tmp_path)
    assert len(stored) == PAGES * HEADS * 4 == sum(shard.objects for shard in writers)
    readers = deployment(model, *reader, tmp_path, **MHA)
    for shard in readers:
        assert await shard.load() == PAGES
    for shard in readers:
        await shard.save()  # nothing is stored twice
    assert files(tmp_path) == stored
    await close(writers + readers)


async def test_more_ranks_than_heads_store_each_object_once(tmp_path: Path) -> None:
    model = whole_model()
    writers = deployment(model, 16, (7,), tmp_path, head_group=1)
    for shard in writers:
        await shard.save()
    assert len(files(tmp_path)) == PAGES * HEADS * 4
    readers = [*deployment(model, 4, (4, 3), tmp_path, **MHA), writers[1], writers[14]]
    for shard in readers:
        assert await shard.load() == PAGES
    await close([*readers[:-2], *writers])


async def test_mla_is_stored_once_whatever_the_tensor_ranks(tmp_path: Path) -> None:
    model = whole_model(mla=True)
    writers = deployment(model, 4, (4, 3), tmp_path)
    for shard in writers:
        await shard.save()
    assert len(files(tmp_path)) == PAGES * 4
    readers = deployment(model, 2, (7,), tmp_path)
    for shard in readers:
        assert await shard.load() == PAGES
    await close(writers + readers)


async def test_a_page_that_lacks_an_object_is_missing(tmp_path: Path) -> None:
    model = whole_model()
    writers = deployment(model, 2, (7,), tmp_path, **MHA)
    for shard in writers:
        await shard.save()
    keys = writers[1].store.keys.keys([HASHES[3]])
    file_of(tmp_path, keys[5]).unlink()
    assert [await shard.hit() for shard in writers] == [PAGES, 3]
    assert await writers[1].store.read(HASHES, writers[1].slots, lambda: True).answer() == 3
    await close(writers)


async def test_a_flipped_bit_in_one_object_loses_the_page_and_quarantines_that_object(tmp_path: Path) -> None:
    model = whole_model()
    [shard] = deployment(model, 1, (7,), tmp_path, **MHA)
    await shard.save()
    key = shard.store.keys.keys([HASHES[2]])[7]
    file = file_of(tmp_path, key)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert await shard.store.read(HASHES, shard.slots, lambda: True).answer() == 2
    while shard.store.calls.open:  # noqa: ASYNC110 (the quarantine)
        await asyncio.sleep(0.01)
    assert await shard.hit() == 2
    assert len(os.listdir(tmp_path / "quarantine")) == 1
    await close([shard])


async def test_suffix_keys_are_shared_by_the_same_grid_only(tmp_path: Path) -> None:
    model = whole_model()
    settings = {"keys": "suffix", "layer_partition": None}
    writers = deployment(model, 4, (7,), tmp_path, **settings)
    for shard in writers:
        await shard.save()
    same = deployment(model, 4, (7,), tmp_path, **settings)
    for shard in same:
        assert await shard.load() == PAGES
    others = deployment(model, 8, (7,), tmp_path, **settings)
    assert [await shard.hit() for shard in others] == [0] * 8
    await close(writers + same + others)
