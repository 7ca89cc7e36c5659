"""What the file store needs of the system and Python does not offer as it is: locks with a limit, folders that are private all
the way, and a rename that replaces nothing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import time
from typing import Final

_POLL_S: Final = 0.0005
_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
_UNSUPPORTED: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})


def make_folder(path: str) -> None:
    """Make a folder, and what is missing above it, for this user only."""
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        make_folder(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Take the lock (flock) of an open file unless somebody holds it.  OSError where the file system has no locks.

    The kernel frees it when its process dies, however it dies.
    """
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


def blocks_read() -> int:
    """How many blocks the file system has fetched from a disk for this thread so far; always 0 where nobody counts them."""
    thread = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if thread is None else resource.getrusage(thread).ru_inblock


class Publisher:
    """Any thread.  The kernel decides between writers of one name where it can (Linux, local file systems); elsewhere we look
    first, and of two writers at the very same time the later one replaces the same bytes."""

    def __init__(self) -> None:
        self._renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)

    def publish(self, temporary: bytes, path: bytes) -> bool:
        """-> False, with nothing changed, if ``path`` exists.  Both are in one folder."""
        if self._renameat2 is not None:
            if self._renameat2(_AT_FDCWD, temporary, _AT_FDCWD, path, _RENAME_NOREPLACE) == 0:
                return True
            error = ctypes.get_errno()
            if error == errno.EEXIST:
                return False
            if error not in _UNSUPPORTED:
                raise OSError(error, os.strerror(error), temporary, None, path)
            self._renameat2 = None
        if os.path.lexists(path):
            return False
        os.rename(temporary, path)
        return True
