"""Give a finished file its name, unless something has that name already."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
_UNSUPPORTED: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})


class Publisher:
    """Any thread.  The kernel decides between writers of one name where it can (Linux, local file systems); elsewhere we look
    first, and of two writers at the very same time the later one replaces the same bytes."""

    def __init__(self) -> None:
        self._renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)

    def publish(self, temporary: str, path: str) -> bool:
        """-> False, with nothing changed, if ``path`` exists.  Both are in one folder."""
        if self._renameat2 is not None:
            ended = self._renameat2(
                _AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE
            )  # fmt: skip
            if ended == 0:
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
