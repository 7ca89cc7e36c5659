"""The entry of a slot: 256 bytes that say what is in it.  docs/slab-store.md has the table."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

ENTRY_BYTES: Final = 256
FREE, WRITING, READY = 0, 1, 2

# State, generation or owner, length, last use, checksum, hash, length of the key.
_ENTRY: Final = struct.Struct("<IIQQQ16sB")
_32_BITS, _64_BITS = (1 << 32) - 1, (1 << 64) - 1
USED_AT: Final = 16
HASH_AT: Final = 32
_HEAD_BYTES: Final = 32  # all before the hash
_KEY_BYTES_AT: Final = 48
_KEY_AT: Final = 49
MAX_KEY_BYTES: Final = ENTRY_BYTES - _KEY_AT

Entries = NDArray[np.uint8]
"""A row for each; of its own memory, for what all processes share changes while it is looked at."""


def pack_entry(into: bytearray, at: int, generation: int, length: int, used: int, digest: bytes, key: bytes) -> None:
    """The entry that begins at ``at``, but for its state, which is FREE.  ``digest``: xxh3-128 of the key."""
    checksum = _checksum(generation, length, key)
    _ENTRY.pack_into(into, at, FREE, generation, length, used, checksum, digest, len(key))
    into[at + _KEY_AT : at + _KEY_AT + len(key)] = key


def key_of(entry: Entries) -> bytes | None:
    """Of one entry; None for a slot that holds no object, and for an entry that is damaged, or was read while it was written."""
    key = entry.tobytes()[_KEY_AT : _KEY_AT + int(entry[0, _KEY_BYTES_AT])]
    return None if look(entry, [key])[0] is None else key


def look(entries: Entries, keys: Sequence[bytes]) -> list[tuple[int, int] | None]:
    """What each entry says of the object of its key: its length, and the mark of the entry (state and generation as one number).
    None as for `key_of`, and if it is about another key."""
    heads, counts, whole = (
        entries[:, :_HEAD_BYTES].view("<u8").tolist(),
        entries[:, _KEY_BYTES_AT].tolist(),
        entries.tobytes(),
    )
    found: list[tuple[int, int] | None] = [None] * len(keys)
    for at, (key, n, (mark, length, _, checksum)) in enumerate(zip(keys, counts, heads, strict=True)):
        if (
            mark & _32_BITS == READY
            and n == len(key)
            and whole.startswith(key, at * ENTRY_BYTES + _KEY_AT)
            and checksum == xxh3_64_intdigest(key, mark - READY ^ length)
        ):
            found[at] = length, mark
    return found


def _checksum(generation: int, length: int, key: bytes) -> int:
    return xxh3_64_intdigest(key, (generation << 32 ^ length) & _64_BITS)
