"""GPUs through the driver, as native calls: what `NativeCudaDevice` is made of."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from hicache_actors.cuda_ext.native.events import Event
from hicache_actors.cuda_ext.native.library import Function, Library, loaded
from hicache_actors.cuda_ext.native.structs import CudaFacts, CudaHow, Plan
from hicache_actors.errors import TransferError, UsageError

LIBCUDA: Final = "HICACHE_LIBCUDA"
"""Environment: a path of libcuda, where it is not found by name; tests put a stub in its place."""

Engine = Literal["kernel", "direct", "staged"]
Notice = Literal["host_function", "poll"]

_ENGINES: Final[dict[Engine, int]] = {"kernel": 1, "direct": 2, "staged": 3}
_NOTICES: Final[dict[Notice, int]] = {"host_function": 1, "poll": 2}
_INVALID: Final = -1
_TIMEOUT: Final = -4
_LOST: Final = -11


class LostError(TransferError):
    """The GPU's context is dead: nothing on it will ever go well again in this process."""


class How(NamedTuple):
    """How a copy is done.  ``blocks`` and ``lanes`` of the kernel: 0 lets native code choose."""

    engine: Engine
    to_host: bool
    notice: Notice = "host_function"
    blocks: int = 0
    lanes: int = 0


class _Functions:
    def __init__(self, library: Library) -> None:
        i32, u32, u64, pointer = ctypes.c_int32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
        out = ctypes.POINTER(pointer)
        # All of them take locks of the driver, and may wait for a thread that waits for the GIL: none holds it.
        call = functools.partial(_call, library)
        self.open = call("hic_cuda_open", ctypes.c_char_p, i32, out)
        self.close = call("hic_cuda_close", pointer)
        self.facts = call("hic_cuda_facts_of", pointer, ctypes.POINTER(CudaFacts))
        self.load_kernel = call("hic_cuda_load_kernel", pointer, pointer)
        self.lost = call("hic_cuda_lost", pointer)
        self.register = call("hic_cuda_register", pointer, u64, u64)
        self.unregister = call("hic_cuda_unregister", pointer, u64)
        self.stream_open = call("hic_cuda_stream_open", pointer, i32, out)
        self.stream_close = call("hic_cuda_stream_close", pointer)
        self.submit = call("hic_cuda_submit", pointer, pointer, u32, ctypes.POINTER(CudaHow), pointer, u64, out)
        self.order = call("hic_cuda_order", pointer, pointer)
        self.order_event = call("hic_cuda_order_event", pointer, u64)
        self.order_foreign = call("hic_cuda_order_foreign", pointer, u64, pointer)
        self.mark_query = call("hic_cuda_mark_query", pointer)
        self.mark_free = library.function("hic_cuda_mark_free", None, pointer)
        self.last_error = library.last_error

    def checked(self, code: int) -> int:
        if code >= 0:
            return code
        text = self.last_error()
        if code == _LOST:
            raise LostError(text)
        raise UsageError(text) if code == _INVALID else TransferError(text)


def _call(library: Library, name: str, *arguments: type) -> Function:
    return library.function(name, ctypes.c_int32, *arguments)


@functools.cache
def _functions() -> _Functions:
    return _Functions(loaded())


class Mark:
    """The end of what a stream was given until then.  Any thread may call."""

    def __init__(self, address: int) -> None:
        self._native = _functions()
        self.address = address

    def query(self) -> bool:
        """Whether it has come.  Raises `LostError`."""
        return bool(self._native.checked(self._native.mark_query(self.address)))

    def free(self) -> None:
        """Once, and before the GPU is closed; nobody may use it any more."""
        self._native.mark_free(self.address)


class RawCuda:
    """One GPU.  Any thread may call.  Errors of the driver are `TransferError`, `LostError` once the context is dead."""

    def __init__(self, ordinal: int, path: str | None = None) -> None:
        """Raises `TransferError` where there is no driver or no such GPU."""
        self._native = _functions()
        address = ctypes.c_void_p()
        path = os.environ.get(LIBCUDA, "") if path is None else path
        self._native.checked(self._native.open(os.fsencode(path), ordinal, ctypes.byref(address)))
        self._address = address
        self.ordinal = ordinal

    def facts(self) -> CudaFacts:
        facts = CudaFacts()
        self._native.checked(self._native.facts(self._address, ctypes.byref(facts)))
        return facts

    def load_kernel(self, image: bytes) -> None:
        """A cubin or fatbin."""
        self._native.checked(self._native.load_kernel(self._address, ctypes.create_string_buffer(image, len(image))))

    def check(self) -> None:
        """Raises `LostError` if a call or the watchdog has found the context dead.  Asks nobody."""
        self._native.checked(self._native.lost(self._address))

    def register(self, address: int, nbytes: int) -> None:
        self._native.checked(self._native.register(self._address, address, nbytes))

    def unregister(self, address: int) -> None:
        self._native.checked(self._native.unregister(self._address, address))

    def stream(self, *, urgent: bool) -> RawCudaStream:
        address = ctypes.c_void_p()
        self._native.checked(self._native.stream_open(self._address, urgent, ctypes.byref(address)))
        return RawCudaStream(address)

    def order_foreign(self, stream: int, mark: Mark | None) -> None:
        """Let an engine's stream wait for a mark, if there is one.  Raises `UsageError` while it is being captured in a graph."""
        address = None if mark is None else mark.address
        self._native.checked(self._native.order_foreign(self._address, stream, address))

    def close(self) -> bool:
        """-> False while a stream is open: then nothing is given back."""
        code = self._native.close(self._address)
        return code != _TIMEOUT and self._native.checked(code) >= 0


class RawCudaStream:
    """One stream of a GPU.  One thread at a time."""

    def __init__(self, address: ctypes.c_void_p) -> None:
        self._native = _functions()
        self._address = address

    def submit(self, plans: Sequence[Plan], how: How, event: Event | None) -> Mark:
        """Copy by all plans, in one call, and have ``event`` ended behind them.  The plans may be dropped afterwards.

        Without plans it marks the end of what was submitted before.  After an error the event has not been ended.
        """
        array = (Plan * len(plans))(*plans)
        native = CudaHow(_ENGINES[how.engine], how.to_host, _NOTICES[how.notice], how.blocks, how.lanes)
        mark = ctypes.c_void_p()
        address, generation = event or (None, 0)
        self._native.checked(
            self._native.submit(
                self._address, array, len(plans), ctypes.byref(native), address, generation, ctypes.byref(mark)
            )
        )
        assert mark.value is not None
        return Mark(mark.value)

    def order(self, mark: Mark) -> None:
        """What is submitted from now on runs after the mark."""
        self._native.checked(self._native.order(self._address, mark.address))

    def order_event(self, event: int) -> None:
        """The same for an engine's own CUevent."""
        self._native.checked(self._native.order_event(self._address, event))

    def close(self) -> bool:
        """-> False while something is open: then it stays as it is."""
        code = self._native.stream_close(self._address)
        return code != _TIMEOUT and self._native.checked(code) >= 0
