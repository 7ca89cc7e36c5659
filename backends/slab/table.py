"""Who is in which slot: a table that all processes map, and that is right after any of them has been killed at any instant.

The file is a head, an index, the table and the slots (see docs/slab-store.md).  The table has an entry for each slot, in their
order; the index only says where to look.  Slots are given out in the order of the file, and round again (`clock`), so that the
objects of a batch become neighbours, which a disk writes and reads at once.

An entry is written in an order that makes each instant right: WRITING with its owner first, READY last.  A slot whose owner is dead
is free.  Readers take no lock: they read, and look at the entry again; a slot that has changed meanwhile was a miss.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from hicache_actors.backends.slab.clock import USED, Clock
from hicache_actors.backends.slab.entries import (
    ENTRY_BYTES,
    FREE,
    HASH_AT,
    MAX_KEY_BYTES,
    READY,
    USED_AT,
    WRITING,
    pack_entry,
    unpack_entry,
)
from hicache_actors.backends.slab.index import Hashes, Index
from hicache_actors.backends.slab.locks import ByteLocks
from hicache_actors.errors import BackendError

_TABLE_LOCK: Final = 1 << 60  # bytes that no file has
_OWNER_LOCKS: Final = 1 << 61


class Found(NamedTuple):
    """A slot that holds an object, as it was when it was looked at."""

    slot: int
    length: int
    mark: int  #: state and generation


class Claim(NamedTuple):
    """A slot that is being written by this process."""

    slot: int
    key: str
    length: int


class Table:
    """``memory``: the entries; ``index`` and ``hand`` (8 bytes: where the next slot is taken) lie in the same file.

    Any thread may call; ``now_ms`` is the wall clock, which processes share.
    """

    def __init__(self, memory: memoryview, index: memoryview, hand: memoryview, locks: ByteLocks) -> None:
        self._memory = memory
        self.slots = len(memory) // ENTRY_BYTES
        self._locks = locks
        self._lock = threading.Lock()
        self._marks = _column(memory, "<u8", 0)
        self._states = _column(memory, "<u4", 0)
        self._owners = _column(memory, "<u4", 4)
        self._used = _column(memory, "<u8", USED_AT)
        self._hashes: Hashes = np.ndarray((self.slots, 2), "<u8", memory, HASH_AT, (ENTRY_BYTES, 8))
        self._index = Index(index)
        self._clock = Clock(hand, self._states, self._owners, self._used, self._lives)
        self._owner = secrets.randbits(31) | 1
        while not locks.take(_OWNER_LOCKS + self._owner):
            self._owner = secrets.randbits(31) | 1

    # -- without a lock: what is answered may change at once -----------------------------------------------------------

    def find(self, key: str) -> Found | None:
        return self.find_many([key])[0]

    def find_many(self, keys: Sequence[str]) -> list[Found | None]:
        names = [key.encode() for key in keys]
        found: list[Found | None] = [None] * len(names)
        if names:
            for at, slot in self._index.candidates(_hashes_of(names)):
                if found[at] is None and slot < self.slots:
                    found[at] = self._look(slot, names[at])
        return found

    def unchanged(self, found: Sequence[Found]) -> list[bool]:
        slots, marks = [one.slot for one in found], [one.mark for one in found]
        same: list[bool] = (self._marks[slots] == np.array(marks, np.uint64)).tolist()
        return same

    def touch(self, found: Sequence[Found], now_ms: int) -> None:
        """They have been used."""
        self._used[[one.slot for one in found]] = now_ms | USED

    def keys(self, slots: range) -> list[str]:
        """Of those of ``slots`` that hold an object which is found there."""
        ready = np.nonzero(self._states[slots.start : slots.stop] == READY)[0] + slots.start
        here = [(slot, unpack_entry(self._entry(slot))) for slot in ready.tolist()]
        names = [(slot, entry.key.decode()) for slot, entry in here if entry is not None]
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
        for key in keys:
            if len(key.encode()) > MAX_KEY_BYTES:
                raise BackendError(
                    f"a key of {len(key.encode())} bytes; at most {MAX_KEY_BYTES} have room", retryable=False
                )
        found = self.find_many(keys)
        claims: list[Claim | Found | None] = [
            one if one is not None and one.length == length else None
            for one, length in zip(found, lengths, strict=True)
        ]
        absent = [at for at, one in enumerate(claims) if one is None]
        slots = self._clock.take(len(absent))
        held = self._states[slots] == READY
        # The state first: from here on nobody takes what is in a slot for an object.
        self._marks[slots] = self._owner << 32 | WRITING
        self._index.drop(self._hashes[slots[held]], slots[held])
        for at, slot in zip(absent, slots.tolist(), strict=False):
            claims[at] = Claim(slot, keys[at], lengths[at])
        return claims

    def publish_many(self, claims: Sequence[Claim], now_ms: int) -> list[bool]:
        """The bytes are there -> whether each is found now; False if another writer was faster, and the slot is free again."""
        stays: dict[str, Claim] = {}
        for claim, found in zip(claims, self.find_many([claim.key for claim in claims]), strict=True):
            if claim.key in stays or (found is not None and found.length == claim.length):
                self._states[claim.slot] = FREE
                continue
            if found is not None:
                self._free([found.slot])
            stays[claim.key] = claim
        names, slots = [key.encode() for key in stays], [claim.slot for claim in stays.values()]
        hashes = _hashes_of(names)
        for name, claim, halves in zip(names, stays.values(), hashes, strict=True):
            entry = pack_entry(secrets.randbits(32), claim.length, now_ms, halves.tobytes(), name)
            start = claim.slot * ENTRY_BYTES + 8
            self._memory[start : start + len(entry.rest)] = entry.rest
            self._owners[claim.slot] = entry.generation
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

    def _look(self, slot: int, name: bytes) -> Found | None:
        entry = unpack_entry(self._entry(slot))
        return None if entry is None or entry.key != name else Found(slot, entry.length, entry.mark)

    def _entry(self, slot: int) -> bytes:
        return bytes(self._memory[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES])

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


def _hashes_of(names: Sequence[bytes]) -> Hashes:
    return np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, names)), "<u8").reshape(-1, 2)


def _column(memory: memoryview, kind: str, at: int) -> NDArray[np.uint64]:
    return np.ndarray((len(memory) // ENTRY_BYTES,), kind, memory, at, (ENTRY_BYTES,))
