"""Events of the native library, and tickets on them: ends that native threads finish and wait for without Python.

An event is used again and again, each time for the next generation, because making one costs more than asking one.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import OrderedDict
from typing import Final

from hicache_actors.cuda_ext.native.library import Library, loaded
from hicache_actors.errors import TransferError

BATCH: Final = 64
"""Events made at once."""

_KNOWN_ERRORS: Final = 4096

Event = tuple[int, int]
"""(address, generation): one end."""


class Errors:
    """Exceptions by number: what native code carries in their place.  Any thread may call.  Remembers the last 4096."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection of garbage inside it may forget a device, which asks for a number
        self._last = 0
        self._errors: OrderedDict[int, BaseException] = OrderedDict()

    def code(self, error: BaseException) -> int:
        """A number > 0 that stands for it."""
        with self._lock:
            if self._errors.get(self._last) is error:  # a device that is lost fails everything with one error
                return self._last
            code = self._last = self._last % 0x7FFFFFFF + 1
            self._errors[code] = error
            if len(self._errors) > _KNOWN_ERRORS:
                self._errors.popitem(last=False)
            return code

    def error(self, code: int) -> BaseException:
        with self._lock:
            error = self._errors.get(code)
        return error if error is not None else TransferError(f"native code {code}")


class Events:
    """The functions of events, and those events that nobody uses.  Any thread may call."""

    def __init__(self, library: Library) -> None:
        event, generation = ctypes.c_void_p, ctypes.c_uint64
        self._library = library
        self._new = library.function("hic_event_new", ctypes.c_int32, ctypes.c_uint32, ctypes.c_void_p)
        self.query = library.quick("hic_event_query", ctypes.c_int32, event, generation)
        self.code = library.quick("hic_event_code", ctypes.c_int32, event)
        self.wait = library.function("hic_event_wait", ctypes.c_int32, event, generation, ctypes.c_int64)
        self.finish = library.function("hic_event_finish", ctypes.c_int32, event, generation, ctypes.c_int32)
        self.subscribe = library.function(
            "hic_event_subscribe", ctypes.c_int32, event, generation, ctypes.c_void_p, ctypes.c_uint64
        )
        self._release = library.function("hic_event_release", None, event)
        self._free: list[Event] = []

    def take(self) -> Event:
        """An event and the generation that it ends next."""
        try:
            return self._free.pop()
        except IndexError:
            made = (ctypes.c_void_p * BATCH)()
            if self._new(BATCH, made) < 0:
                raise MemoryError(self._library.last_error()) from None
            address = made[0]
            assert address is not None
            self._free.extend((other, 1) for other in made[1:] if other is not None)
            return address, 1

    def give_back(self, event: Event) -> None:
        """Nobody in Python asks for this generation any more.

        If it has not ended, streams may wait for it, and ending a later one would end it: then the event is not used again.
        """
        address, generation = event
        if self.query(address, generation):
            self._free.append((address, generation + 1))
        else:
            self._release(address)

    def __del__(self) -> None:
        for address, _ in self._free:
            self._release(address)


ERRORS: Final = Errors()


@functools.cache
def events() -> Events:
    """Those of the library in use.  Raises `RuntimeError` if there is none."""
    return Events(loaded())
