"""Where the memory of buffers lies, for calls that take addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

_ANY: Final = ctypes.c_char * 0  # fits every buffer, an empty one as well


def address(buffer: memoryview) -> int:
    """The first byte of a contiguous buffer, which its owner keeps alive and in place.  ValueError for one with gaps."""
    if buffer.readonly:  # ctypes takes only what may be written
        return int(np.frombuffer(buffer, np.uint8).ctypes.data) if len(buffer) else 0
    return ctypes.addressof(_ANY.from_buffer(buffer))


class Slices(Sequence[memoryview]):
    """Parts of one memory, all of one length.  Each becomes a memoryview when somebody asks for it; native calls need none."""

    def __init__(self, memory: memoryview, starts: NDArray[np.int64], length: int) -> None:
        self._memory, self._starts, self._length = memory, starts, length

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, at: int) -> memoryview: ...
    @overload
    def __getitem__(self, at: slice) -> Slices: ...
    def __getitem__(self, at: int | slice) -> memoryview | Slices:
        if isinstance(at, slice):
            return Slices(self._memory, self._starts[at], self._length)
        start = int(self._starts[at])
        return self._memory[start : start + self._length]

    def __iter__(self) -> Iterator[memoryview]:
        memory, length = self._memory, self._length
        return (memory[start : start + length] for start in self._starts.tolist())

    def pick(self, which: Sequence[int]) -> Slices:
        """Those of these numbers."""
        return Slices(self._memory, self._starts[np.asarray(which, np.intp)], self._length)

    @property
    def sizes(self) -> NDArray[np.uint64]:
        return np.full(len(self), self._length, np.uint64)

    @property
    def addresses(self) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * len(self)).from_buffer((self._starts + address(self._memory)).data)

    @property
    def lengths(self) -> ctypes.Array[ctypes.c_uint64]:
        return (ctypes.c_uint64 * len(self)).from_buffer(self.sizes.data)


def addresses(buffers: Sequence[memoryview]) -> ctypes.Array[ctypes.c_void_p]:
    if isinstance(buffers, Slices):
        return buffers.addresses
    return (ctypes.c_void_p * len(buffers))(*map(address, buffers))


def lengths(buffers: Sequence[memoryview]) -> ctypes.Array[ctypes.c_uint64]:
    """In bytes."""
    if isinstance(buffers, Slices):
        return buffers.lengths
    return (ctypes.c_uint64 * len(buffers))(*map(len, buffers))


def pick(buffers: Sequence[memoryview], which: Sequence[int]) -> Sequence[memoryview]:
    """Those of these numbers."""
    return buffers.pick(which) if isinstance(buffers, Slices) else [buffers[at] for at in which]


def sizes(buffers: Sequence[memoryview]) -> NDArray[np.uint64]:
    """`lengths` to compute with."""
    return buffers.sizes if isinstance(buffers, Slices) else np.fromiter(map(len, buffers), np.uint64, len(buffers))
