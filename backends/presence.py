"""What is there under a name of a folder: an object of ours or something else, whole or torn.  Blocking."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Sequence
from typing import Final

from hicache_actors.backends.backend import Stored
from hicache_actors.backends.file_batches import identity_of, touch
from hicache_actors.backends.shards import Identity

TOUCH_AFTER_S: Final = 10
"""An object that is used again within this time is not touched again: eviction knows the order of use no finer than this."""


def length_of(path: bytes) -> int | None:
    """Bytes of an object; None where there is none."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def is_still(path: bytes, identity: Identity | None) -> bool:
    """Whether an object is there, and the one of this identity."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and (identity is None or identity_of(found) == identity)


def absent(paths: Sequence[bytes], buffers: Sequence[memoryview], outcomes: list[Stored]) -> list[int]:
    """Positions of what must be written; the others are there, whole, become PRESENT in ``outcomes``, and count as used now.

    Pages are stored in the order of their prefix: behind the first that is absent none is looked up, unless the last one is there.
    A wrong guess costs a write in vain, and no more: whoever gives a file its name finds out.
    """
    found: list[int] = []
    for at, path in enumerate(paths):
        if _is_whole(path, len(buffers[at])):
            outcomes[at] = Stored.PRESENT
        elif not found and not os.access(paths[-1], os.F_OK):
            return [*range(at, len(paths))]
        else:
            found.append(at)
    return found


def _is_whole(path: bytes, n_bytes: int) -> bool:
    if not os.access(path, os.F_OK):
        return False
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(path, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode) and found.st_size == n_bytes:
            if time.time() - found.st_mtime > TOUCH_AFTER_S:
                touch(path)
            return True
    return False
