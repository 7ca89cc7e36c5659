"""Work that must not be left half done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


async def see_through(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, however often the caller is cancelled meanwhile; that is raised when it has ended.

    A shielded scope keeps anyio's cancellation out and no other: a native ``task.cancel()`` passes it, so the work has a task of
    its own.
    """
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is None or task.cancelled():
        return task.result()
    task.exception()  # asked for, so that nobody reports it as forgotten
    raise cancelled
