"""Streams of the CPU device, which are native threads: what they are told, as one call a submission."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Final

from hicache_actors.cuda_ext.native.events import Event
from hicache_actors.cuda_ext.native.library import Library, loaded
from hicache_actors.cuda_ext.native.structs import Op, StreamCounts
from hicache_actors.errors import StoppedError, TransferError

CALL: Final = 0
EXTERNAL: Final = 1
WAIT: Final = 2
RECORD: Final = 3

INVALID: Final = -1
SYSTEM: Final = -2
CLOSED: Final = -3


class _Functions:
    def __init__(self, library: Library) -> None:
        i32, u32, i64, u64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64
        pointer, counts = ctypes.c_void_p, ctypes.POINTER(StreamCounts)
        call = library.function
        self.faults_new = call("hic_faults_new", pointer)
        self.faults_add = call("hic_faults_add", None, pointer, i32, u32, u32, i32)
        self.faults_release = call("hic_faults_release", None, pointer)
        self.new = call("hic_stream_new", i32, ctypes.c_char_p, i32, pointer, ctypes.POINTER(pointer))
        self.submit = call("hic_stream_submit", i64, pointer, pointer, u32, pointer, u64)
        self.speed = call("hic_stream_speed", None, pointer, i64, ctypes.c_double)
        self.gate_shut = call("hic_stream_gate_shut", None, pointer, pointer, u64)
        self.gate_allow = call("hic_stream_gate_allow", i32, pointer, u32, pointer, u64)
        self.gate_open = call("hic_stream_gate_open", None, pointer)
        self.next = call("hic_stream_next", i32, pointer, i64, ctypes.POINTER(u64))
        self.end = call("hic_stream_end", None, pointer, i32)
        self.finish = call("hic_stream_finish", None, pointer)
        self.join = call("hic_stream_join", i32, pointer, i64)
        self.drop = call("hic_stream_drop", None, pointer, i32)
        self.broken = call("hic_stream_break", None, pointer, i32)
        self.count = call("hic_stream_count", None, pointer, counts)
        self.error = call("hic_stream_error", None, pointer, pointer, u32)
        self.release = call("hic_stream_release", None, pointer)
        self.last_error = library.last_error


@functools.cache
def _functions() -> _Functions:
    return _Functions(loaded())


class Faults:
    """Planned failures, shared by the streams of a device.  Any thread may call."""

    def __init__(self) -> None:
        self._native = _functions()
        self.address: int = self._native.faults_new()

    def add(self, code: int, works: int, after: int, stream: int | None) -> None:
        """Fail ``works`` pieces of work with ``code`` > 0, once ``after`` others have passed; ``stream``: of that number only."""
        self._native.faults_add(self.address, code, works, after, -1 if stream is None else stream)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._native.faults_release(self.address)


class RawStream:
    """A native stream.  Any thread may call; only `join` and `next_external` block."""

    def __init__(self, name: str, number: int, faults: Faults) -> None:
        self._native = _functions()
        address = ctypes.c_void_p()
        self._native.new(name.encode(), number, faults.address, ctypes.byref(address))
        self._address = address

    def submit(self, ops: Sequence[Op], whole: Event | None = None) -> int:
        """All ops in order, then ``whole`` ends with the first failure -> how many ops were ever submitted.

        Raises `StoppedError` after `finish`, `TransferError` if no thread could be started; nothing was taken then.
        """
        array = (Op * len(ops))(*ops)
        event, generation = whole or (None, 0)
        number: int = self._native.submit(self._address, array, len(ops), event, generation)
        if number < 0:
            raise (StoppedError if number == CLOSED else TransferError)(self._native.last_error())
        return number

    def speed(self, latency_s: float, byte_s: float) -> None:
        """Work that begins from now on lasts so long at least."""
        self._native.speed(self._address, int(latency_s * 1e9), byte_s * 1e9)

    def shut_gate(self, reached: Event) -> None:
        self._native.gate_shut(self._address, *reached)

    def allow(self, works: int, fresh: Event) -> bool | None:
        """-> whether ``fresh`` took the place of a ``reached`` that had ended; None if the gate is open."""
        code: int = self._native.gate_allow(self._address, works, *fresh)
        return None if code == INVALID else code == 1

    def open_gate(self) -> None:
        self._native.gate_open(self._address)

    def next_external(self) -> int | None:
        """Block until external work is to be done -> its number; None when no more will come."""
        argument = ctypes.c_uint64()
        code = 0
        while code == 0:
            code = self._native.next(self._address, -1, ctypes.byref(argument))
        return argument.value if code == 1 else None

    def end_external(self, code: int) -> None:
        self._native.end(self._address, code)

    def finish(self) -> None:
        """Take nothing more."""
        self._native.finish(self._address)

    def join(self, timeout_s: float) -> bool:
        """Block until the thread has ended after `finish` -> False on timeout."""
        code: int = self._native.join(self._address, max(0, int(timeout_s * 1e9)))
        return code == 0

    def drop(self, code: int) -> None:
        """End what is open with ``code``, and all that comes later."""
        self._native.drop(self._address, code)

    def break_off(self, code: int) -> None:
        """From now on nothing is done, and nothing told, until `drop`."""
        self._native.broken(self._address, code)

    def counts(self) -> StreamCounts:
        counts = StreamCounts()
        self._native.count(self._address, ctypes.byref(counts))
        return counts

    def error(self) -> str:
        """Why the last call failed that did so by itself."""
        text = ctypes.create_string_buffer(512)
        self._native.error(self._address, text, len(text))
        return text.value.decode(errors="replace")

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            self._native.release(self._address)
