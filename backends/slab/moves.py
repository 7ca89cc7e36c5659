"""Pieces between buffers and a file, or memory: by the native library, else by Python's own calls."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from hicache_actors.backends.helping import Help, share
from hicache_actors.backends.objects import Expected, Verdict, verdicts_of
from hicache_actors.cuda_ext.native import slots as native

REQUEST_BYTES: Final = 512 << 10
"""Neighbours are moved together up to so many: a disk does no better by more, and several requests are under way at once."""

_WORTH_HELP_BYTES: Final = 2 * REQUEST_BYTES
_HELPERS: Final = 3  # with the thread that has the batch: as many requests as keep a disk busy
_MAX_PARTS: Final = 256  # buffers of a request; the kernel takes 1024


class Piece(NamedTuple):
    """A buffer that is moved whole, and where to; ``number``: which of the expected objects it is."""

    at: int  #: in bytes, in the file or memory
    buffer: memoryview
    number: int


class Batch(NamedTuple):
    """``pieces`` in ascending order.  If something is ``expected``, they are sealed before a write, and judged after a read."""

    pieces: Sequence[Piece]
    expected: Expected | None
    writes: bool

    @property
    def n_bytes(self) -> int:
        return sum(len(piece.buffer) for piece in self.pieces)

    @property
    def help(self) -> int:
        """How many more threads it is worth."""
        return _HELPERS if self.n_bytes >= _WORTH_HELP_BYTES else 0


Verdicts = list[Verdict | None]
"""One for each piece; None where nothing was expected, or written."""

Mover = Callable[[Batch, "Help | None"], Verdicts]
"""Moves all of a batch, with the help of other threads perhaps.  Raises OSError; then any of it may hold anything."""


def by_threads(library: native.Slots, batch: Batch, help: Help | None, *, fd: int = -1, memory: int = 0) -> Verdicts:
    """A request after the other in each thread: of the file ``fd``, or of what begins at the address ``memory``."""
    call = _native(library, batch, fd, memory)
    share(call.move, help, at_most=batch.help)
    return _verdicts(batch, call)


def by_uring(library: native.Slots, batch: Batch, rings: native.Rings, fd: int) -> Verdicts:
    """By one thread, with many requests under way."""
    call = _native(library, batch, fd, 0)
    rings.move(call)
    return _verdicts(batch, call)


def in_python(batch: Batch, fd: int) -> Verdicts:
    _seal(batch)
    for run in neighbours(batch.pieces):
        buffers, at = [piece.buffer for piece in run if len(piece.buffer)], run[0].at
        while buffers:
            n = os.pwritev(fd, buffers, at) if batch.writes else os.preadv(fd, buffers, at)
            if n == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))  # the file is shorter than its head says
            at += n
            while buffers and n >= len(buffers[0]):
                n -= len(buffers.pop(0))
            if n:
                buffers[0] = buffers[0][n:]
    return _judge(batch)


def in_python_memory(batch: Batch, memory: memoryview) -> Verdicts:
    _seal(batch)
    for at, buffer, _ in batch.pieces:
        slot = memory[at : at + len(buffer)]
        target, source = (slot, buffer) if batch.writes else (buffer, slot)
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
    return _judge(batch)


def neighbours(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Runs of pieces of which each begins where the last one ends."""
    runs: list[list[Piece]] = []
    end = n_bytes = -1
    for piece in pieces:
        length = len(piece.buffer)
        if piece.at == end and n_bytes + length <= REQUEST_BYTES and len(runs[-1]) < _MAX_PARTS:
            runs[-1].append(piece)
            n_bytes += length
        else:
            runs.append([piece])
            n_bytes = length
        end = piece.at + length
    return runs


def _native(library: native.Slots, batch: Batch, fd: int, memory: int) -> native.Moving:
    return library.moving(
        [piece.buffer for piece in batch.pieces],
        [piece.at for piece in batch.pieces],
        writes=batch.writes,
        fd=fd,
        memory=memory,
        request_bytes=REQUEST_BYTES,
        names=None if batch.expected is None else batch.expected.names(),
        numbers=[piece.number for piece in batch.pieces],
    )


def _verdicts(batch: Batch, call: native.Moving) -> Verdicts:
    call.check()
    if batch.writes or batch.expected is None:
        return [None] * len(batch.pieces)
    return [*verdicts_of(call.verdicts)]


def _seal(batch: Batch) -> None:
    if batch.writes and batch.expected is not None:
        for piece in batch.pieces:
            batch.expected.seal(piece.buffer, piece.number)


def _judge(batch: Batch) -> Verdicts:
    if batch.writes or batch.expected is None:
        return [None] * len(batch.pieces)
    pages: dict[int, bool] = {}
    verdicts: Verdicts = []
    for piece in batch.pieces:
        page = piece.number // len(batch.expected.chunks)
        if page not in pages:
            pages[page] = batch.expected.checksums()
        verdicts.append(batch.expected.judge(piece.buffer, piece.number, checksum=pages[page]))
    return verdicts
