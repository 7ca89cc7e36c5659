"""What servers that speak ASGI need beside a cache; FastAPI, Starlette, Litestar and Quart do.  Imports none of them.

::

    app.mount("/hicache", CacheEndpoints(cache))               # health, metrics, snapshot, explain

    async with until_disconnect(request.receive) as client:    # a handler that answers all at once
        answer = [token async for token in engine.generate(...)]
    if client.gone:
        ...                                                    # what ran in the block was cancelled, its request aborted

An answer that is streamed needs no `until_disconnect`: these frameworks leave the iterator of a streaming response when its client
has gone, and leaving `ServingEngine.generate`, or a lease, gives everything back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import anyio

from hicache_actors.integrations.endpoints import CacheEndpoints

Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]

__all__ = ["CacheEndpoints", "Client", "Receive", "until_disconnect"]


class Client:
    """Who waits for the answer; ``gone`` is final."""

    def __init__(self) -> None:
        self.gone = False


@asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[Client]:
    """Cancel what runs in the block as soon as the client has gone; the block then ends without an exception.

    ``receive`` is that of the request (``request.receive`` in FastAPI and Starlette); its body must have been read already, and
    nobody else may read from it while the block runs.
    """
    client, scope = Client(), anyio.CancelScope()

    async def watch() -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass  # what is left of a body
        finally:
            # Also where the connection broke so badly that it could not be read: nobody is there any more.
            if not done:
                client.gone = True
                scope.cancel()

    done = False
    watching = asyncio.get_running_loop().create_task(watch(), name="client")
    watching.add_done_callback(_look_at)
    try:
        with scope:
            yield client
    finally:
        done = True
        watching.cancel()


def _look_at(watching: asyncio.Task[None]) -> None:
    """What broke the connection is the server's to report."""
    if not watching.cancelled():
        watching.exception()
