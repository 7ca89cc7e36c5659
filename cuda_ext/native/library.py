"""Finds the native library, and refuses one that was built from other sources.

It is loaded by ctypes, once a process.  Where it is missing or refused, `why_not` says so in one sentence, and everything it
would do is done in Python.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hicache_actors.cuda_ext.native.structs import ABI_VERSION, STRUCTS, Size

SWITCH: Final = "HICACHE_NATIVE"
"""Environment: ``off`` leaves the library alone; a path names another build of it (with a sanitizer, say)."""

Function = Callable[..., Any]


class Library:
    """The loaded library.  Any thread may call."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` if it cannot be loaded."""
        self.path = path
        self._releasing = ctypes.CDLL(str(path))
        self._holding = ctypes.PyDLL(str(path))

    def function(self, name: str, result: Any, *arguments: Any) -> Function:
        """A function of the ABI by its C name, called without the GIL: all that may block, copy or take a lock."""
        return _declared(self._releasing, name, result, arguments)

    def quick(self, name: str, result: Any, *arguments: Any) -> Function:
        """The same, called with the GIL held: half the cost, and only for what never blocks and takes under a microsecond."""
        return _declared(self._holding, name, result, arguments)

    def address(self, name: str) -> int:
        """Of a function of the ABI, for native code that shall call it."""
        value = ctypes.cast(self._releasing[name], ctypes.c_void_p).value
        assert value is not None
        return value

    def last_error(self) -> str:
        """Why the last call of this thread failed."""
        text: bytes = self.quick("hic_last_error", ctypes.c_char_p)()
        return text.decode(errors="replace")


_lock = threading.Lock()
_state: tuple[Library | None, str] | None = None


def library() -> Library | None:
    """The library, or None: then `why_not` says why.  Looks for it once; any thread may call."""
    return _load()[0]


def loaded() -> Library:
    """The library, for what is used only where there is one.  Raises `RuntimeError` where there is none."""
    found, reason = _load()
    if found is None:
        raise RuntimeError(f"the native library is not in use: {reason}")
    return found


def why_not() -> str:
    """Why the native library is not in use; "" if it is."""
    return _load()[1]


def _load() -> tuple[Library | None, str]:
    global _state
    with _lock:
        if _state is None:
            _state = _find(os.environ.get(SWITCH, ""))
            if _state[0] is None and os.environ.get(SWITCH, "").lower() != "off":
                logging.getLogger("hicache_actors").warning("the native library is not in use: %s", _state[1])
        return _state


def _find(switch: str) -> tuple[Library | None, str]:
    if switch.lower() == "off":
        return None, f"{SWITCH}=off"
    folder = Path(__file__).parent
    path = Path(switch) if switch else next(iter(sorted(folder.glob("_native*.so"))), None)
    if path is None:
        return None, "it was not built: install the package again where g++ is found"
    try:
        found = Library(path)
        reason = _mismatch(found)
    except (OSError, AttributeError) as error:  # AttributeError: a library without the functions asked for
        return None, f"{path.name} cannot be loaded: {error}"
    return (found, "") if not reason else (None, f"{path.name} {reason}: install the package again")


def _mismatch(found: Library) -> str:
    """How a library differs from what this package expects of it; "" if it does not."""
    version = found.quick("hicache_abi", ctypes.c_uint32)()
    if version != ABI_VERSION:
        return f"speaks version {version} of the ABI, this package {ABI_VERSION}"
    count = ctypes.c_uint32()
    rows = found.quick("hic_sizes", ctypes.POINTER(Size), ctypes.POINTER(ctypes.c_uint32))(ctypes.byref(count))
    built = {rows[i].name.decode(): int(rows[i].bytes) for i in range(count.value)}
    for name in sorted(built.keys() | STRUCTS.keys()):
        expected = ctypes.sizeof(STRUCTS[name]) if name in STRUCTS else None
        if built.get(name) != expected:
            return f"lays out {name} in {built.get(name)} bytes, this package in {expected}"
    return ""


def _declared(handle: ctypes.CDLL, name: str, result: Any, arguments: tuple[Any, ...]) -> Function:
    function = handle[name]  # a new object each time, so that one caller's signature is not another's
    function.restype = result
    function.argtypes = arguments
    return function
