"""The plain way to keep KV pages in files, written anew for comparison: one open and one write or read per page, in one thread.

The file backends of other caches move pages like this: a lookup for each page before anything is read; a fresh buffer for each
page, because a file cannot be read into where the pages of their pools stand; then open, one read or write, close, and a copy
between buffer and pool; all files in one folder.  Nothing is hashed and nothing renamed here, so a page that a crash has cut off is
served like any other: that is less than our file store does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


class FilePerPage:
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def write(self, names: Sequence[str], pages: Sequence[memoryview]) -> int:
        """-> how many are stored now."""
        for name, page in zip(names, pages, strict=True):
            path = self._path(name)
            if not os.path.exists(path):
                buffer = bytes(page)
                with open(path, "wb", buffering=0) as file:
                    file.write(buffer)
        return len(names)

    def read(self, names: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Fill ``pages`` -> how many could be filled, from the front."""
        stored = self._stored(names)
        for done, (name, page) in enumerate(zip(names[:stored], pages[:stored], strict=True)):
            buffer = bytearray(len(page))
            with open(self._path(name), "rb", buffering=0) as file:
                if file.readinto(buffer) != len(buffer):
                    return done
            page[:] = buffer
        return stored

    def _stored(self, names: Sequence[str]) -> int:
        """How many are there, from the front."""
        return next((at for at, name in enumerate(names) if not os.path.exists(self._path(name))), len(names))

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, f"{name}.bin")


PEER = FilePerPage
