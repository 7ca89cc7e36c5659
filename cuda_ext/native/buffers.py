"""Where the memory of buffers lies, for calls that take addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np

_ANY: Final = ctypes.c_char * 0  # fits every buffer, an empty one as well


def address(buffer: memoryview) -> int:
    """The first byte of a contiguous buffer, which its owner keeps alive and in place.  ValueError for one with gaps."""
    if buffer.readonly:  # ctypes takes only what may be written
        return int(np.frombuffer(buffer, np.uint8).ctypes.data) if len(buffer) else 0
    return ctypes.addressof(_ANY.from_buffer(buffer))


def addresses(buffers: Sequence[memoryview]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(buffers))(*map(address, buffers))


def lengths(buffers: Sequence[memoryview]) -> ctypes.Array[ctypes.c_uint64]:
    """In bytes."""
    return (ctypes.c_uint64 * len(buffers))(*map(len, buffers))
