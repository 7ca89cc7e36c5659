"""Objects in slots of a file or of memory, a batch a call and without the GIL (capi/slots.h)."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Final

from hicache_actors.cuda_ext.native.buffers import addresses, lengths
from hicache_actors.cuda_ext.native.library import Library, library
from hicache_actors.cuda_ext.native.structs import Names, SlotBatch

RING_DEPTH: Final = 16  #: requests under way in one queue
NOT_CACHED: Final = 255
"""Instead of a verdict: the page cache has not got all of the piece, so it was not read."""


class Moving:
    """A batch that is moved.  `move` may be called by several threads at once, which share the work."""

    def __init__(self, slots: Slots, batch: SlotBatch, verdicts: ctypes.Array[ctypes.c_uint8], kept: object) -> None:
        self.batch = batch
        self._slots, self._verdicts, self._kept = slots, verdicts, kept

    def move(self) -> None:
        """ValueError, with nothing done, if an object has no room for a header."""
        self._slots.done(self._slots.move(self.batch))

    def check(self) -> None:
        """When nobody works any more: raises OSError if a request failed; then any of the buffers or slots may hold anything."""
        if self.batch.error:
            raise OSError(self.batch.error, os.strerror(self.batch.error))

    @property
    def verdicts(self) -> list[int]:
        """Of each piece: its hic_verdict, after a read with names; `NOT_CACHED`, where the page cache was to be read."""
        return list(self._verdicts)


class Slots:
    """Any thread that may block."""

    def __init__(self, native: Library) -> None:
        batch, ring, word = ctypes.POINTER(SlotBatch), ctypes.c_void_p, ctypes.c_int32
        self.move = native.function("hic_slots_move", word, batch)
        self.open_ring = native.function("hic_uring_open", ring, ctypes.c_uint32, ctypes.POINTER(word))
        self.move_by_ring = native.function("hic_uring_move", word, ring, batch)
        self.close_ring = native.function("hic_uring_close", None, ring)
        self._write_out = native.function("hic_slots_write_out", word, word, ctypes.c_uint64)
        self._last_error = native.last_error

    def moving(
        self,
        buffers: Sequence[memoryview],
        offsets: Sequence[int],
        *,
        writes: bool,
        fd: int,
        memory: int,
        request_bytes: int,
        names: Names | None,
        numbers: Sequence[int],
        from_cache: bool = False,
    ) -> Moving:
        """Whole buffers, from or to their ``offsets`` in the file ``fd``, or in what begins at the address ``memory``, if that is
        not 0.  With ``names`` they are objects, of these ``numbers``: sealed before a write, judged after a read.
        ``from_cache``: read what the page cache has, and nothing else (`NOT_CACHED`); by `Moving.move` only."""
        count = len(buffers)
        verdicts = (ctypes.c_uint8 * count)()
        at, sizes = addresses(buffers), lengths(buffers)
        places, which = (ctypes.c_uint64 * count)(*offsets), (ctypes.c_uint64 * count)(*numbers)
        batch = SlotBatch(
            count, 0, ctypes.addressof(at), ctypes.addressof(sizes), ctypes.addressof(places), memory or None,
            None if names is None else ctypes.pointer(names), ctypes.addressof(which), ctypes.addressof(verdicts),
            request_bytes, fd, int(writes), 0, int(from_cache),
        )  # fmt: skip
        return Moving(self, batch, verdicts, (at, sizes, places, which, names, buffers))

    def write_out(self, fd: int, offset: int) -> None:
        """Have the kernel begin to write what it keeps of a file from ``offset`` on; waits for none of it.  Raises OSError."""
        error = self._write_out(fd, offset)
        if error:
            raise OSError(error, os.strerror(error))

    def done(self, code: int) -> None:
        if code < 0:
            raise ValueError(self._last_error())


class Rings:
    """Queues to the kernel: one for each thread that moves a batch at the same time, kept for the next.  Any thread."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._idle: list[int] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, slots, self._idle)

    def move(self, call: Moving) -> None:
        """Raises OSError if the kernel gives no queue; nothing has been moved then."""
        with self._lock:
            ring = self._idle.pop() if self._idle else None
        if ring is None:
            ring = self._open()
        try:
            self._slots.done(self._slots.move_by_ring(ring, call.batch))
        finally:
            with self._lock:
                self._idle.append(ring)

    def _open(self) -> int:
        error = ctypes.c_int32()
        ring = self._slots.open_ring(RING_DEPTH, ctypes.byref(error))
        if not ring:
            raise OSError(error.value, os.strerror(error.value))
        return int(ring)


@cache
def slots() -> Slots | None:
    """None without the native library."""
    native = library()
    return None if native is None else Slots(native)


def _close_all(slots: Slots, rings: list[int]) -> None:
    for ring in rings:
        slots.close_ring(ring)
