"""Lookups in a slab's table: the native library finds what Python's code finds, by any key and in damaged entries."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from hicache_actors.backends.slab.entries import ENTRY_BYTES, MAX_KEY_BYTES, READY, look, pack_entry
from hicache_actors.backends.slab.index import Index, index_bytes
from hicache_actors.cuda_ext.native.library import library
from hicache_actors.cuda_ext.native.slab import SlabTable

LOADED = library()
pytestmark = pytest.mark.skipif(LOADED is None, reason="the native library is not in use here")

SLOTS = 3 * MAX_KEY_BYTES
NONE = (1 << 64) - 1


class Made:
    """A table with an object in every slot, whose keys have every length."""

    def __init__(self, seed: int) -> None:
        assert LOADED is not None
        chance = random.Random(seed)
        self.entries, self.index = bytearray(SLOTS * ENTRY_BYTES), bytearray(index_bytes(SLOTS))
        self.keys = [chance.randbytes(at % MAX_KEY_BYTES + 1) for at in range(SLOTS)]
        self.digests = [xxh3_128_digest(key) for key in self.keys]
        for slot, (key, digest) in enumerate(zip(self.keys, self.digests, strict=True)):
            pack_entry(self.entries, slot * ENTRY_BYTES, chance.getrandbits(32), chance.getrandbits(64), 5, digest, key)
            struct.pack_into("<I", self.entries, slot * ENTRY_BYTES, READY)
        hashes = np.frombuffer(b"".join(self.digests), "<u8").reshape(-1, 2)
        Index(memoryview(self.index)).add(hashes, range(SLOTS), lambda near: 0)
        self.table = SlabTable(LOADED, memoryview(self.entries), memoryview(self.index))

    def by_python(self, slot: int) -> tuple[int, int] | None:
        entry = np.frombuffer(self.entries, np.uint8).reshape(-1, ENTRY_BYTES)[[slot]]
        return look(entry, [self.keys[slot]])[0]


def test_keys_of_every_length_are_found() -> None:
    made = Made(1)
    slots, lengths, marks = made.table.find(made.keys, made.digests).tolist()
    for slot in range(SLOTS):
        if len(made.keys[slot]) > 2:  # shorter ones are there twice
            assert slots[slot] == slot
        assert made.keys[slots[slot]] == made.keys[slot]
        assert (lengths[slot], marks[slot]) == made.by_python(slots[slot])


def test_an_entry_with_any_bit_flipped_is_none_for_both() -> None:
    made, chance = Made(2), random.Random(3)
    for slot in range(3, SLOTS):
        [[found]] = made.table.find([made.keys[slot]], [made.digests[slot]])[:1].tolist()
        if found != slot:
            continue
        at, bit = chance.randrange(49 + len(made.keys[slot])), 1 << chance.randrange(8)
        made.entries[slot * ENTRY_BYTES + at] ^= bit
        [[found], [length], [mark]] = made.table.find([made.keys[slot]], [made.digests[slot]]).tolist()
        by_python = made.by_python(slot)
        assert (None if found == NONE else (length, mark)) == by_python
        assert by_python is None or 16 <= at < 24 or 32 <= at < 48, (
            "but for its last use and what the index is made from"
        )
        made.entries[slot * ENTRY_BYTES + at] ^= bit


def test_hints_that_mean_nothing_are_passed_over() -> None:
    made = Made(4)
    for hint in (0, NONE, 1 << 63):
        made.index[:] = struct.pack("<Q", hint) * (len(made.index) // 8)
        assert set(made.table.find(made.keys, made.digests)[0].tolist()) == {NONE}


def test_a_key_that_no_entry_has_room_for_is_refused() -> None:
    made = Made(5)
    for n_bytes in (0, MAX_KEY_BYTES + 1):
        with pytest.raises(ValueError, match=f"{n_bytes} bytes"):
            made.table.find([b"k", b"k" * n_bytes], [bytes(16), bytes(16)])
