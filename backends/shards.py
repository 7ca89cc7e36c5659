"""Scans of one shard of a folder, or of its quarantine: what is ours there, and what dead writers left.

Bounded work: one shard per call.  Files that are not ours are neither counted nor removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from xxhash import xxh32_intdigest

from hicache_actors.backends.ledger import N_SHARDS, NOTHING, QUARANTINE, Counted, disk_bytes

_OBJECT: Final = ".kv"
SHARDS: Final = tuple(f"{row:02x}" for row in range(N_SHARDS))
_KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_TEMPORARY: Final = re.compile(r"\.([0-9a-f]{16})\.[0-9]+\.tmp")
_QUARANTINED: Final = re.compile(rf"{_KEY.pattern}\.[0-9]+\.bad")


class Identity(NamedTuple):
    """One file: a name may be given to another one, and so may an inode number, but not with the same time."""

    mtime_ns: int
    inode: int


class Item(NamedTuple):
    """A file of ours.  In order of age when sorted."""

    identity: Identity
    name: str
    n_bytes: int


class Scan(NamedTuple):
    """``items``: objects (or quarantined ones), sorted by age.  ``torn``: empty objects, which a power failure makes of fresh
    ones, by key.  ``temporary_bytes``: what living writers have under way."""

    items: list[Item]
    torn: dict[str, Identity]
    orphans: list[str]
    temporary_bytes: int

    def counted(self) -> Counted:
        n_bytes = sum(disk_bytes(item.n_bytes) for item in self.items) + self.temporary_bytes
        return Counted(
            n_bytes, len(self.items) + len(self.torn), self.items[0].identity.mtime_ns if self.items else NOTHING
        )


def is_key(key: str) -> bool:
    return _KEY.fullmatch(key) is not None


def row_of(key: bytes) -> int:
    return xxh32_intdigest(key) & (N_SHARDS - 1)


def key_of(name: str, row: int) -> str | None:
    """The key of a file in shard ``row``; None for a file that is no object of ours, by its name."""
    key = name.removesuffix(_OBJECT)
    return key if key != name and is_key(key) and row_of(key.encode()) == row else None


def scan(path: str, row: int, is_alive: Callable[[str], bool]) -> Scan:
    """Look at every file of a shard once.  A missing folder is an empty one."""
    items: list[Item] = []
    torn: dict[str, Identity] = {}
    orphans: list[str] = []
    temporary_bytes = 0
    alive: dict[str, bool] = {}
    for entry in _entries(path):
        temporary = _TEMPORARY.fullmatch(entry.name)
        if temporary:
            instance = temporary[1]
            if instance not in alive:
                alive[instance] = is_alive(instance)
            if not alive[instance]:
                orphans.append(entry.name)
                continue
        key = key_of(entry.name, row)
        ours = _QUARANTINED.fullmatch(entry.name) if row == QUARANTINE else key
        if not (ours or temporary):
            continue
        with contextlib.suppress(FileNotFoundError):  # removed while we look
            found = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                continue
            if temporary:
                temporary_bytes += disk_bytes(found.st_size)
            elif found.st_size == 0 and key is not None:
                torn[key] = Identity(found.st_mtime_ns, found.st_ino)
            else:
                items.append(Item(Identity(found.st_mtime_ns, found.st_ino), entry.name, found.st_size))
    items.sort()
    return Scan(items, torn, orphans, temporary_bytes)


def keys_in(path: str, row: int) -> list[str]:
    found = (key_of(entry.name, row) for entry in _entries(path) if entry.is_file(follow_symlinks=False))
    return [key for key in found if key is not None]


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    try:
        entries = os.scandir(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        yield from entries
