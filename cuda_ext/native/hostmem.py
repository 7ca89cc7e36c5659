"""Where host memory lies, and its first touch by threads without the GIL (capi/hostmem.h)."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Final

from hicache_actors.cuda_ext.native.library import Library, library

_TIMEOUT: Final = -4
_SLICE_MS: Final = 20  #: so long does a waiter keep others from stopping


class HostMemoryCalls:
    """Any thread.  OSError for what the kernel refuses."""

    def __init__(self, loaded: Library) -> None:
        pointer, count = ctypes.c_void_p, ctypes.c_uint64
        self.last_error = loaded.last_error
        self._bind = loaded.function("hic_bind_memory", ctypes.c_int32, pointer, count, ctypes.c_uint32)
        self.start = loaded.function("hic_touch_start", pointer, pointer, count, ctypes.c_uint32)
        self.done = loaded.quick("hic_touch_done", count, pointer)
        self.reach = loaded.function("hic_touch_reach", ctypes.c_int32, pointer, count, ctypes.c_uint32)
        self.stop = loaded.function("hic_touch_stop", None, pointer)

    def bind(self, address: int, nbytes: int, node: int) -> None:
        """Take pages of this memory from one NUMA node, from their first touch on."""
        if self._bind(address, nbytes, node) < 0:
            raise OSError(self.last_error())


class Touching:
    """Threads that touch [address, address + nbytes) for the first time; others may use it meanwhile.

    Any thread may call.  The memory stays mapped until `stop` has returned.
    """

    def __init__(self, calls: HostMemoryCalls, address: int, nbytes: int, threads: int) -> None:
        """OSError if no thread can be had."""
        self._calls, self._nbytes = calls, nbytes
        self._lock, self._waiting = threading.Lock(), threading.Lock()
        self._done_bytes = 0
        self._handle: int | None = calls.start(address, nbytes, threads)
        if self._handle is None:
            raise OSError(calls.last_error())

    @property
    def done_bytes(self) -> int:
        with self._lock:
            if self._handle is not None:
                self._done_bytes = self._calls.done(self._handle)
            return self._done_bytes

    def reach(self, nbytes: int) -> bool:
        """Wait until the first ``nbytes`` are touched -> False if it was stopped before all were.  OSError if the kernel has
        refused memory.
        """
        code = _TIMEOUT
        while code == _TIMEOUT:
            with self._waiting:
                if self._handle is None:
                    return self._done_bytes == self._nbytes
                code = self._calls.reach(self._handle, nbytes, _SLICE_MS)
        if code < 0:
            raise OSError(self._calls.last_error())
        return True

    def stop(self) -> None:
        """Idempotent; takes milliseconds."""
        with self._waiting, self._lock:
            if self._handle is not None:
                self._done_bytes = self._calls.done(self._handle)
                self._calls.stop(self._handle)
                self._handle = None


@cache
def host_memory_calls() -> HostMemoryCalls | None:
    """None where the native library is missing."""
    loaded = library()
    return None if loaded is None else HostMemoryCalls(loaded)
