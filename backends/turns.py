"""How many threads read at once.

Reading a small object that the page cache has takes a few system calls of microseconds.  Each gives up the interpreter's lock and
wants it back, so threads that do this side by side only wake each other: four of them are slower than one.  As soon as a disk has
to be waited for, or objects are large, they do help.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from hicache_actors.backends.posix import blocks_read

_SMALL_BYTES: Final = 256 << 10
_PATIENCE_S: Final = 0.05
_MEMORY_S: Final = 0.0002  # reading a small object from memory takes a fifth of it


class Turns:
    """Any thread.  Nobody waits for long: behind a read that hangs, others go on beside it.

    ``needed``: whether threads are in each other's way at all; where batches leave the interpreter alone they are not.
    """

    def __init__(self, needed: Callable[[], bool] = lambda: True) -> None:
        self._needed = needed
        self._lock = threading.Lock()
        self._one_by_one = False

    @contextmanager
    def turn(self, n_objects: int, object_bytes: int) -> Iterator[None]:
        """Around the read of a batch."""
        if object_bytes > _SMALL_BYTES or not self._needed():
            yield
            return
        alone = self._one_by_one and self._lock.acquire(timeout=_PATIENCE_S)
        begun_s, blocks = time.monotonic(), blocks_read()
        try:
            yield
        finally:
            slow = time.monotonic() - begun_s > n_objects * _MEMORY_S  # a remote file system counts no blocks
            self.saw(disk=slow or blocks_read() != blocks)
            if alone:
                self._lock.release()

    def saw(self, *, disk: bool) -> None:
        """A batch of small objects has been read; whether something that is slower than memory was waited for."""
        self._one_by_one = not disk
