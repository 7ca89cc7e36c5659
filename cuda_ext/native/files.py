"""Whole files, a batch a call and without the GIL (capi/files.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Final

from hicache_actors.cuda_ext.native.buffers import addresses, lengths
from hicache_actors.cuda_ext.native.library import Library, library
from hicache_actors.cuda_ext.native.structs import FileIdentity, FileLookups, FileReads, FileWrites, Names

READ_MISSING: Final = -1
READ_TORN: Final = -2
READ_FAILED: Final = -3

WRITE_FAILED: Final = 0
WRITE_WRITTEN: Final = 1
WRITE_EXISTS: Final = 2
WRITE_NO_FOLDER: Final = 3
WRITE_NO_RENAME: Final = 4
WRITE_SKIPPED: Final = 5


class Lookups:
    """How many files of a batch are there, from the front.  Several threads may `run` it at once: they share the work."""

    def __init__(self, files: Files, paths: Sequence[bytes]) -> None:
        self._files = files
        self._kept = (ctypes.c_char_p * len(paths))(*paths)
        self._batch = FileLookups(len(paths), 0, _at(self._kept), len(paths))

    def run(self) -> None:
        """Any thread."""
        self._files.look_up(self._batch)

    @property
    def leading(self) -> int:
        return int(self._batch.leading)

    @property
    def error(self) -> int:
        """errno of what kept us from looking at the next (0: it is not there)."""
        return int(self._batch.error)


class Reads:
    """A batch of files that are read; ``names``: what their headers must say, if that is to be looked at.  Shared as `Lookups` are.

    `run` fills the lists by position.  ``verdicts`` are right where ``outcomes`` is a length; ``identities`` are (mtime in ns,
    inode), right there and where it is READ_TORN.
    """

    def __init__(
        self,
        files: Files,
        paths: Sequence[bytes],
        buffers: Sequence[memoryview],
        touch_before_ns: int,
        names: Names | None,
    ) -> None:
        count = len(paths)
        self._files = files
        self._outcomes, self._errors = (ctypes.c_int64 * count)(), (ctypes.c_int32 * count)()
        self._identities, self._verdicts = (FileIdentity * count)(), (ctypes.c_uint8 * count)()
        self._kept = (ctypes.c_char_p * count)(*paths), addresses(buffers), lengths(buffers), names, buffers
        self._batch = FileReads(
            count, 0, *map(_at, self._kept[:3]), touch_before_ns, None if names is None else ctypes.pointer(names),
            _at(self._outcomes), _at(self._identities), _at(self._errors), _at(self._verdicts),
        )  # fmt: skip

    def run(self) -> None:
        """Any thread."""
        self._files.read(self._batch)

    @property
    def outcomes(self) -> list[int]:
        """Bytes read, or READ_*."""
        return list(self._outcomes)

    @property
    def identities(self) -> list[tuple[int, int]]:
        flat = memoryview(self._identities).cast("B")
        return [*zip(flat.cast("q")[::2].tolist(), flat.cast("Q")[1::2].tolist(), strict=True)]

    @property
    def errors(self) -> list[int]:
        """errno of what FAILED."""
        return list(self._errors)

    @property
    def verdicts(self) -> list[int]:
        return list(self._verdicts)


class Writes:
    """A batch of files that are made; `run` may be called by several threads at once, which share the work.

    With ``names`` the buffers are objects, and sealed first; ``numbers`` says which object of the names each is.
    """

    def __init__(
        self,
        files: Files,
        temporaries: Sequence[bytes],
        paths: Sequence[bytes],
        buffers: Sequence[memoryview],
        names: Names | None = None,
        numbers: Sequence[int] = (),
    ) -> None:
        count = len(paths)
        self._files = files
        self._outcomes = (ctypes.c_int32 * count)(*[WRITE_SKIPPED] * count)
        self._errors = (ctypes.c_int32 * count)()
        self._kept = (
            (ctypes.c_char_p * count)(*temporaries), (ctypes.c_char_p * count)(*paths), addresses(buffers),
            lengths(buffers), (ctypes.c_uint64 * len(numbers))(*numbers), names, buffers,
        )  # fmt: skip
        self._batch = FileWrites(
            count, 0, *map(_at, self._kept[:4]), None if names is None else ctypes.pointer(names), _at(self._kept[4]),
            _at(self._outcomes), _at(self._errors), 0, 0,
        )  # fmt: skip

    def run(self) -> None:
        """ValueError, with nothing made, if an object has no room for a header."""
        if self._files.write(self._batch) < 0:
            raise ValueError(self._files.last_error())

    @property
    def outcomes(self) -> list[int]:
        """WRITE_*."""
        return list(self._outcomes)

    @property
    def errors(self) -> list[int]:
        """errno of what FAILED."""
        return list(self._errors)


class Files:
    """Any thread that may block."""

    def __init__(self, loaded: Library) -> None:
        self.read = loaded.function("hic_files_read", ctypes.c_int32, ctypes.POINTER(FileReads))
        self.write = loaded.function("hic_files_write", ctypes.c_int32, ctypes.POINTER(FileWrites))
        self.last_error = loaded.last_error
        self.look_up = loaded.function("hic_files_look_up", ctypes.c_int32, ctypes.POINTER(FileLookups))


@cache
def files() -> Files | None:
    """None where the native library is missing."""
    loaded = library()
    return None if loaded is None else Files(loaded)


def _at(array: object) -> int:
    return ctypes.addressof(array)  # type: ignore[arg-type]
