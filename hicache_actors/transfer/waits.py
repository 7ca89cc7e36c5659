"""The three ways to wait for a layer of a load: a stream, a forward thread, a coroutine."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from hicache_actors.errors import TransferError, UsageError
from hicache_actors.transfer.completions import Completion, End, Ending, fired


@runtime_checkable
class WaitingStream(Protocol):
    """A stream of a device."""

    def wait_event(self, event: End) -> None: ...


@runtime_checkable
class OrdersStreams(Protocol):
    """An end that streams of the engine can be made to wait for on the device."""

    def order(self, stream: object) -> None:
        """What is submitted to ``stream`` (torch.cuda.Stream, or the number of a CUstream) from now on runs after this end.

        Blocks until the work has been handed to the GPU, not until it has ended; after a failure it returns at once.  Raises
        `UsageError` while the stream is being captured in a graph.
        """


class LayerWaits:
    """One completion a layer.  Set by the thread that ends the copy, never through an event loop.  Any thread may call.

    A load succeeds or fails as a whole: after `fail` every wait is over and answers False, whichever layers had come before.
    """

    def __init__(self, layers: int, make: Callable[[], End] = Completion) -> None:
        """``make``: the kind of end that the device's streams can finish and wait for by themselves."""
        self._count, self._make = layers, make
        self._lock = threading.Lock()
        self._made: tuple[End, ...] | None = None  # when first asked for: jobs of other kinds never need them
        self._error: BaseException | None = None

    @property
    def layers(self) -> int:
        return self._count

    @property
    def error(self) -> BaseException | None:
        """Why the load failed; None while it runs and after success."""
        if self._error is None and self._made is not None:
            self._error = self._made[-1].error  # a device that ends layers by itself fails the last one with any
        return self._error

    def end(self, layer: int) -> End:
        """For the device: what it shall finish when the layer's bytes are in place, or with the error of a copy that failed; then
        with those of all layers behind it."""
        return self._layers()[layer]

    def done(self, layer: int) -> bool:
        """Whether the layer has been copied and the load has not failed.  Never blocks."""
        end = self._layers()[layer]
        return end.query() and self._verdict(end) is None

    def set(self, layer: int) -> None:
        """The layer's bytes are in place.  Later calls, and calls after `fail`, change nothing."""
        self._layers()[layer].finish()

    def fail(self, error: BaseException) -> None:
        """Release all waiters: the load has failed.  Once every layer is set it is too late, and nothing happens."""
        with self._lock:
            if self.error is not None or (self._made is not None and all(layer.query() for layer in self._made)):
                return
            self._error = error
            ends = self._made or ()
        for layer in ends:
            layer.finish(error)

    def follow(self, layer: int, ticket: Ending) -> None:
        """`set` the layer when ``ticket`` (of its last copy) ends, or `fail` with the ticket's error."""
        ticket.add_callback(functools.partial(self._copied, layer, ticket))

    def stream_wait(self, layer: int, stream: object) -> None:
        """What is submitted to ``stream`` later runs after the layer.  ``stream``: one of a device, and of a GPU also the engine's
        own, a torch.cuda.Stream or the number of a CUstream.

        It does not block, but for a moment with a stream of the engine: until the copy has been handed to the GPU.  A failed load
        releases the stream too: the verdict of the load, not the stream, says that its results are void.  Raises `UsageError`
        for a stream that this device cannot make wait, or that is being captured in a CUDA graph.
        """
        end = self._layers()[layer]
        # Streams of torch have a wait_event too, for events of torch.
        if isinstance(stream, WaitingStream) and hasattr(stream, "submit"):
            stream.wait_event(end)
        elif isinstance(end, OrdersStreams):
            end.order(stream)
        else:
            raise UsageError(f"the device cannot make {stream!r} wait: call wait(layer) on the forward thread")

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Block a forward thread -> False on timeout (``error`` is None) or if the load has failed (``error`` says why).

        Raises `UsageError` only where it could never end: on the thread of a virtual-time loop, which would have to copy.
        """
        completion = self._layers()[layer]
        if not completion.query():
            loop = asyncio._get_running_loop()
            if getattr(loop, "threadless", False):
                raise UsageError(
                    "wait would stop the virtual-time loop that has to finish the copy: await ready(layer)"
                )
        return completion.wait(timeout_s) and self._verdict(completion) is None

    async def ready(self, layer: int) -> None:
        """Wait on the loop.  Raises `TransferError` if the load has failed.  Cancelling it harms no other waiter."""
        end = self._layers()[layer]
        await fired(end)
        error = self._verdict(end)
        if error is not None:
            raise TransferError(f"the load failed: {error}") from error

    def _verdict(self, end: End) -> BaseException | None:
        """Why the load failed, for one who has seen ``end``: a device that fails all layers may be half-way through them."""
        if self._error is None:
            self._error = end.error
        return self.error

    def _layers(self) -> tuple[End, ...]:
        if self._made is None:
            with self._lock:
                if self._made is None:
                    made = tuple(self._make() for _ in range(self._count))
                    if self._error is not None:
                        for layer in made:
                            layer.finish(self._error)
                    self._made = made
        return self._made

    def _copied(self, layer: int, ticket: Ending) -> None:
        if ticket.error is None:
            self.set(layer)
        else:
            self.fail(ticket.error)
