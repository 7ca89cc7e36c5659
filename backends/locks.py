"""File locks (flock): held by an open file, so the kernel frees them when a process dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import time
from typing import Final

_POLL_S: Final = 0.0005


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Take the lock of an open file unless somebody holds it.  OSError where the file system has no locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(fd: int, timeout_s: float) -> None:
    """Wait for the lock in a worker thread.  TimeoutError (an OSError) after ``timeout_s``.

    The kernel's own wait has no limit, and a holder may be a process that somebody has stopped: so it is asked for again and
    again.
    """
    until = time.monotonic() + timeout_s
    while not try_lock(fd):
        if time.monotonic() > until:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held a lock for more than {timeout_s} s")
        time.sleep(_POLL_S)


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)
