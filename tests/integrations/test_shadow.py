"""The shadow store sees every way in which a page can come back wrong."""

from __future__ import annotations

import pytest
import torch

from hicache_actors.backends.backend import Stored
from hicache_actors.core.words import pack_slots
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.shapes import KVShape
from hicache_actors.pipelines.observer import BatchEnd, CommitEnd
from hicache_actors.testing.shadow import ShadowStore

SHAPE = KVShape(layers=3, kv=2, heads=2, head_dim=4, dtype="bfloat16", page_size=4)
HASHES = (b"h0", b"h1")


class Moves:
    """Plays the cache: moves page contents and tells the shadow, as the pipelines do."""

    def __init__(self) -> None:
        self.shadow = ShadowStore()
        self.store: dict[bytes, torch.Tensor] = {}
        self.restart()

    def restart(self) -> None:
        self.kv = KVTensors.make(SHAPE, 8)
        self.host: dict[int, torch.Tensor] = {}
        self.observe = self.shadow.watch(self.kv)

    def read(self, slot: int) -> torch.Tensor:
        return torch.stack([torch.stack([t[slot] for t in self.kv.layer(i)]) for i in range(SHAPE.layers)])

    def write(self, slot: int, page: torch.Tensor) -> None:
        for i in range(SHAPE.layers):
            for tensor, part in zip(self.kv.layer(i), page[i], strict=True):
                tensor[slot] = part

    def compute(self, slots: list[int], seed: int, first_page: int = 0) -> None:
        torch.manual_seed(seed)
        for slot in slots:
            self.write(slot, torch.randn(SHAPE.layers, 2, 4, 2, 4).to(torch.bfloat16))
        self.observe(CommitEnd("r", first_page, pack_slots(slots)))

    def write_back(self, source: list[int], target: list[int]) -> None:
        for a, b in zip(source, target, strict=True):
            self.host[b] = self.read(a)
        self.observe(BatchEnd(1, "write_back", pack_slots(source), pack_slots(target)))

    def backup(self, source: list[int], hashes: tuple[bytes, ...] = HASHES) -> None:
        outcomes = tuple(Stored.PRESENT if key in self.store else Stored.WRITTEN for key in hashes)
        for slot, key in zip(source, hashes, strict=True):
            self.store.setdefault(key, self.host[slot])
        self.observe(BatchEnd(2, "backup", pack_slots(source), None, hashes, outcomes))

    def prefetch(self, target: list[int], hashes: tuple[bytes, ...] = HASHES) -> None:
        for slot, key in zip(target, hashes, strict=True):
            self.host[slot] = self.store[key].clone()
        self.observe(BatchEnd(3, "prefetch", None, pack_slots(target), hashes))

    def load(self, source: list[int], target: list[int]) -> None:
        for a, b in zip(source, target, strict=True):
            self.write(b, self.host[a])
        self.observe(BatchEnd(4, "load", pack_slots(source), pack_slots(target)))


@pytest.fixture
def moves() -> Moves:
    moves = Moves()
    moves.compute([1, 2], seed=1)
    moves.write_back([1, 2], [5, 6])
    moves.backup([5, 6])
    return moves


def test_pages_that_come_back_whole_are_verified(moves: Moves) -> None:
    moves.load([5, 6], [3, 4])
    moves.prefetch([0, 1])
    moves.load([0, 1], [6, 7])
    moves.restart()
    moves.prefetch([4, 2])
    moves.load([4, 2], [0, 5])
    assert moves.shadow.verified_pages == 6
    assert moves.shadow.mismatches == []


def test_a_bit_that_flips_in_host_memory_is_seen_at_the_load(moves: Moves) -> None:
    moves.host[6].view(torch.int16)[2, 1, 3, 1, 3] ^= 1
    moves.load([5, 6], [3, 4])
    (found,) = moves.shadow.mismatches
    assert (found.what, found.slot) == ("load", 4)


def test_pages_that_change_places_are_seen(moves: Moves) -> None:
    moves.host[5], moves.host[6] = moves.host[6], moves.host[5]
    moves.load([5, 6], [3, 4])
    assert [found.slot for found in moves.shadow.mismatches] == [3, 4]


def test_a_store_that_mixes_up_its_objects_is_seen(moves: Moves) -> None:
    moves.store[b"h1"] = moves.store[b"h0"]
    moves.restart()
    moves.prefetch([0, 1])
    moves.load([0, 1], [0, 1])
    assert [found.slot for found in moves.shadow.mismatches] == [1]


def test_a_page_from_nowhere_is_a_mismatch(moves: Moves) -> None:
    moves.host[7] = torch.zeros(SHAPE.layers, 2, 4, 2, 4, dtype=torch.bfloat16)
    moves.load([7], [3])
    (found,) = moves.shadow.mismatches
    assert found.expected == b""


def test_a_device_page_that_was_overwritten_is_seen_at_a_hit_and_at_write_back(moves: Moves) -> None:
    moves.write(2, moves.read(1))
    moves.shadow.check_device([1, 2])
    moves.write_back([2], [0])
    assert [(found.what, found.slot) for found in moves.shadow.mismatches] == [("device_hit", 2), ("write_back", 2)]


def test_a_second_version_is_right_where_it_was_put(moves: Moves) -> None:
    first = moves.shadow.name(HASHES, [1, 2])
    moves.compute([3, 4], seed=2)  # the same tokens, computed in other chunks
    second = moves.shadow.name(HASHES, [3, 4])
    moves.write_back([3, 4], [0, 1])
    moves.backup([0, 1])  # present already: the store keeps the first version
    assert (moves.shadow.page_hashes, moves.shadow.page_versions) == (2, 4)
    moves.load([0], [5])
    moves.prefetch([7], HASHES[:1])
    moves.load([7], [6])
    assert moves.shadow.mismatches == []
    assert moves.shadow.check_device([5, 6]) == [second[0], first[0]]


def test_contents_can_be_laid_out_for_a_plain_cache(moves: Moves) -> None:
    digests = moves.shadow.name(HASHES, [1, 2])
    pages = [moves.read(slot) for slot in (1, 2)]
    moves.compute([1, 2], seed=3)
    dense = moves.shadow.dense_prefix(digests)
    assert len(dense) == SHAPE.layers
    for i, tensors in enumerate(dense):
        for which, tensor in enumerate(tensors):
            wanted = torch.cat([page[i, which] for page in pages]).transpose(0, 1)[None]
            assert torch.equal(tensor, wanted)
