"""Short objects through the page cache: written into it, and read from it as long as it has them.

A disk takes them more slowly than memory does, and they are mostly read again while they are still there.  What has been pushed out
is not brought back: `PageCache.read` leaves it to a read past the cache, which is as fast as the disk and takes no memory.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import Final

from hicache_actors.backends.helping import Batches, Help
from hicache_actors.backends.slab import moves
from hicache_actors.backends.slab.moves import Batch, Verdicts
from hicache_actors.cuda_ext.native import slots as native
from hicache_actors.runtime.observation import bind_log

_WRITE_OUT_BYTES: Final = 64 << 20
"""The kernel is asked to write to the disk after so many, by each process.  Left to itself it gathers a tenth of all memory, and
then has everybody wait who writes."""


class PageCache:
    """Of one file, for its objects from the byte ``start`` on.  Worker threads call.

    One thread writes a batch: it holds the file's lock in the kernel.
    """

    def __init__(self, library: native.Slots, fd: int, start: int) -> None:
        """Raises OSError where the kernel does not tell what its page cache has (before Linux 6.5, or of layered files)."""
        self._library, self._fd, self._start = library, fd, start
        self._reads = Batches()
        self._lock = threading.Lock()
        self._unwritten_bytes = 0
        os.pread(fd, 1, 0)  # so that it has something
        probe = library.moving(
            [memoryview(bytearray(1))], [0], writes=False, fd=fd, memory=0, request_bytes=1, names=None, numbers=[0],
            from_cache=True,
        )  # fmt: skip
        probe.move()
        probe.check()
        if native.NOT_CACHED in probe.verdicts:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    def read(self, batch: Batch, help: Help | None) -> tuple[Verdicts, list[int]]:
        """-> verdicts; and which of the pieces are not all there, and have not been read."""
        with self._reads.one(batch.n_bytes, help) as helper:
            return moves.from_cache(self._library, batch, helper, self._fd)

    def write(self, batch: Batch, help: Help | None) -> None:
        moves.alone(self._library, batch, self._fd)
        with self._lock:
            self._unwritten_bytes += batch.n_bytes
            due = self._unwritten_bytes >= _WRITE_OUT_BYTES
            if due:
                self._unwritten_bytes = 0
        if due and (help is None or help(self._write_out) is None):
            self._write_out()

    def _write_out(self) -> None:
        try:
            self._library.write_out(self._fd, self._start)
        except OSError as error:  # of an earlier write, perhaps, that nobody waited for: checksums tell what is there
            bind_log(backend="slab").warning(
                "write_out_failed", errno=error.errno, reason=os.strerror(error.errno or 0)
            )
