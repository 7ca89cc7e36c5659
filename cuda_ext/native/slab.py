"""Lookups in the table of a slab store, a batch a call (capi/slab.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hicache_actors.cuda_ext.native.buffers import address
from hicache_actors.cuda_ext.native.library import Library, library

_ENTRY_BYTES: Final = 256
_BUCKET_BYTES: Final = 64


class SlabTable:
    """``entries`` and ``index`` stay mapped as long as it is used.  Any thread."""

    def __init__(self, native: Library, entries: memoryview, index: memoryview) -> None:
        self._kept = entries, index
        self._where = (
            address(entries), len(entries) // _ENTRY_BYTES, address(index), len(index) // _BUCKET_BYTES,
        )  # fmt: skip
        pointer, count, text = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p
        # Some microseconds; to let go of the GIL and have it again costs more.
        self._find = native.quick(
            "hic_slab_find", ctypes.c_int32, pointer, count, pointer, count, count, text, pointer, text, pointer
        )
        self._last_error = native.last_error

    def find(self, keys: Sequence[bytes], digests: Sequence[bytes]) -> NDArray[np.uint64]:
        """Three rows: of each key the slot (2^64 - 1: none), the length of its object, and the mark of the entry.

        ``digests``: xxh3-128 of each key, as the xxhash package writes it.  ValueError for a key that no entry has room for.
        """
        count = len(keys)
        lengths, found = (ctypes.c_uint64 * count)(*map(len, keys)), np.empty((3, count), np.uint64)
        if self._find(*self._where, count, b"".join(keys), lengths, b"".join(digests), found.ctypes.data) < 0:
            raise ValueError(self._last_error())
        return found


def slab_table(entries: memoryview, index: memoryview) -> SlabTable | None:
    """None without the native library."""
    native = library()
    return None if native is None else SlabTable(native, entries, index)
