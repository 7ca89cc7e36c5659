"""What carries rounds between ranks: two operations, one protocol, so that it can be simulated.

`gloo.GlooTransport` and `tcp.TcpTransport` are the real ones.  A transport serves one group for its life: when an operation has
failed, all later ones fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Flight(Protocol[T_co]):
    """An operation under way.  It cannot be cancelled; it ends, with a result or an error, within its deadline."""

    def result(self, timeout_s: float) -> T_co:
        """Block the calling thread until it has ended; at most ``timeout_s``, and not beyond the deadline of the operation.

        Raises `PeerError` (a peer is gone, or late beyond the deadline) or TimeoutError; may be called again.
        """
        ...

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back once it has ended, however: in any thread, or at once in this one.  The callback must not block."""
        ...


class Transport(Protocol):
    """A group of ranks.  Each kind of operation is paired across ranks by its order; the two kinds are independent.

    One thread at a time issues operations of a kind.  Issuing returns at once; it raises `PeerError` if the group is known to be
    lost.  Each flight's `result` is asked for before the next operation of its kind ends.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def reduce_min(self, vector: Sequence[int], deadline_s: float) -> Flight[Sequence[int]]:
        """Element by element MIN of int64 vectors, of one length on all ranks.  ``vector`` may change after the call."""
        ...

    def broadcast(self, data: bytes, deadline_s: float) -> Flight[bytes]:
        """The bytes of rank 0, on all ranks; what others pass is ignored."""
        ...

    def close(self) -> None:
        """Leave: peers that wait for this rank learn of it at once, if the medium can tell them.  Any thread, never blocks."""
        ...


class FutureFlight(Generic[T]):
    """A flight whose end is told to a `concurrent.futures.Future`."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def result(self, timeout_s: float) -> T:
        return self._future.result(timeout_s)

    def when_done(self, callback: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: callback())
