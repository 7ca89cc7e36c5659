"""The plain way to keep KV pages in files, written anew for comparison: one open and one write or read per page, in one thread.

This is what the file backends of other caches do.  Nothing is hashed and nothing renamed: a page that was cut off by a crash is
read like any other, so this does less than our file store.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


class FilePerPage:
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def write(self, names: Sequence[str], pages: Sequence[memoryview]) -> int:
        """-> how many are stored now."""
        stored = 0
        for name, page in zip(names, pages, strict=True):
            path = os.path.join(self._folder, f"{name}.bin")
            if not os.path.exists(path):
                with open(path, "wb", buffering=0) as file:
                    file.write(page)
            stored += 1
        return stored

    def read(self, names: Sequence[str], pages: Sequence[memoryview]) -> int:
        """Fill ``pages`` -> how many could be filled, from the front."""
        for done, (name, page) in enumerate(zip(names, pages, strict=True)):
            try:
                with open(os.path.join(self._folder, f"{name}.bin"), "rb", buffering=0) as file:
                    if file.readinto(page) != len(page):
                        return done
            except FileNotFoundError:
                return done
        return len(names)


PEER = FilePerPage
