"""The file: a head, the table and the slots, made once by whichever process comes first.

The length of a slot is that of the first object that is written, so the file is made then, or found.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from hicache_actors.backends.slab.entries import ENTRY_BYTES
from hicache_actors.backends.slab.index import index_bytes
from hicache_actors.backends.slab.locks import ByteLocks
from hicache_actors.backends.slab.options import SlabOptions
from hicache_actors.backends.slab.table import Table
from hicache_actors.backends.urls import FIELD
from hicache_actors.errors import BackendError, ConfigError

NAME: Final = "objects.slab"
MAGIC: Final = b"HICSLAB2"
ALIGN: Final = 4096
_LOCK_NAME: Final = "lock"
_MANY: Final = 1 << 10

_HEAD: Final = struct.Struct("<8sQQ")  # magic, bytes of a slot, number of slots
_DAY: Final = struct.Struct("<QQ")  # days since 1970, bytes written on that day
_DAY_AT: Final = 64
_HAND: Final = slice(128, 136)  # where the next slot is taken


class Geometry(NamedTuple):
    """All in bytes, but ``slots``; a slot begins at ``data_at + n * slot_bytes``."""

    slot_bytes: int
    slots: int

    @property
    def table_at(self) -> int:
        return ALIGN + _aligned(index_bytes(self.slots))

    @property
    def data_at(self) -> int:
        return self.table_at + _aligned(self.slots * ENTRY_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.data_at + self.slots * self.slot_bytes

    @classmethod
    def for_objects(cls, object_bytes: int, cap_bytes: int) -> Geometry:
        """As many slots as the cap has room for; none if not even one fits."""
        slot_bytes = _aligned(object_bytes)
        slots = cap_bytes // (slot_bytes + ENTRY_BYTES + index_bytes(_MANY) // _MANY)
        while slots and cls(slot_bytes, slots).file_bytes > cap_bytes:
            slots -= 1
        return cls(slot_bytes, slots)


class StoreFile:
    """The file, open and mapped by this process: the whole of it if ``map_slots``, else its head and table.

    Closed, and its locks let go of, when nobody holds it any more.
    """

    def __init__(self, path: str, geometry: Geometry, *, map_slots: bool) -> None:
        self.path, self.geometry = path, geometry
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            length = geometry.file_bytes if map_slots else geometry.data_at
            self.mapping = mmap.mmap(self.fd, length)
        except BaseException:
            os.close(self.fd)
            raise
        weakref.finalize(self, os.close, self.fd)
        self._view = memoryview(self.mapping)
        self.locks = ByteLocks(self.fd)
        entries = self._view[geometry.table_at : geometry.table_at + geometry.slots * ENTRY_BYTES]
        index = self._view[ALIGN : ALIGN + index_bytes(geometry.slots)]
        self.table = Table(entries, index, self._view[_HAND], self.locks)
        self.slots = self._view[geometry.data_at :] if map_slots else None

    def spend(self, nbytes: int, limit_bytes: int) -> bool:
        """Count what is to be written today, by all processes -> whether it may be.  While nobody else changes the table."""
        day = int(time.time() // 86400)
        noted, spent = _DAY.unpack_from(self._view, _DAY_AT)
        spent = spent if noted == day else 0
        allowed: bool = spent + nbytes <= limit_bytes
        _DAY.pack_into(self._view, _DAY_AT, day, spent + nbytes * allowed)
        return allowed


def find(options: SlabOptions, *, map_slots: bool) -> StoreFile | None:
    """The store that is there; None if there is none yet.  Raises OSError, and `ConfigError` if it is something else."""
    path = os.path.join(options.folder, NAME)
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD.size)
            length = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    if len(head) < _HEAD.size or head[: len(MAGIC)] == bytes(len(MAGIC)):
        return None  # its maker has died before it was done
    magic, slot_bytes, slots = _HEAD.unpack(head)
    geometry = Geometry(slot_bytes, slots)
    if magic != MAGIC or not slots or slot_bytes % ALIGN or geometry.file_bytes != length:
        raise ConfigError(
            FIELD,
            options.folder,
            f"{path} is no store that this version can read",
            fix="choose another folder, or remove the file",
        )
    if length > options.cap_bytes:
        raise ConfigError(
            FIELD, options.folder, f"the store there has {length} bytes", allowed="gb of at least that",
            fix="raise gb, or remove the file to begin anew",
        )  # fmt: skip
    return StoreFile(path, geometry, map_slots=map_slots)


def make(options: SlabOptions, object_bytes: int, *, map_slots: bool) -> StoreFile:
    """The store that is there, or a new one for objects of that length.  Raises OSError and `BackendError`."""
    os.makedirs(options.folder, mode=0o700, exist_ok=True)
    path = os.path.join(options.folder, NAME)
    with _alone(options.folder):
        found = find(options, map_slots=map_slots)
        if found is not None:
            return found
        geometry = Geometry.for_objects(object_bytes, options.cap_bytes)
        if not geometry.slots:
            raise BackendError(f"{options.folder}: no object of {object_bytes} bytes fits into gb", retryable=False)
        free_bytes = shutil.disk_usage(options.folder).free
        if free_bytes - geometry.file_bytes < options.min_free_bytes:
            raise BackendError(
                f"{options.folder}: {free_bytes} bytes are free; the store needs {geometry.file_bytes}, and"
                f" {options.min_free_bytes} are to be left"
            )
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, 0)  # whatever a maker that died has left
            os.posix_fallocate(fd, 0, geometry.file_bytes)
            os.pwrite(fd, _HEAD.pack(MAGIC, *geometry), 0)
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(fd)
    return StoreFile(path, geometry, map_slots=map_slots)


@contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Among the makers of all processes."""
    fd = os.open(os.path.join(folder, _LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN) * ALIGN
