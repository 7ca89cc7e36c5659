"""The entry of a slot: 256 bytes that say what is in it.  docs/slab-store.md has the table."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash

ENTRY_BYTES: Final = 256
FREE, WRITING, READY = 0, 1, 2

_ENTRY: Final = struct.Struct(
    "<IIQQQ16sB"
)  # state, generation or owner, length, last use, checksum, hash, length of the key
_MARK: Final = struct.Struct("<Q")
USED_AT: Final = 16
HASH_AT: Final = 32
_KEY_AT: Final = 49
MAX_KEY_BYTES: Final = ENTRY_BYTES - _KEY_AT


class Entry(NamedTuple):
    mark: int  #: state and generation, as one number
    length: int
    key: bytes


class Packed(NamedTuple):
    generation: int
    rest: bytes  #: all that follows the generation


def pack_entry(generation: int, length: int, used: int, digest: bytes, key: bytes) -> Packed:
    """``digest``: xxh3-128 of the key."""
    checksum = _checksum(generation, length, key)
    packed = _ENTRY.pack(FREE, generation, length, used, checksum, digest, len(key))
    return Packed(generation, packed[_MARK.size :] + key)


def unpack_entry(entry: bytes) -> Entry | None:
    """None for a slot that holds no object, and for an entry that is damaged, or was read while it was written."""
    state, generation, length, _, checksum, _, n = _ENTRY.unpack_from(entry)
    if state != READY:
        return None
    key = entry[_KEY_AT : _KEY_AT + n]
    mark: int = _MARK.unpack_from(entry)[0]
    return Entry(mark, length, key) if checksum == _checksum(generation, length, key) else None


def _checksum(generation: int, length: int, key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key, seed=(generation << 32 ^ length) & (1 << 64) - 1)
