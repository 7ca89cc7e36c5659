"""Pieces between buffers and a file, or memory: by the native library, else by Python's own calls."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from hicache_actors.backends.helping import Help, share
from hicache_actors.backends.objects import Expected, Verdict, verdicts_of
from hicache_actors.cuda_ext.native import slots as native
from hicache_actors.cuda_ext.native.buffers import pick, sizes

REQUEST_BYTES: Final = 512 << 10
"""Neighbours are moved together up to so many: a disk does no better by more, and several requests are under way at once."""

_WORTH_HELP_BYTES: Final = 2 * REQUEST_BYTES
_HELPERS: Final = 3  # with the thread that has the batch: as many requests as keep a disk busy
_MAX_PARTS: Final = 256  # buffers of a request; the kernel takes 1024


class Pieces(NamedTuple):
    """Buffers that are moved whole, a column each; in ascending order of ``places``."""

    places: Sequence[int]  #: where to, in the medium's own measure: slots, or bytes
    buffers: Sequence[memoryview]
    numbers: Sequence[int]  #: which of the expected objects each is

    def some(self, which: Sequence[int]) -> Pieces:
        places, buffers, numbers = self
        return Pieces([places[at] for at in which], pick(buffers, which), [numbers[at] for at in which])


class Batch(NamedTuple):
    """``pieces`` at their bytes in a file or memory.  If something is ``expected``, they are sealed before a write, and judged
    after a read."""

    pieces: Pieces
    expected: Expected | None
    writes: bool

    @property
    def n_bytes(self) -> int:
        return int(sizes(self.pieces.buffers).sum())


Verdicts = list[Verdict | None]
"""One for each piece; None where nothing was expected, or written."""


def by_threads(library: native.Slots, batch: Batch, help: Help | None, *, fd: int = -1, memory: int = 0) -> Verdicts:
    """A request after the other in each thread: of the file ``fd``, or of what begins at the address ``memory``."""
    call = _native(library, batch, fd, memory)
    share(call.move, help, at_most=_HELPERS if batch.n_bytes >= _WORTH_HELP_BYTES else 0)
    return _verdicts(batch, call)


def alone(library: native.Slots, batch: Batch, fd: int) -> Verdicts:
    """A request after the other in this thread."""
    call = _native(library, batch, fd, 0)
    call.move()
    return _verdicts(batch, call)


def from_cache(library: native.Slots, batch: Batch, help: Help | None, fd: int) -> tuple[Verdicts, list[int]]:
    """Read what the page cache has -> verdicts; and which pieces it has not, for which there is none."""
    call = _native(library, batch, fd, 0, from_cache=True)
    share(call.move, help)
    call.check()
    codes = call.verdicts
    left = [at for at, code in enumerate(codes) if code == native.NOT_CACHED] if native.NOT_CACHED in codes else []
    for at in left:
        codes[at] = 0
    return [None] * len(codes) if batch.expected is None else [*verdicts_of(codes)], left


def by_uring(library: native.Slots, batch: Batch, rings: native.Rings, fd: int) -> Verdicts:
    """By one thread, with many requests under way."""
    call = _native(library, batch, fd, 0)
    rings.move(call)
    return _verdicts(batch, call)


def in_python(batch: Batch, fd: int) -> Verdicts:
    _seal(batch)
    for run in neighbours(batch.pieces):
        buffers = [batch.pieces.buffers[each] for each in run if len(batch.pieces.buffers[each])]
        at = batch.pieces.places[run.start]
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
    for at, buffer in zip(batch.pieces.places, batch.pieces.buffers, strict=True):
        slot = memory[at : at + len(buffer)]
        target, source = (slot, buffer) if batch.writes else (buffer, slot)
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
    return _judge(batch)


def neighbours(pieces: Pieces) -> list[range]:
    """Runs of pieces of which each begins where the last one ends."""
    runs: list[range] = []
    end = n_bytes = -1
    for number, (at, buffer) in enumerate(zip(pieces.places, pieces.buffers, strict=True)):
        length = len(buffer)
        if at == end and n_bytes + length <= REQUEST_BYTES and len(runs[-1]) < _MAX_PARTS:
            runs[-1] = range(runs[-1].start, number + 1)
            n_bytes += length
        else:
            runs.append(range(number, number + 1))
            n_bytes = length
        end = at + length
    return runs


def _native(library: native.Slots, batch: Batch, fd: int, memory: int, *, from_cache: bool = False) -> native.Moving:
    return library.moving(
        batch.pieces.buffers,
        batch.pieces.places,
        writes=batch.writes,
        fd=fd,
        memory=memory,
        request_bytes=REQUEST_BYTES,
        names=None if batch.expected is None else batch.expected.names(),
        numbers=batch.pieces.numbers,
        from_cache=from_cache,
    )


def _verdicts(batch: Batch, call: native.Moving) -> Verdicts:
    call.check()
    if batch.writes or batch.expected is None:
        return [None] * len(batch.pieces.places)
    return [*verdicts_of(call.verdicts)]


def _seal(batch: Batch) -> None:
    if batch.writes and batch.expected is not None:
        for buffer, number in zip(batch.pieces.buffers, batch.pieces.numbers, strict=True):
            batch.expected.seal(buffer, number)


def _judge(batch: Batch) -> Verdicts:
    if batch.writes or batch.expected is None:
        return [None] * len(batch.pieces.places)
    pages: dict[int, bool] = {}
    verdicts: Verdicts = []
    for buffer, number in zip(batch.pieces.buffers, batch.pieces.numbers, strict=True):
        page = number // len(batch.expected.chunks)
        if page not in pages:
            pages[page] = batch.expected.checksums()
        verdicts.append(batch.expected.judge(buffer, number, checksum=pages[page]))
    return verdicts
