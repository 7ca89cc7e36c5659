"""Who is in which slot: a table that all processes map, and that is right after any of them has been killed at any instant.

The file is a head, the table, and the slots (see docs/slab-store.md).  Slots form sets of 32, as in the cache of a processor; a key
belongs to two sets, and may be in any slot of them.  So nothing has to be rebuilt or kept in step, a look-up touches a few pages of
the table, and what makes room is the slot of both that was unused for longest.  A new object goes into the emptier set, so that the
first one is pushed out when some 93 % of all slots are in use.

An entry is written in an order that makes each instant right: WRITING with its owner first, READY last.  A slot whose owner is dead
is free.  Readers take no lock: they read, and look at the entry again; a slot that has changed meanwhile was a miss.
"""

from __future__ import annotations

import mmap
import secrets
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import xxhash

from hicache_actors.backends.slab.locks import ByteLocks
from hicache_actors.errors import BackendError

ALIGN: Final = 4096
ENTRY_BYTES: Final = 256
WAYS: Final = 32
MAX_KEY_BYTES: Final = ENTRY_BYTES - 49

FREE, WRITING, READY = 0, 1, 2

_STATE: Final = struct.Struct("<I")
_STATE_GENERATION: Final = struct.Struct("<II")
_USED: Final = struct.Struct("<Q")
_ENTRY: Final = struct.Struct(
    "<IIQQQ16sB"
)  # state, generation or owner, length, last used (ms), checksum, hash of the key, its length
_USED_AT: Final = 16
_HASH_AT: Final = 32
_KEY_AT: Final = 49

_TABLE_LOCK: Final = 1 << 60  # bytes that no file has
_OWNER_LOCKS: Final = 1 << 61


class Found(NamedTuple):
    """A slot that holds an object, as it was when it was looked at."""

    slot: int
    length: int
    mark: bytes  #: state and generation


class Claim(NamedTuple):
    """A slot that is being written by this process."""

    slot: int
    key: str
    length: int


class Table:
    """``memory`` is the table's part of the mapping.  Any thread may call; ``now_ms`` is the wall clock, which processes share."""

    def __init__(self, memory: memoryview, mapping: mmap.mmap, at: int, locks: ByteLocks) -> None:
        self._memory, self._mapping, self._at = memory, mapping, at
        self.slots = len(memory) // ENTRY_BYTES
        self.ways = min(WAYS, self.slots)
        self.sets = self.slots // self.ways
        self._locks = locks
        self._lock = threading.Lock()
        self._used_ms = np.ndarray((self.slots,), "<u8", memory, _USED_AT, (ENTRY_BYTES,))
        self._owner = secrets.randbits(31) | 1
        while not locks.take(_OWNER_LOCKS + self._owner):
            self._owner = secrets.randbits(31) | 1

    def find(self, key: str) -> Found | None:
        """Takes no lock; what it answers may change at once."""
        name = key.encode()
        digest = xxhash.xxh3_128_digest(name)
        for first in self._sets_of(digest):
            start, end = first * ENTRY_BYTES, (first + self.ways) * ENTRY_BYTES
            at = self._mapping.find(digest, self._at + start, self._at + end) - self._at
            while at >= start:
                offset = at - _HASH_AT
                if offset % ENTRY_BYTES == 0:
                    entry = bytes(self._memory[offset : offset + ENTRY_BYTES])
                    state, generation, length, _, checksum, _, _ = _ENTRY.unpack_from(entry)
                    if state == READY and checksum == _checksum(generation, length, name):
                        return Found(offset // ENTRY_BYTES, length, entry[: _STATE_GENERATION.size])
                at = self._mapping.find(digest, self._at + at + 1, self._at + end) - self._at
        return None

    def unchanged(self, found: Found) -> bool:
        start = found.slot * ENTRY_BYTES
        return self._memory[start : start + _STATE_GENERATION.size] == found.mark

    def touch(self, found: Found, now_ms: int) -> None:
        _USED.pack_into(self._memory, found.slot * ENTRY_BYTES + _USED_AT, now_ms)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Nobody else changes the table meanwhile, in any thread or process: for the methods below, and for as short as can be."""
        with self._lock:
            self._locks.hold(_TABLE_LOCK)
            try:
                yield
            finally:
                self._locks.let_go(_TABLE_LOCK)

    def claim(self, key: str, length: int) -> Claim | Found | None:
        """A slot to write in; what is there already; or None: all slots of its sets are being written."""
        name = key.encode()
        if len(name) > MAX_KEY_BYTES:
            raise BackendError(f"a key of {len(name)} bytes; at most {MAX_KEY_BYTES} have room", retryable=False)
        found = self.find(key)
        if found is not None and found.length == length:
            return found
        slot = found.slot if found is not None else self._victim(self._sets_of(xxhash.xxh3_128_digest(name)))
        if slot is None:
            return None
        # The state first: from here on nobody takes what is in the slot for an object.
        _STATE_GENERATION.pack_into(self._memory, slot * ENTRY_BYTES, WRITING, self._owner)
        return Claim(slot, key, length)

    def publish(self, claim: Claim, now_ms: int) -> bool:
        """The bytes are there -> whether they are found now; False if another writer was faster, and the slot is free again."""
        name, start = claim.key.encode(), claim.slot * ENTRY_BYTES
        found = self.find(claim.key)
        if found is not None and found.length == claim.length:
            self._free(claim.slot)
            return False
        if found is not None:
            self._free(found.slot)
        generation = secrets.randbits(32)
        digest, checksum = xxhash.xxh3_128_digest(name), _checksum(generation, claim.length, name)
        entry = _ENTRY.pack(WRITING, self._owner, claim.length, now_ms, checksum, digest, len(name)) + name
        self._memory[start + 8 : start + len(entry)] = entry[8:]
        _STATE_GENERATION.pack_into(self._memory, start, WRITING, generation)
        _STATE.pack_into(self._memory, start, READY)
        return True

    def give_up(self, claim: Claim) -> None:
        """The bytes could not be written."""
        self._free(claim.slot)

    def remove(self, key: str) -> bool:
        found = self.find(key)
        if found is not None:
            self._free(found.slot)
        return found is not None

    def clear(self) -> None:
        for slot in range(self.slots):
            if self._memory[slot * ENTRY_BYTES] == READY:
                self._free(slot)

    def keys(self, slots: Sequence[int]) -> list[str]:
        """Of those of ``slots`` that hold an object."""
        found = []
        for slot in slots:
            entry = bytes(self._memory[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES])
            state, generation, length, _, checksum, _, n = _ENTRY.unpack_from(entry)
            name = entry[_KEY_AT : _KEY_AT + n]
            if state == READY and checksum == _checksum(generation, length, name):
                found.append(name.decode())
        return found

    def _victim(self, sets: Sequence[int]) -> int | None:
        """A free slot of the emptier set, one of a dead writer, or the slot that was unused for longest."""
        states = [bytes(self._memory[self._bytes_of(first)][::ENTRY_BYTES]) for first in sets]  # their lowest bytes
        free = [one.count(FREE) for one in states]
        if any(free):
            emptier = free.index(max(free))
            return sets[emptier] + states[emptier].index(FREE)
        oldest: tuple[int, int] | None = None
        for first, one in zip(sets, states, strict=True):
            used_ms = self._used_ms[first : first + self.ways]
            for at in map(int, used_ms.argsort()):
                if one[at] != READY:
                    _, owner = _STATE_GENERATION.unpack_from(self._memory, (first + at) * ENTRY_BYTES)
                    if not self._lives(owner):
                        return first + at
                else:
                    oldest = min(oldest or (int(used_ms[at]), first + at), (int(used_ms[at]), first + at))
                    break
        return None if oldest is None else oldest[1]

    def _lives(self, owner: int) -> bool:
        return owner == self._owner or self._locks.held_by_another(_OWNER_LOCKS + owner)

    def _free(self, slot: int) -> None:
        _STATE.pack_into(self._memory, slot * ENTRY_BYTES, FREE)

    def _bytes_of(self, first: int) -> slice:
        return slice(first * ENTRY_BYTES, (first + self.ways) * ENTRY_BYTES)

    def _sets_of(self, digest: bytes) -> tuple[int, ...]:
        """The first slots of the sets that a key belongs to."""
        one, other = (int.from_bytes(digest[at : at + 8], "little") % self.sets * self.ways for at in (0, 8))
        return (one,) if one == other else (one, other)


def _checksum(generation: int, length: int, name: bytes) -> int:
    return xxhash.xxh3_64_intdigest(name, seed=(generation << 32 ^ length) & (1 << 64) - 1)
