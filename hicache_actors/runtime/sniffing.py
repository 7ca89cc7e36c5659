"""What anyio has to know in callbacks of the event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def as_in_a_task(fn: Callable[[], T]) -> T:
    """Call ``fn`` on the loop, in a task or in a callback.

    anyio asks sniffio for the loop where that is installed (by other packages: anyio itself needs it no more), and sniffio sees
    none outside of a task.  So it is told.
    """
    sniffio = sys.modules.get("sniffio")
    if sniffio is None or asyncio.current_task() is not None:
        return fn()
    token = sniffio.current_async_library_cvar.set("asyncio")
    try:
        return fn()
    finally:
        sniffio.current_async_library_cvar.reset(token)
