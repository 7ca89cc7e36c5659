"""Whole files, a batch a call and without the GIL (capi/files.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Final, overload

from hicache_actors.cuda_ext.native.buffers import addresses, lengths
from hicache_actors.cuda_ext.native.library import Library, library
from hicache_actors.cuda_ext.native.structs import FileIdentity, FileLookups, FilePlaces, FileReads, FileWrites, Names

READ_MISSING: Final = -1
READ_TORN: Final = -2
READ_FAILED: Final = -3

WRITE_FAILED: Final = 0
WRITE_WRITTEN: Final = 1
WRITE_EXISTS: Final = 2
WRITE_NO_FOLDER: Final = 3
WRITE_NO_RENAME: Final = 4
WRITE_SKIPPED: Final = 5


_PATH_BYTES: Final = 8  # HIC_PATH_BYTES


class Paths(Sequence[bytes]):
    """Paths in native memory; each becomes an object of Python's when somebody asks for it."""

    def __init__(self, pointers: ctypes.Array[ctypes.c_char_p], memory: object) -> None:
        self.pointers = pointers
        self._memory = memory  # where they point to

    def __len__(self) -> int:
        return len(self.pointers)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | Sequence[bytes]:
        return self.pointers[at]  # type: ignore[return-value]


class Lookups:
    """How many files of a batch are there, from the front.  Several threads may `run` it at once: they share the work."""

    def __init__(self, files: Files, paths: Sequence[bytes]) -> None:
        self._files = files
        self._kept = _pointers(paths), paths
        self._batch = FileLookups(len(paths), 0, _at(self._kept[0]), len(paths))

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
        self._kept = _pointers(paths), addresses(buffers), lengths(buffers), names, paths, buffers
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

    A temporary file lies beside the one that it becomes: ``<temporary><number>.tmp``, with numbers from ``first`` on.  With
    ``names`` the buffers are objects, and sealed first; ``numbers`` says which object of the names each is.
    """

    def __init__(
        self,
        files: Files,
        paths: Sequence[bytes],
        buffers: Sequence[memoryview],
        temporary: bytes,
        first: int,
        names: Names | None = None,
        numbers: Sequence[int] = (),
    ) -> None:
        count = len(paths)
        self._files = files
        self._outcomes = (ctypes.c_int32 * count)(*[WRITE_SKIPPED] * count)
        self._errors = (ctypes.c_int32 * count)()
        self._kept = (
            _pointers(paths), addresses(buffers), lengths(buffers), (ctypes.c_uint64 * len(numbers))(*numbers), names,
            paths, buffers,
        )  # fmt: skip
        self._batch = FileWrites(
            count, 0, _at(self._kept[0]), temporary, first, _at(self._kept[1]), _at(self._kept[2]),
            None if names is None else ctypes.pointer(names), _at(self._kept[3]), _at(self._outcomes), _at(self._errors), 0, 0,
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
        self._place = loaded.function("hic_files_place", ctypes.c_uint64, ctypes.POINTER(FilePlaces))
        self.look_up = loaded.function("hic_files_look_up", ctypes.c_int32, ctypes.POINTER(FileLookups))

    def place(self, folder: bytes, shards: int, keys: Sequence[str]) -> tuple[list[int], Paths] | int:
        """Shard and path of each key's object; or the number of the first that is no key."""
        count = len(keys)
        try:
            joined = "\0".join(keys).encode("ascii")
        except UnicodeEncodeError:
            return next(at for at, key in enumerate(keys) if not key.isascii())
        memory = ctypes.create_string_buffer(count * (len(folder) + _PATH_BYTES) + len(joined))
        pointers, shard_of = (ctypes.c_char_p * count)(), (ctypes.c_uint8 * count)()
        places = FilePlaces(count, joined, len(joined), folder, shards, _at(memory), _at(pointers), _at(shard_of))
        good = int(self._place(places))
        return (list(shard_of), Paths(pointers, memory)) if good == count else good


@cache
def files() -> Files | None:
    """None where the native library is missing."""
    loaded = library()
    return None if loaded is None else Files(loaded)


def _pointers(paths: Sequence[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return paths.pointers if isinstance(paths, Paths) else (ctypes.c_char_p * len(paths))(*paths)


def _at(array: object) -> int:
    return ctypes.addressof(array)  # type: ignore[arg-type]
