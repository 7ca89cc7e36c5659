"""Locks on bytes of an open file, of a process: the kernel lets go of them when it ends, however it ends.

They are "open file description" locks (Linux 3.15): of this one descriptor, not of the process, so another library that opens and
closes the same file drops none.  Threads of one process share them, and have a lock of their own beside.
"""

from __future__ import annotations

import errno
import fcntl
import struct
from typing import Final

_FLOCK: Final = struct.Struct("hhqqi4x")  # type, whence, start, length, pid, as in <fcntl.h> on 64 bits
_GET, _SET, _SET_AND_WAIT = 36, 37, 38  # F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW
_WHENCE: Final = 0


class ByteLocks:
    """On bytes of ``fd``, whether the file has them or not."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def hold(self, byte: int) -> None:
        """Wait for it.  Not while this process holds it already: it would get it again."""
        fcntl.fcntl(self._fd, _SET_AND_WAIT, _FLOCK.pack(fcntl.F_WRLCK, _WHENCE, byte, 1, 0))

    def take(self, byte: int) -> bool:
        """-> whether this process holds it now."""
        try:
            fcntl.fcntl(self._fd, _SET, _FLOCK.pack(fcntl.F_WRLCK, _WHENCE, byte, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def let_go(self, byte: int) -> None:
        fcntl.fcntl(self._fd, _SET, _FLOCK.pack(fcntl.F_UNLCK, _WHENCE, byte, 1, 0))

    def held_by_another(self, byte: int) -> bool:
        answer = fcntl.fcntl(self._fd, _GET, _FLOCK.pack(fcntl.F_WRLCK, _WHENCE, byte, 1, 0))
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK
