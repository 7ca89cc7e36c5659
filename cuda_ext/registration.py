"""Host memory that a GPU knows: registered in pieces, because drivers fail at one of hundreds of GB."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from hicache_actors.errors import StoppedError, UsageError

PIECE_BYTES: Final = 64 << 30
"""At most so much in one registration: drivers have failed at 512 GiB with 4 KiB pages."""


def pieces(nbytes: int, step_bytes: int, limit_bytes: int = PIECE_BYTES) -> list[range]:
    """[0, nbytes) cut between steps (page slots), each piece at most ``limit_bytes`` (one step at least)."""
    piece = max(1, limit_bytes // step_bytes) * step_bytes
    return [range(start, min(start + piece, nbytes)) for start in range(0, nbytes, piece)]


class Registrations:
    """What has been registered, by address.  Any thread may call; while a piece is being registered, others wait."""

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        self._register, self._unregister = register, unregister
        self._lock = threading.Lock()
        self._known: dict[int, list[int]] = {}
        self._closed = False

    def add(self, address: int, nbytes: int, step_bytes: int) -> None:
        """Register [address, address + nbytes), or nothing of it: then what the driver raises is raised.

        Raises `StoppedError` after, or during, `close`.
        """
        with self._lock:
            if address in self._known:
                raise UsageError(f"host memory at {address:#x} is registered already")
            self._known[address] = done = []
        try:
            for piece in pieces(nbytes, step_bytes):
                with self._lock:
                    if self._closed:
                        raise StoppedError("the device is closed")
                    self._register(address + piece.start, len(piece))
                    done.append(address + piece.start)
        except BaseException:
            self.remove(address)
            raise

    def remove(self, address: int) -> None:
        """No copy may touch the memory any more."""
        with self._lock:
            done = self._known.pop(address, [])
        for start in reversed(done):
            self._unregister(start)

    def close(self) -> None:
        """Take all back, and register nothing any more."""
        with self._lock:
            self._closed = True
            known = list(self._known)
        for address in known:
            self.remove(address)
