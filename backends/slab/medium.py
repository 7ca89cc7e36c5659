"""How bytes come into slots and out of them.  Called in worker threads, several at once."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from hicache_actors.backends.slab.store_file import StoreFile
from hicache_actors.backends.slab.table import ALIGN
from hicache_actors.cuda_ext.native import slots as native
from hicache_actors.runtime.observation import bind_log

_REFUSALS: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class Piece(NamedTuple):
    slot: int
    buffer: memoryview


class Medium(Protocol):
    @property
    def name(self) -> str:
        """For `stats`."""

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill each buffer from the beginning of its slot.  Raises OSError."""

    def write(self, pieces: Sequence[Piece]) -> None:
        """Raises OSError; then any of the slots may hold anything."""


class Mapped:
    """Memory that is mapped: a copy each way, at the speed of memory while the pages are there."""

    name = "mapped"

    def __init__(self, file: StoreFile) -> None:
        assert file.slots is not None
        self._slots, self._slot_bytes = file.slots, file.geometry.slot_bytes

    def read(self, pieces: Sequence[Piece]) -> None:
        self._copy([buffer for _, buffer in pieces], [self._part(piece) for piece in pieces])

    def write(self, pieces: Sequence[Piece]) -> None:
        self._copy([self._part(piece) for piece in pieces], [buffer for _, buffer in pieces])

    def _copy(self, targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
        library = native.slots()
        if library is not None:
            library.copy(targets, sources)
            return
        for target, source in zip(targets, sources, strict=True):
            np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))

    def _part(self, piece: Piece) -> memoryview:
        start = piece.slot * self._slot_bytes
        return self._slots[start : start + len(piece.buffer)]


class Direct:
    """Past the page cache where the file system and the buffer allow it: host slots do, at addresses and lengths of 4096.

    Half the processor time of buffered I/O, and no second copy of each page in memory.  A file system that refuses it, when it is
    opened or later, is named in one warning, and everything is buffered from then on: ``name`` says which it is.
    """

    def __init__(self, file: StoreFile) -> None:
        self._file = file  # its descriptor stays open as long as this one is used
        self._path, self._geometry, self._buffered = file.path, file.geometry, file.fd
        self._direct = -1
        self._lock = threading.Lock()
        try:
            self._direct = _open_direct(file.path)
            weakref.finalize(self, os.close, self._direct)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._warn(error)

    @property
    def name(self) -> str:
        return "buffered" if self._direct < 0 else "direct"

    def read(self, pieces: Sequence[Piece]) -> None:
        self._move(pieces, writes=False)

    def write(self, pieces: Sequence[Piece]) -> None:
        self._move(pieces, writes=True)

    def _move(self, pieces: Sequence[Piece], *, writes: bool) -> None:
        by_fd: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_fd.setdefault(self._fd(piece.buffer), []).append(piece)
        for fd, group in by_fd.items():
            buffers, offsets = [piece.buffer for piece in group], [self._at(piece.slot) for piece in group]
            try:
                _move(fd, buffers, offsets, writes)
            except OSError as error:
                if fd == self._buffered or error.errno not in _REFUSALS:
                    raise
                self._give_up_direct(error)
                _move(self._buffered, buffers, offsets, writes)

    def _give_up_direct(self, error: OSError) -> None:
        """Any thread; others may still be using the descriptor, so it stays open."""
        with self._lock:
            if self._direct < 0:
                return
            self._direct = -1
        self._warn(error)

    def _warn(self, error: OSError) -> None:
        bind_log(backend="slab").warning(
            "direct_io_refused", path=self._path, errno=error.errno, reason=os.strerror(error.errno or 0)
        )

    def _at(self, slot: int) -> int:
        return self._geometry.data_at + slot * self._geometry.slot_bytes

    def _fd(self, buffer: memoryview) -> int:
        if self._direct < 0 or len(buffer) % ALIGN or _address(buffer) % ALIGN:
            return self._buffered
        return self._direct


def _move(fd: int, buffers: Sequence[memoryview], offsets: Sequence[int], writes: bool) -> None:
    library = native.slots()
    if library is not None:
        library.move(fd, buffers, offsets, writes=writes)
        return
    for buffer, at in zip(buffers, offsets, strict=True):
        done = 0
        while done < len(buffer):
            n = os.pwritev(fd, [buffer[done:]], at + done) if writes else os.preadv(fd, [buffer[done:]], at + done)
            if n == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))  # the file is shorter than its head says
            done += n


def _open_direct(path: str) -> int:
    """Raises OSError, also if the first read does."""
    fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    probe = np.empty(2 * ALIGN, dtype=np.uint8)
    start = -probe.ctypes.data % ALIGN
    try:
        os.preadv(fd, [probe.data[start : start + ALIGN]], 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
