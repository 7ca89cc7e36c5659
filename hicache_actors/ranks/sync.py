"""RankSync: the only issuer of collectives on its group."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import anyio

from hicache_actors.errors import PeerError, UsageError
from hicache_actors.ranks.round import Round
from hicache_actors.ranks.transport import Flight, Transport

T = TypeVar("T")

_LEAST_S: Final = 0.001  #: an operation may tell of its end a moment before it is seen to have ended


class RankSync:
    """Issues rounds in order, at most ``lag`` under way, and keeps them until they have ended.

    It lives outside the cache's task group: a rank whose cache has crashed still answers.  Rounds are issued by the thread that
    makes the steps.  Once one has failed (a peer is gone, or later than ``deadline_s`` after the round was issued) the group is
    lost for good: this rank leaves it, so that the others need not wait, and every later call raises that `PeerError`.
    """

    def __init__(self, transport: Transport, *, lag: int = 1, deadline_s: float = 4.0) -> None:
        self.transport, self.lag, self.deadline_s = transport, lag, deadline_s
        self.rounds = 0
        self.collectives = 0  #: of any kind, since the group was formed
        self.lost: PeerError | None = None
        self._under_way: deque[Ticket] = deque()

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    def exchange(self, sent: Round) -> Ticket:
        """Issue a round.  Raises `PeerError` if the group is lost, `UsageError` if ``lag`` rounds are under way."""
        under_way = self._under_way
        while under_way and under_way[0].ended:
            under_way.popleft()
        if len(under_way) >= self.lag:
            raise UsageError(f"{self.lag} rounds are under way already: begin_step has to take the oldest first")
        if self.lost is not None:
            raise PeerError(str(self.lost)) from self.lost
        try:
            ticket = Ticket(self, self.transport.reduce_min(sent.vector, self.deadline_s))
        except PeerError as error:
            raise self.lose(error) from error
        self.collectives += 1
        self.rounds += 1
        under_way.append(ticket)
        return ticket

    def reduce(self, values: Sequence[int], timeout_s: float) -> Sequence[int]:
        """A reduction beside the rounds, in a place that all ranks reach, such as the end after a divergence.  Blocks."""
        flight = self._issue(lambda: self.transport.reduce_min(values, timeout_s))
        return self._ended(flight, timeout_s)

    async def reduce_async(self, values: Sequence[int], timeout_s: float) -> Sequence[int]:
        """`reduce` on the loop: at the start."""
        flight = self._issue(lambda: self.transport.reduce_min(values, timeout_s))
        await _landed(flight, timeout_s)
        return self._ended(flight, _LEAST_S)

    def broadcast(self, data: bytes, timeout_s: float) -> bytes:
        """Rank 0's bytes, on all ranks.  Blocks.  Any one thread at a time."""
        flight = self._issue(lambda: self.transport.broadcast(data, timeout_s))
        return self._ended(flight, timeout_s)

    async def arrived(self, ticket: Ticket, timeout_s: float) -> None:
        """Wait on the loop until the round has ended, however, or ``timeout_s`` have passed."""
        await _landed(ticket.flight, timeout_s)

    def lose(self, error: Exception) -> PeerError:
        """Any thread: leave the group -> why."""
        if self.lost is None:
            self.lost = (
                error if isinstance(error, PeerError) else PeerError(str(error) or "a peer did not answer in time")
            )
            self._under_way = deque()  # what is kept of an operation keeps its group, and the thread that polls for it
            self.transport.close()
        return self.lost

    def close(self) -> None:
        """Leave the group; idempotent.  Rounds under way end by themselves."""
        self.lose(PeerError("this rank has left its group"))

    def _issue(self, operation: Callable[[], Flight[T]]) -> Flight[T]:
        if self.lost is not None:
            raise PeerError(str(self.lost)) from self.lost
        try:
            flight = operation()
        except PeerError as error:
            raise self.lose(error) from error
        self.collectives += 1
        return flight

    def _ended(self, flight: Flight[T], timeout_s: float) -> T:
        try:
            return flight.result(timeout_s)
        except (PeerError, TimeoutError) as error:
            raise self.lose(error) from error


class Ticket:
    """A round under way."""

    def __init__(self, sync: RankSync, flight: Flight[Sequence[int]]) -> None:
        self.flight = flight
        self.ended = False
        self._sync = sync

    def result(self, timeout_s: float) -> Sequence[int]:
        """The reduced vector; blocks, at most ``timeout_s``, and never beyond ``deadline_s`` after the round was issued.

        A round that is late is lost, and its group with it: raises `PeerError`.

        Once the group is lost no result is given any more, not even one that has come.
        """
        self.ended = True
        if self._sync.lost is not None:
            raise self._sync.lost
        try:
            return self.flight.result(timeout_s)
        except (PeerError, TimeoutError) as error:
            raise self._sync.lose(error) from error


async def _landed(flight: Flight[Any], timeout_s: float) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:  # maybe on a thread of the transport, after the loop has gone
        if not loop.is_closed():
            loop.call_soon_threadsafe(ended.set)

    flight.when_done(wake)
    with anyio.move_on_after(timeout_s):
        await ended.wait()
