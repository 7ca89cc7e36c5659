"""The entry of a slot: 256 bytes that say what is in it.  docs/slab-store.md has the table."""

from __future__ import annotations

import struct
from typing import Final

from xxhash import xxh3_64_intdigest

ENTRY_BYTES: Final = 256
FREE, WRITING, READY = 0, 1, 2

# State, generation or owner, length, last use, checksum, hash, length of the key.
_ENTRY: Final = struct.Struct("<IIQQQ16sB")
_64_BITS: Final = (1 << 64) - 1
USED_AT: Final = 16
HASH_AT: Final = 32
_KEY_AT: Final = 49
MAX_KEY_BYTES: Final = ENTRY_BYTES - _KEY_AT


def pack_entry(into: bytearray, at: int, generation: int, length: int, used: int, digest: bytes, key: bytes) -> None:
    """The entry that begins at ``at``, but for its state, which is FREE.  ``digest``: xxh3-128 of the key."""
    checksum = _checksum(generation, length, key)
    _ENTRY.pack_into(into, at, FREE, generation, length, used, checksum, digest, len(key))
    into[at + _KEY_AT : at + _KEY_AT + len(key)] = key


def key_of(entry: bytes) -> bytes | None:
    """None for a slot that holds no object, and for an entry that is damaged, or was read while it was written."""
    key = entry[_KEY_AT : _KEY_AT + entry[_KEY_AT - 1]]
    return None if look(entry, 0, key) is None else key


def look(entries: bytes, at: int, key: bytes) -> tuple[int, int] | None:
    """What the entry that begins at ``at`` says of the object of ``key``: its length, and the mark of the entry (state and
    generation as one number).  None as for `key_of`, and if it is about another key."""
    state, generation, length, _, checksum, _, n = _ENTRY.unpack_from(entries, at)
    if state != READY or n != len(key) or not entries.startswith(key, at + _KEY_AT):
        return None
    return (length, generation << 32 | state) if checksum == _checksum(generation, length, key) else None


def _checksum(generation: int, length: int, key: bytes) -> int:
    return xxh3_64_intdigest(key, (generation << 32 ^ length) & _64_BITS)
