"""Bounded channels between the stages of a pipeline; items are batches.

The upstream stage blocks when the channel is full.  Closing the sender lets the receiver finish what is queued and then ends its
``async for`` (EndOfStream); a sender whose receiver is gone gets BrokenResourceError (`hand_on`: False).  Both ends must be used
inside tasks of the system: scope cancellation loses no item, a native ``task.cancel()`` of a waiting receiver may.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

T = TypeVar("T")

Sender: TypeAlias = MemoryObjectSendStream[T]
Receiver: TypeAlias = MemoryObjectReceiveStream[T]


def channel(capacity_batches: int, item: type[T] | None = None) -> tuple[Sender[T], Receiver[T]]:
    """A channel for batches; ``item`` only tells a type checker what they are.

    Close both ends: ``async with``, or give each of several parallel workers a `clone` to close.
    """
    if capacity_batches < 1:
        raise ValueError(f"capacity_batches = {capacity_batches}: a stage needs room for at least one batch")
    return anyio.create_memory_object_stream[T](capacity_batches)


async def hand_on(sender: Sender[T], item: T) -> bool:
    """Send ``item`` -> False if nobody receives any more: the stage below has ended, by a failure or a stop, before we heard.

    A cancelled group ends its stages in any order, so this is no error of the stage above.
    """
    try:
        await sender.send(item)
    except anyio.BrokenResourceError:
        return False
    return True
