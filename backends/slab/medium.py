"""How bytes come into slots and out of them.  Called in worker threads, several at once."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

import numpy as np

from hicache_actors.backends.slab.store_file import StoreFile
from hicache_actors.backends.slab.table import ALIGN

_UNALIGNED: Final = (errno.EINVAL,)


class Piece(NamedTuple):
    slot: int
    buffer: memoryview


class Medium(Protocol):
    name: str

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill each buffer from the beginning of its slot.  Raises OSError."""

    def write(self, pieces: Sequence[Piece]) -> None:
        """Raises OSError; then any of the slots may hold anything."""

    def close(self) -> None: ...


class Mapped:
    """Memory that is mapped: a copy each way, at the speed of memory while the pages are there."""

    name = "mapped"

    def __init__(self, file: StoreFile) -> None:
        assert file.slots is not None
        self._slots = np.frombuffer(file.slots, dtype=np.uint8).reshape(file.geometry.slots, file.geometry.slot_bytes)

    def read(self, pieces: Sequence[Piece]) -> None:
        for slot, buffer in pieces:
            np.copyto(np.frombuffer(buffer, dtype=np.uint8), self._slots[slot, : len(buffer)])

    def write(self, pieces: Sequence[Piece]) -> None:
        for slot, buffer in pieces:
            np.copyto(self._slots[slot, : len(buffer)], np.frombuffer(buffer, dtype=np.uint8))

    def close(self) -> None:
        pass


class Direct:
    """Past the page cache where the file system and the buffer allow it: host slots do, at addresses and lengths of 4096.

    Half the processor time of buffered I/O, and no second copy of each page in memory.
    """

    def __init__(self, file: StoreFile) -> None:
        self._geometry = file.geometry
        self._buffered = file.fd
        self._direct = _open_direct(file.path)
        self.name = "buffered" if self._direct is None else "direct"

    def read(self, pieces: Sequence[Piece]) -> None:
        for slot, buffer in pieces:
            at, done = self._at(slot), 0
            fd = self._fd(buffer)
            while done < len(buffer):
                n = os.preadv(fd, [buffer[done:]], at + done)
                if n == 0:
                    raise OSError(errno.EIO, "the file is shorter than its head says")
                done += n

    def write(self, pieces: Sequence[Piece]) -> None:
        for slot, buffer in pieces:
            at, done = self._at(slot), 0
            fd = self._fd(buffer)
            while done < len(buffer):
                done += os.pwritev(fd, [buffer[done:]], at + done)

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)

    def _at(self, slot: int) -> int:
        return self._geometry.data_at + slot * self._geometry.slot_bytes

    def _fd(self, buffer: memoryview) -> int:
        if self._direct is None or len(buffer) % ALIGN or _address(buffer) % ALIGN:
            return self._buffered
        return self._direct


def _open_direct(path: str) -> int | None:
    """None where the file system refuses it, at opening or at the first read."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _UNALIGNED:
            return None
        raise
    probe = np.empty(2 * ALIGN, dtype=np.uint8)
    start = -probe.ctypes.data % ALIGN
    with suppress(OSError):
        os.preadv(fd, [probe.data[start : start + ALIGN]], 0)
        return fd
    os.close(fd)
    return None


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
