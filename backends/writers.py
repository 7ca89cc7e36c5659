"""Who is changing a shared folder, and which parts of it.

Each store has a file ``<root>/writers/<instance>``, locked while it lives, with one count per row of the ledger: its changes
under way.  A file that nobody locks is that of a dead writer.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from array import array
from collections.abc import Iterable, Iterator
from typing import Final

from hicache_actors.backends.posix import lock, make_folder, try_lock

_INSTANCE: Final = re.compile(r"[0-9a-f]{16}")
_LOCK_TIMEOUT_S: Final = 2.0


class Writers:
    """Used under the lock of the ledger, except `is_alive`."""

    def __init__(self, root: str, n_rows: int) -> None:
        self.instance = secrets.token_hex(8)
        self._folder = os.path.join(root, "writers")
        self._fd = -1
        self._under_way = array("I", bytes(4 * n_rows))

    def claim(self, *, anew: bool) -> None:
        """Begin to live in the folder that is there now; ``anew``: it may be another one than before."""
        if self._fd >= 0:
            if not anew and os.fstat(self._fd).st_nlink:
                return
            os.close(self._fd)
            self._fd = -1
        make_folder(self._folder)
        path = os.path.join(self._folder, self.instance)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        lock(self._fd, _LOCK_TIMEOUT_S)
        self._save(needed=False)

    def leave(self) -> bool:
        """-> False while changes are under way: then we still live."""
        if any(self._under_way):
            return False
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, self.instance))
            os.close(self._fd)
            self._fd = -1
        return True

    def begin(self, rows: Iterable[int], *, needed: bool) -> None:
        """Say what is about to change.  OSError, with nothing changed, if ``needed`` and the disk refuses.

        A full disk must not keep anybody from removing objects: unsaid, a crash costs a rolling check instead of a scan.
        """
        for row in rows:
            self._under_way[row] += 1
        try:
            self._save(needed=needed)
        except OSError:
            for row in rows:
                self._under_way[row] -= 1
            raise

    def end(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._under_way[row] -= 1
        self._save(needed=False)

    def are_changing(self, row: int) -> bool:
        """Does anybody who lives change that row just now?"""
        return self._under_way[row] > 0 or any(
            table[row] for instance in self._others() if (table := self._table(instance, alive=True))
        )

    def dead(self) -> Iterator[tuple[str, list[int]]]:
        """Writers that died, and the rows they were changing.  `forget` them when that has been dealt with."""
        for instance in self._others():
            table = self._table(instance, alive=False)
            if table is not None:
                yield instance, [row for row, changes in enumerate(table) if changes]

    def forget(self, instance: str) -> None:
        os.unlink(os.path.join(self._folder, instance))

    def is_alive(self, instance: str) -> bool:
        return instance == self.instance or self._table(instance, alive=True) is not None

    def _save(self, *, needed: bool) -> None:
        try:
            os.pwrite(self._fd, self._under_way, 0)
        except OSError:
            if needed:
                raise

    def _others(self) -> list[str]:
        return [name for name in os.listdir(self._folder) if _INSTANCE.fullmatch(name) and name != self.instance]

    def _table(self, instance: str, *, alive: bool) -> array[int] | None:
        """None if there is no such writer, or it is not as asked for."""
        try:
            fd = os.open(os.path.join(self._folder, instance), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if try_lock(fd, shared=True) == alive:
                return None
            table = array("I")
            n_bytes = 4 * len(self._under_way)
            table.frombytes(os.pread(fd, n_bytes, 0).ljust(n_bytes, b"\0"))
            return table
        finally:
            os.close(fd)
