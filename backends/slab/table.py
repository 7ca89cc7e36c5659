"""Who is in which slot: a table that all processes map, and that is right after any of them has been killed at any instant.

The file is a head, an index, the table and the slots (see docs/slab-store.md).  The table has an entry for each slot, in their
order; the index only says where to look.  Slots are given out in the order of the file, and round again (`clock`), so that the
objects of a batch become neighbours, which a disk writes and reads at once.

An entry is written in an order that makes each instant right: WRITING with its owner first, READY last.  A slot whose owner is dead
is free.  Readers take no lock: they read, and look at the entry again; a slot that has changed meanwhile was a miss.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from hicache_actors.backends.slab.clock import USED, Clock, Slots
from hicache_actors.backends.slab.entries import (
    ENTRY_BYTES,
    FREE,
    HASH_AT,
    MAX_KEY_BYTES,
    READY,
    USED_AT,
    WRITING,
    key_of,
    look,
    pack_entry,
)
from hicache_actors.backends.slab.index import Hashes, Index
from hicache_actors.backends.slab.locks import ByteLocks
from hicache_actors.cuda_ext.native import slab as native
from hicache_actors.errors import BackendError

_TABLE_LOCK: Final = 1 << 60  # bytes that no file has
_OWNER_LOCKS: Final = 1 << 61
_MARK_BYTES: Final = 8


class Found(NamedTuple):
    """A slot that holds an object, as it was when it was looked at."""

    slot: int
    length: int
    mark: int  #: state and generation


class Lookup(NamedTuple):
    """What was found, a column each."""

    slots: NDArray[np.int64]  #: -1: no object
    lengths: NDArray[np.uint64]
    marks: NDArray[np.uint64]

    def rows(self) -> list[Found | None]:
        return [
            None if slot < 0 else Found(slot, length, mark)
            for slot, length, mark in zip(*(column.tolist() for column in self), strict=True)
        ]


class Claim(NamedTuple):
    """A slot that is being written by this process."""

    slot: int
    key: bytes
    digest: bytes  #: xxh3-128 of the key
    length: int


class Table:
    """``memory``: the entries; ``index`` and ``hand`` (8 bytes: where the next slot is taken) lie in the same file.

    Any thread may call; ``now_ms`` is the wall clock, which processes share.
    """

    def __init__(self, memory: memoryview, index: memoryview, hand: memoryview, locks: ByteLocks) -> None:
        self._entries = np.frombuffer(memory, np.uint8).reshape(-1, ENTRY_BYTES)
        self.slots = len(memory) // ENTRY_BYTES
        self._locks = locks
        self._lock = threading.Lock()
        self._marks = _column(memory, "<u8", 0)
        self._states = _column(memory, "<u4", 0)
        self._owners = _column(memory, "<u4", 4)
        self._used = _column(memory, "<u8", USED_AT)
        self._hashes: Hashes = np.ndarray((self.slots, 2), "<u8", memory, HASH_AT, (ENTRY_BYTES, 8))
        self._index = Index(index)
        self._native = native.slab_table(memory, index)
        self._clock = Clock(hand, self._states, self._owners, self._used, self._lives)
        self._owner = secrets.randbits(31) | 1
        while not locks.take(_OWNER_LOCKS + self._owner):
            self._owner = secrets.randbits(31) | 1

    # -- without a lock: what is answered may change at once -----------------------------------------------------------

    def find(self, key: str) -> Found | None:
        return self.find_many([key])[0]

    def find_many(self, keys: Sequence[str]) -> list[Found | None]:
        return self.look_up(keys).rows()

    def look_up(self, keys: Sequence[str]) -> Lookup:
        names = [key.encode() for key in keys]
        return self._look_up(names, [*map(xxh3_128_digest, names)])

    def unchanged(self, slots: Slots, marks: NDArray[np.uint64]) -> list[bool]:
        """Whether the entry of each slot has the mark that it had."""
        same: list[bool] = (self._marks[slots] == marks).tolist()
        return same

    def touch(self, slots: Slots, now_ms: int) -> None:
        """They have been used."""
        self._used[slots] = now_ms | USED

    def keys(self, slots: range) -> list[str]:
        """Of those of ``slots`` that hold an object which is found there."""
        ready = np.nonzero(self._states[slots.start : slots.stop] == READY)[0] + slots.start
        here = [(slot, key_of(self._entries[[slot]])) for slot in ready.tolist()]
        names = [(slot, key.decode()) for slot, key in here if key is not None]
        found = self.find_many([key for _, key in names])
        return [key for (slot, key), one in zip(names, found, strict=True) if one is not None and one.slot == slot]

    # -- changes -------------------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Nobody else changes the table meanwhile, in any thread or process: for the methods below, and for as short as can be."""
        with self._lock:
            self._locks.hold(_TABLE_LOCK)
            try:
                yield
            finally:
                self._locks.let_go(_TABLE_LOCK)

    def claim_many(self, keys: Sequence[str], lengths: Sequence[int]) -> list[Claim | Found | None]:
        """For each key a slot to write in; what is there already; or None: all slots are being written."""
        names = [key.encode() for key in keys]
        longest = max(map(len, names), default=0)
        if longest > MAX_KEY_BYTES:
            raise BackendError(f"a key of {longest} bytes; at most {MAX_KEY_BYTES} have room", retryable=False)
        digests = [*map(xxh3_128_digest, names)]
        found = self._look_up(names, digests).rows()
        claims: list[Claim | Found | None] = [
            one if one is not None and one.length == length else None
            for one, length in zip(found, lengths, strict=True)
        ]
        absent = [at for at, one in enumerate(claims) if one is None]
        slots = self._clock.take(len(absent))
        held = self._states[slots] == READY
        # The state first: from here on nobody takes what is in a slot for an object.
        self._marks[slots] = self._owner << 32 | WRITING
        if held.any():
            self._index.drop(self._hashes[slots[held]], slots[held])
        for at, slot in zip(absent, slots.tolist(), strict=False):
            claims[at] = Claim(slot, names[at], digests[at], lengths[at])
        return claims

    def publish_many(self, claims: Sequence[Claim], now_ms: int) -> list[bool]:
        """The bytes are there -> whether each is found now; False if another writer was faster, and the slot is free again."""
        stays: dict[bytes, Claim] = {}
        there = self._look_up([claim.key for claim in claims], [claim.digest for claim in claims])
        for claim, found in zip(claims, there.rows(), strict=True):
            if claim.key in stays or (found is not None and found.length == claim.length):
                self._states[claim.slot] = FREE
                continue
            if found is not None:
                self._free([found.slot])
            stays[claim.key] = claim
        count, slots = len(stays), [claim.slot for claim in stays.values()]
        generations = np.frombuffer(os.urandom(4 * count), "<u4")
        packed = bytearray(count * ENTRY_BYTES)
        for number, (generation, claim) in enumerate(zip(generations.tolist(), stays.values(), strict=True)):
            at = number * ENTRY_BYTES
            pack_entry(packed, at, generation, claim.length, now_ms, claim.digest, claim.key)
        self._entries[slots, _MARK_BYTES:] = np.frombuffer(packed, np.uint8).reshape(-1, ENTRY_BYTES)[:, _MARK_BYTES:]
        self._owners[slots] = generations
        hashes = _hashes_of([claim.digest for claim in stays.values()])
        self._index.add(hashes, slots, lambda near: self._evict(near, frozenset(slots)))
        self._states[slots] = READY
        return [stays.get(claim.key) is claim for claim in claims]

    def give_up(self, claims: Sequence[Claim]) -> None:
        """The bytes could not be written."""
        self._states[[claim.slot for claim in claims]] = FREE

    def remove(self, keys: Sequence[str]) -> int:
        """-> how many there were."""
        slots = {found.slot for found in self.find_many(keys) if found is not None}
        self._free(sorted(slots))
        return len(slots)

    def clear(self) -> None:
        self._states[self._states == READY] = FREE
        self._index.clear()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _look_up(self, names: Sequence[bytes], digests: Sequence[bytes]) -> Lookup:
        if self._native is not None and all(map(_fits, names)):
            slots, lengths, marks = self._native.find(names, digests)
            return Lookup(slots.view(np.int64), lengths, marks)
        rows, near = self._index.candidates(_hashes_of(digests))
        known = near < self.slots
        rows, near = rows[known], near[known]
        found = Lookup(np.full(len(names), -1), *np.zeros((2, len(names)), np.uint64))
        at = rows.tolist()
        for row, slot, there in zip(
            at, near.tolist(), look(self._entries[near], [names[row] for row in at]), strict=True
        ):
            if there is not None and found.slots[row] < 0:
                found.slots[row], (found.lengths[row], found.marks[row]) = slot, there
        return found

    def _free(self, slots: Sequence[int]) -> None:
        at = np.array(slots, np.int64)
        self._states[at] = FREE
        self._index.drop(self._hashes[at], at)

    def _evict(self, slots: list[int], publishing: frozenset[int]) -> int:
        """Of the slots that a key's full buckets point at -> the position of the one that is forgotten."""
        lasts_ms = []
        for at, slot in enumerate(slots):
            if slot in publishing:
                lasts_ms.append(USED)
            elif slot >= self.slots or self._states[slot] != READY:
                return at  # a hint that a dead writer has left
            else:
                lasts_ms.append(int(self._used[slot]) & ~USED)
        oldest = lasts_ms.index(min(lasts_ms))
        self._states[slots[oldest]] = FREE
        return oldest

    def _lives(self, owner: int) -> bool:
        return owner == self._owner or self._locks.held_by_another(_OWNER_LOCKS + owner)


def _fits(name: bytes) -> bool:
    return 0 < len(name) <= MAX_KEY_BYTES


def _hashes_of(digests: Sequence[bytes]) -> Hashes:
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


def _column(memory: memoryview, kind: str, at: int) -> NDArray[np.uint64]:
    return np.ndarray((len(memory) // ENTRY_BYTES,), kind, memory, at, (ENTRY_BYTES,))
