"""Rings of tickets: how native threads tell Python that something has ended, many ends for one wake-up."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import deque
from typing import Final, Generic, NamedTuple, TypeVar

from hicache_actors.cuda_ext.native.events import Event, events
from hicache_actors.cuda_ext.native.library import Library, loaded
from hicache_actors.cuda_ext.native.structs import Done, RingCounts

CAPACITY: Final = 4096

T = TypeVar("T")


class Counts(NamedTuple):
    """Tickets since the ring was made; ``wakes``: writes to its eventfd; ``refused``: always 0, or tickets were lost."""

    pushed: int
    drained: int
    wakes: int
    refused: int


class _Functions:
    def __init__(self, library: Library) -> None:
        ring = ctypes.c_void_p
        self.new = library.function("hic_ring_new", ctypes.c_int32, ctypes.c_uint32, ctypes.POINTER(ctypes.c_void_p))
        self.fd = library.quick("hic_ring_fd", ctypes.c_int32, ring)
        self.drain = library.quick("hic_ring_drain", ctypes.c_int32, ring, ctypes.c_void_p, ctypes.c_uint32)
        self.wait = library.function("hic_ring_wait", ctypes.c_int32, ring, ctypes.c_int64)
        self.poke = library.function("hic_ring_poke", None, ring)
        self.count = library.quick("hic_ring_count", None, ring, ctypes.POINTER(RingCounts))
        self.release = library.function("hic_ring_release", None, ring)
        self.last_error = library.last_error


@functools.cache
def _functions() -> _Functions:
    return _Functions(loaded())


class Ring(Generic[T]):
    """What waits for ends of native events, and the ring through which it learns of them.

    `add` and `poke` may be called by any thread, `wait` and `take` by one.  Never more tickets are in flight than the ring has
    room for: the rest stands in line here, so no native thread ever finds it full.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        """``capacity``: a power of two.  Raises `OSError` if there is no descriptor left."""
        self._native = _functions()
        address = ctypes.c_void_p()
        if self._native.new(capacity, ctypes.byref(address)) < 0:
            raise OSError(self._native.last_error())
        self._address = address
        self.capacity = capacity
        self.fd: int = self._native.fd(address)
        self._buffer = (Done * capacity)()
        self._subscribe = events().subscribe
        self._lock = threading.Lock()
        self._next = 0
        self._open: dict[int, T] = {}
        self._later: deque[tuple[Event, T]] = deque()

    def __len__(self) -> int:
        """What still waits."""
        return len(self._open) + len(self._later)

    def add(self, event: Event, what: T) -> None:
        """``what`` comes out of `take` once the event has ended."""
        with self._lock:
            if len(self._open) == self.capacity:
                self._later.append((event, what))
            else:
                self._begin(event, what)

    def take(self) -> list[T]:
        """Everything whose event has ended, in the order in which they ended.  Never blocks."""
        count = self._native.drain(self._address, self._buffer, self.capacity)
        with self._lock:
            ended = [self._open.pop(self._buffer[i].ticket) for i in range(count)]
            while self._later and len(self._open) < self.capacity:
                self._begin(*self._later.popleft())
        return ended

    def waiting(self) -> list[T]:
        """What still waits, oldest first."""
        with self._lock:
            return [*self._open.values(), *(what for _, what in self._later)]

    def abandon(self) -> None:
        """Give up what still waits.  The ring is not asked any more."""
        with self._lock:
            self._open.clear()
            self._later.clear()

    def wait(self, timeout_s: float | None) -> bool:
        """Block this thread, without the GIL, until there is something to take or `poke` was called -> False on timeout."""
        ready: int = self._native.wait(self._address, -1 if timeout_s is None else int(timeout_s * 1e9))
        return ready != 0

    def poke(self) -> None:
        """Make `wait` return."""
        self._native.poke(self._address)

    def counts(self) -> Counts:
        counts = RingCounts()
        self._native.count(self._address, ctypes.byref(counts))
        return Counts(counts.pushed, counts.drained, counts.wakes, counts.refused)

    def _begin(self, event: Event, what: T) -> None:
        self._next += 1
        self._open[self._next] = what
        self._subscribe(*event, self._address, self._next)

    def __del__(self) -> None:
        # Events that have not ended hold the native ring, and with it the descriptor, so that nobody else gets its number.
        if hasattr(self, "_address"):
            self._native.release(self._address)
