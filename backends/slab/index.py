"""Where the entry of a key is: hints, each good only if the entry agrees.

A hint is 8 bytes, so it is there or not: the number of a slot (from 1), and above it 32 bits of the hash of its key.  They lie in
buckets of eight, one line of a processor's cache; a key may be in either of two.  There is room for two hints a slot, so that a
bucket is next to never full.  What a writer that died has left behind points at a slot whose entry says otherwise, and is
overwritten when its place is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

HINT_BYTES: Final = 8
PER_BUCKET: Final = 8
_HINTS_PER_SLOT: Final = 2
_TAG_BITS: Final = np.uint64(32)
_SLOT_MASK: Final = np.uint64((1 << 32) - 1)

Hashes = NDArray[np.uint64]
"""A row for each key: the halves of its xxh3-128."""


def index_bytes(slots: int) -> int:
    return -(-slots * _HINTS_PER_SLOT // PER_BUCKET) * PER_BUCKET * HINT_BYTES


class Index:
    """``memory`` is the index's part of the mapping.  `candidates` takes no lock; for the rest nobody else changes the table."""

    def __init__(self, memory: memoryview) -> None:
        self._hints: NDArray[np.uint64] = np.frombuffer(memory, "<u8").reshape(-1, PER_BUCKET)
        self._buckets = np.uint64(len(self._hints))

    def candidates(self, hashes: Hashes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(row of the key, slot) of each hint that may be about one of these keys, in two columns."""
        rows = self._hints[hashes % self._buckets]
        at = np.nonzero((rows >> _TAG_BITS == _tags(hashes)[:, None, None]) & (rows != 0))
        return at[0], (rows[at] & _SLOT_MASK).astype(np.int64) - 1

    def add(self, hashes: Hashes, slots: Sequence[int], evict: Callable[[list[int]], int]) -> None:
        """A hint for each key.  Where both buckets are full, ``evict`` is given the slots that they point at, takes one of them
        away, and says which of the positions it was."""
        hints = _hints(hashes, np.array(slots, np.uint64)).tolist()
        buckets = (hashes % self._buckets).tolist()
        around = [*{bucket for pair in buckets for bucket in pair}]
        near: dict[int, list[int]] = dict(zip(around, self._hints[around].tolist(), strict=True))  # with what is added
        changes: dict[tuple[int, int], int] = {}
        for hint, (first, second) in zip(hints, buckets, strict=True):
            pair = near[first], near[second]
            if hint in pair[0] or hint in pair[1]:
                continue  # left by a writer that died
            free = pair[0].count(0), pair[1].count(0)
            if free[0] or free[1]:
                emptier = int(free[1] > free[0])
                place = pair[emptier].index(0)
            else:
                number = evict([(each & 0xFFFFFFFF) - 1 for one in pair for each in one])
                emptier, place = divmod(number, PER_BUCKET)
            pair[emptier][place] = hint
            changes[(first, second)[emptier], place] = hint
        if changes:
            self._hints[tuple(np.array(list(changes)).T)] = np.array(list(changes.values()), np.uint64)

    def drop(self, hashes: Hashes, slots: NDArray[np.int64]) -> None:
        """The hints that say that these keys are in these slots."""
        buckets = hashes % self._buckets
        row, which, place = np.nonzero(self._hints[buckets] == _hints(hashes, slots.astype(np.uint64))[:, None, None])
        self._hints[buckets[row, which], place] = 0

    def clear(self) -> None:
        self._hints[:] = 0


def _tags(hashes: Hashes) -> NDArray[np.uint64]:
    return (hashes[:, 0] ^ hashes[:, 1]) >> _TAG_BITS


def _hints(hashes: Hashes, slots: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return _tags(hashes) << _TAG_BITS | slots + np.uint64(1)
