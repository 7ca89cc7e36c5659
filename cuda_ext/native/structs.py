"""The structs of capi.h, field by field.  The loader compares their sizes with those that the compiler chose."""

from __future__ import annotations

import ctypes
from typing import Final

ABI_VERSION: Final = 1
"""Raised with every change to a struct or a signature: capi.h states the same number."""


class Size(ctypes.Structure):
    """hic_size: how many bytes a struct takes."""

    _fields_ = (("name", ctypes.c_char_p), ("bytes", ctypes.c_uint64))


STRUCTS: Final[dict[str, type[ctypes.Structure]]] = {
    "hic_size": Size,
}
"""Every struct that crosses the ABI, by its name in C."""
