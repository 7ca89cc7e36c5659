"""The three ways to wait for a layer of a load: a stream, a forward thread, a coroutine."""

from __future__ import annotations

import asyncio
import functools
from typing import Protocol

from hicache_actors.errors import TransferError, UsageError
from hicache_actors.transfer.completions import Completion, Ending, fired


class WaitingStream(Protocol):
    """A stream of a device."""

    def wait_event(self, event: Completion) -> None: ...


class LayerWaits:
    """One completion a layer.  Set by the thread that ends the copy, never through an event loop.  Any thread may call.

    A load succeeds or fails as a whole: after `fail` every wait is over and answers False, whichever layers had come before.
    """

    def __init__(self, layers: int) -> None:
        self._layers = tuple(Completion() for _ in range(layers))
        self._error: BaseException | None = None

    @property
    def layers(self) -> int:
        return len(self._layers)

    @property
    def error(self) -> BaseException | None:
        """Why the load failed; None while it runs and after success."""
        return self._error

    def done(self, layer: int) -> bool:
        """Whether the layer has been copied and the load has not failed.  Never blocks."""
        return self._layers[layer].query() and self._error is None

    def set(self, layer: int) -> None:
        """The layer's bytes are in place.  Later calls, and calls after `fail`, change nothing."""
        self._layers[layer].finish()

    def fail(self, error: BaseException) -> None:
        """Release all waiters: the load has failed.  Once every layer is set it is too late, and nothing happens."""
        if self._error is not None or all(layer.query() for layer in self._layers):
            return
        self._error = error
        for layer in self._layers:
            layer.finish(error)

    def follow(self, layer: int, ticket: Ending) -> None:
        """`set` the layer when ``ticket`` (of its last copy) ends, or `fail` with the ticket's error."""
        ticket.add_callback(functools.partial(self._copied, layer, ticket))

    def stream_wait(self, layer: int, stream: WaitingStream) -> None:
        """What is submitted to ``stream`` later runs after the layer.  Does not block.

        A failed load releases the stream too: the verdict of the load, not the stream, says that its results are void.
        """
        stream.wait_event(self._layers[layer])

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Block a forward thread -> False on timeout (``error`` is None) or if the load has failed (``error`` says why).

        Raises `UsageError` only where it could never end: on the thread of a virtual-time loop, which would have to copy.
        """
        completion = self._layers[layer]
        if not completion.query():
            loop = asyncio._get_running_loop()
            if getattr(loop, "threadless", False):
                raise UsageError(
                    "wait would stop the virtual-time loop that has to finish the copy: await ready(layer)"
                )
        return completion.wait(timeout_s) and self._error is None

    async def ready(self, layer: int) -> None:
        """Wait on the loop.  Raises `TransferError` if the load has failed.  Cancelling it harms no other waiter."""
        await fired(self._layers[layer])
        if self._error is not None:
            raise TransferError(f"the load failed: {self._error}") from self._error

    def _copied(self, layer: int, ticket: Ending) -> None:
        if ticket.error is None:
            self.set(layer)
        else:
            self.fail(ticket.error)
