"""How bytes come into slots and out of them: past the page cache, through it, or through a mapping.  Worker threads call."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Final, Protocol

import numpy as np

from hicache_actors.backends.helping import Help
from hicache_actors.backends.objects import Expected
from hicache_actors.backends.slab import moves
from hicache_actors.backends.slab.moves import Batch, Pieces, Verdicts
from hicache_actors.backends.slab.options import SlabOptions
from hicache_actors.backends.slab.page_cache import PageCache
from hicache_actors.backends.slab.store_file import ALIGN, StoreFile
from hicache_actors.backends.urls import FIELD
from hicache_actors.cuda_ext.native import slots as native
from hicache_actors.cuda_ext.native.buffers import address, addresses, lengths
from hicache_actors.cuda_ext.native.library import why_not
from hicache_actors.errors import ConfigError
from hicache_actors.runtime.observation import bind_log

_REFUSALS: Final = (errno.EINVAL, errno.EOPNOTSUPP)


SHORT_BYTES: Final = 256 << 10
"""Of slots.  Longer ones hardly gain by the page cache: the disk is as fast as the rest, for half the processor time."""


class Medium(Protocol):
    @property
    def facts(self) -> Mapping[str, str]:
        """For `stats`: which way it goes, and why not another."""

    def read(self, pieces: Pieces, expected: Expected | None, help: Help | None) -> Verdicts:
        """Fill each buffer from the beginning of its slot; places are slots.  Raises OSError."""

    def write(self, pieces: Pieces, expected: Expected | None, help: Help | None) -> None:
        """Raises OSError; then any of the slots may hold anything."""


class Mapped:
    """Memory that is mapped: a copy each way, at the speed of memory while the pages are there."""

    facts: Mapping[str, str] = {"io": "mapped"}

    def __init__(self, file: StoreFile) -> None:
        assert file.slots is not None
        self._file, self._slots, self._slot_bytes = file, file.slots, file.geometry.slot_bytes

    def read(self, pieces: Pieces, expected: Expected | None, help: Help | None) -> Verdicts:
        return self._move(pieces, expected, help, writes=False)

    def write(self, pieces: Pieces, expected: Expected | None, help: Help | None) -> None:
        self._move(pieces, expected, help, writes=True)

    def _move(self, pieces: Pieces, expected: Expected | None, help: Help | None, *, writes: bool) -> Verdicts:
        placed = [slot * self._slot_bytes for slot in pieces.places]
        batch = Batch(pieces._replace(places=placed), expected, writes)
        library = native.slots()
        if library is None:
            return moves.in_python_memory(batch, self._slots)
        return moves.by_threads(library, batch, help, memory=address(self._slots))


class File:
    """System calls: past the page cache where the file system and the buffer allow it, as host slots do at addresses and lengths
    of 4096; short objects through it, as far as it has them.

    Past it costs half the processor time of buffered I/O, and no second copy of each page in memory.  A file system that refuses
    it, when it is opened or later, is named in one warning, and everything is buffered from then on, unless ``direct=on`` forbids
    it.  Many requests are under way at once: by io_uring where the kernel allows that, else by several threads.
    """

    def __init__(self, file: StoreFile, options: SlabOptions) -> None:
        """Raises OSError; `ConfigError` where an option asks for what this system refuses."""
        self._file = file  # its descriptor stays open as long as this one is used
        self._url, self._geometry, self._buffered = options.url, file.geometry, file.fd
        self._must_be_direct = options.direct == "on"
        self._direct, self._rings = -1, None
        self._lock = threading.Lock()
        self._why_buffered = "direct=off" if options.direct == "off" else ""
        if not self._why_buffered:
            try:
                self._direct = _open_direct(file.path)
                weakref.finalize(self, os.close, self._direct)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self._give_up_direct(error)
        self._rings, self._why_threads = _rings(options, self._direct)
        both = options.direct == "auto" and self._direct >= 0 and file.geometry.slot_bytes < SHORT_BYTES
        self._cache, self._why_direct = _page_cache(file) if both else (None, "")

    @property
    def facts(self) -> Mapping[str, str]:
        way = "buffered" if self._direct < 0 else "direct" if self._cache is None else "both"
        facts = {"io": way, "requests": "threads" if self._rings is None else "io_uring"}
        why = {
            "why_buffered": self._why_buffered,
            "why_direct": self._why_direct,
            "why_no_io_uring": self._why_threads,
        }
        return facts | {name: reason for name, reason in why.items() if reason}

    def read(self, pieces: Pieces, expected: Expected | None, help: Help | None) -> Verdicts:
        batch = Batch(self._placed(pieces), expected, writes=False)
        if self._cache is None or not pieces.places:
            return self._move(batch, help)
        verdicts, left = self._cache.read(batch, help)
        if left:
            rest = self._move(batch._replace(pieces=batch.pieces.some(left)), help)
            for at, verdict in zip(left, rest, strict=True):
                verdicts[at] = verdict
        return verdicts

    def write(self, pieces: Pieces, expected: Expected | None, help: Help | None) -> None:
        batch = Batch(self._placed(pieces), expected, writes=True)
        if self._cache is None:
            self._move(batch, help)
        elif pieces.places:
            self._cache.write(batch, help)

    def _placed(self, pieces: Pieces) -> Pieces:
        start, distance = self._geometry.data_at, self._geometry.slot_bytes
        return pieces._replace(places=[start + slot * distance for slot in pieces.places])

    def _move(self, batch: Batch, help: Help | None) -> Verdicts:
        """Past the page cache, but for buffers that are not aligned."""
        count = len(batch.pieces.places)
        verdicts: Verdicts = [None] * count
        aligned = _aligned(batch.pieces.buffers) if self._direct >= 0 else [False] * count
        for direct in (True, False):
            chosen = [at for at, is_aligned in enumerate(aligned) if is_aligned is direct]
            if chosen:
                part = batch if len(chosen) == count else batch._replace(pieces=batch.pieces.some(chosen))
                for at, verdict in zip(chosen, self._moved(part, help, direct=direct), strict=True):
                    verdicts[at] = verdict
        return verdicts

    def _moved(self, batch: Batch, help: Help | None, *, direct: bool) -> Verdicts:
        fd = self._direct if direct else self._buffered
        if fd >= 0:
            try:
                return self._by(batch, help, fd)
            except OSError as error:
                if fd == self._buffered or self._must_be_direct or error.errno not in _REFUSALS:
                    raise
                self._give_up_direct(error)
        return self._by(batch, help, self._buffered)

    def _by(self, batch: Batch, help: Help | None, fd: int) -> Verdicts:
        library, rings = native.slots(), self._rings
        if library is None:
            return moves.in_python(batch, fd)
        # What the page cache has is copied in the call itself, one request after the other: threads do that side by side.
        if rings is None or fd == self._buffered:
            return moves.by_threads(library, batch, help, fd=fd)
        return moves.by_uring(library, batch, rings, fd)

    def _give_up_direct(self, error: OSError) -> None:
        """Any thread; others may still be using the descriptor, so it stays open."""
        if self._must_be_direct:
            raise _no_direct(self._url, error) from error
        reason = os.strerror(error.errno or 0)
        with self._lock:
            if self._why_buffered:
                return
            self._direct, self._why_buffered = -1, reason
        bind_log(backend="slab").warning("direct_io_refused", path=self._file.path, errno=error.errno, reason=reason)


def check(options: SlabOptions) -> None:
    """Where there is no store yet: try in its place what the options insist on.  Raises OSError; `ConfigError` if it is refused."""
    if options.direct != "on" and options.io != "uring":
        return
    folder = options.folder
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".hicache-") as file, ExitStack() as stack:
        os.ftruncate(file.fileno(), ALIGN)
        fd = -1
        if options.direct != "off":
            try:
                fd = _open_direct(file.name)
                stack.callback(os.close, fd)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                if options.direct == "on":
                    raise _no_direct(options.url, error) from error
        _rings(options, fd)


def _no_direct(url: str, error: OSError) -> ConfigError:
    reason = os.strerror(error.errno or 0)
    return ConfigError(
        FIELD, url, f"direct=on, and the file system refuses it ({reason})", fix="say direct=auto, or move it"
    )


def _rings(options: SlabOptions, fd: int) -> tuple[native.Rings | None, str]:
    """-> queues to the kernel, or why there are none: what it says when it is asked for a first read."""
    if options.io == "threads":
        return None, "io=threads"
    library = native.slots()
    reason = "everything is buffered" if fd < 0 else why_not()
    if library is not None and fd >= 0:
        rings = native.Rings(library)
        probe = _page()
        call = library.moving([probe], [0], writes=False, fd=fd, memory=0, request_bytes=ALIGN, names=None, numbers=[0])
        try:
            rings.move(call)
            call.check()
            return rings, ""
        except OSError as error:
            reason = os.strerror(error.errno or 0)
    if options.io == "uring":
        raise ConfigError(FIELD, options.url, f"io=uring, and there is no io_uring here ({reason})", fix="say io=auto")
    return None, reason


def _page_cache(file: StoreFile) -> tuple[PageCache | None, str]:
    """-> it, or why it is not used."""
    library = native.slots()
    if library is None:
        return None, why_not()
    try:
        return PageCache(library, file.fd, file.geometry.data_at), ""
    except OSError as error:
        return None, f"what the page cache has is not told: {os.strerror(error.errno or 0)}"


def _open_direct(path: str) -> int:
    """Raises OSError, also if the first read does."""
    fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        os.preadv(fd, [_page()], 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def _page() -> memoryview:
    memory = np.empty(2 * ALIGN, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory.data[start : start + ALIGN]


def _aligned(buffers: Sequence[memoryview]) -> list[bool]:
    at, n_bytes = (
        np.frombuffer(memoryview(each).cast("B"), np.uint64) for each in (addresses(buffers), lengths(buffers))
    )
    places = at | n_bytes
    aligned: list[bool] = (places % np.uint64(ALIGN) == 0).tolist()
    return aligned
