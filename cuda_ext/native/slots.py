"""Slots of one file, a batch a call and without the GIL (capi/slots.h)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache

from hicache_actors.cuda_ext.native.buffers import addresses, lengths
from hicache_actors.cuda_ext.native.library import Library, library


class Slots:
    """Any thread that may block."""

    def __init__(self, native: Library) -> None:
        word, table = ctypes.c_int32, ctypes.c_void_p
        self._move = native.function("hic_slots_move", word, word, word, ctypes.c_uint64, table, table, table)
        self._copy = native.function("hic_slots_copy", None, ctypes.c_uint64, table, table, table)

    def move(self, fd: int, buffers: Sequence[memoryview], offsets: Sequence[int], *, writes: bool) -> None:
        """Read or write whole buffers at their offsets of a file.  Raises OSError; then any of them may hold anything."""
        count = len(buffers)
        at, sizes = addresses(buffers), lengths(buffers)
        code = self._move(fd, int(writes), count, at, sizes, (ctypes.c_uint64 * count)(*offsets))
        if code:
            raise OSError(code, os.strerror(code))

    def copy(self, targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
        """Each source to its target, of the same length."""
        self._copy(len(targets), addresses(targets), addresses(sources), lengths(targets))


@cache
def slots() -> Slots | None:
    """None without the native library."""
    native = library()
    return None if native is None else Slots(native)
