"""Rounds of N ranks on one loop in virtual time: late, lost, or ended by a peer's death.

`SimNetwork` is the hub; `SimNetwork.transport` gives each rank a `hicache_actors.ranks.transport.Transport`.  Operations of a kind
are paired by their order, as gloo pairs them, so a rank that skips a round is answered with its peers' next one: what comes of that
is for the harness to find.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from hicache_actors.errors import PeerError
from hicache_actors.ranks import RoundVector

T = TypeVar("T")


class SimFlight(Generic[T]):
    """An operation under way.  Loop thread only."""

    def __init__(self) -> None:
        self.answered = False  #: all ranks have taken part; the answer is on its way
        self._done = False
        self._value: T | None = None
        self._error: PeerError | None = None
        self._callbacks: list[Callable[[], None]] = []

    def result(self, timeout_s: float) -> T:
        """What came of it.  Raises TimeoutError while it has not ended: a virtual clock stands still for who blocks."""
        if not self._done:
            raise TimeoutError("the round has not ended; in virtual time await it first")
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value

    def when_done(self, callback: Callable[[], None]) -> None:
        if self._done:
            callback()
        else:
            self._callbacks.append(callback)

    def end(self, value: T | None = None, error: PeerError | None = None) -> None:
        """The network's; only the first end counts."""
        if self._done:
            return
        self._done, self._value, self._error = True, value, error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class _Operation:
    """One collective: what has arrived at the hub, and who waits for it."""

    def __init__(self) -> None:
        self.sent: dict[int, Any] = {}
        self.flights: dict[int, SimFlight[Any]] = {}


class SimNetwork:
    """The hub of ``ranks`` ranks.  ``mean_delay_s``: of each message, exponential, drawn from ``seed``.

    ``collectives`` counts, per rank, what it has issued, by kind.
    """

    def __init__(self, ranks: int, seed: int, *, mean_delay_s: float = 0.0003) -> None:
        self.ranks = ranks
        self.collectives: list[dict[str, int]] = [{"round": 0, "intake": 0} for _ in range(ranks)]
        self._random = random.Random(f"network {seed}")
        self._mean_delay_s = mean_delay_s
        self._operations: dict[str, list[_Operation]] = {"round": [], "intake": []}
        self._gone: set[int] = set()  # left, or cut off
        self._transports = [SimTransport(self, rank) for rank in range(ranks)]

    def transport(self, rank: int) -> SimTransport:
        return self._transports[rank]

    def lose(self, rank: int) -> None:
        """Cut a rank off: nothing that it sends arrives, nothing reaches it, and nobody is told (a pulled cable, SIGSTOP)."""
        self._gone.add(rank)

    def crash(self, rank: int) -> None:
        """End a rank: its connections close.

        As with gloo, one survivor sees that at once and the others wait out their deadline, unless the first tells them by
        closing its own.
        """
        self._gone.add(rank)
        survivors = [other for other in range(self.ranks) if other not in self._gone]
        if survivors:
            witness = self._random.choice(survivors)
            self._later(lambda: self._transports[witness].fail(PeerError(f"rank {rank} has closed its connection")))

    def issue(self, kind: str, rank: int, payload: Any, flight: SimFlight[Any]) -> None:
        """`SimTransport` only: ``rank`` takes part in its next operation of ``kind``."""
        at = self.collectives[rank][kind]
        self.collectives[rank][kind] += 1
        operations = self._operations[kind]
        if at == len(operations):
            operations.append(_Operation())
        operation = operations[at]
        operation.flights[rank] = flight
        if rank not in self._gone:
            self._later(lambda: self._arrive(kind, operation, rank, payload))

    def leave(self, rank: int) -> None:
        """`SimTransport` only: its peers learn that it has closed; what was on its way to them still arrives."""
        if rank in self._gone:
            return
        self._gone.add(rank)
        for other, transport in enumerate(self._transports):
            if other not in self._gone and any(not flight.answered for flight in transport.waiting):
                self._later(lambda to=transport: to.fail(PeerError(f"rank {rank} has left")))  # type: ignore[misc]

    def _arrive(self, kind: str, operation: _Operation, rank: int, payload: Any) -> None:
        operation.sent[rank] = payload
        if len(operation.sent) < self.ranks:
            return
        answer: Any = operation.sent[0]
        if kind == "round":
            answer = RoundVector.reduce_min([operation.sent[number] for number in range(self.ranks)])
        for number, flight in operation.flights.items():
            flight.answered = True
            self._later(lambda to=number, ended=flight: self._deliver(to, ended, answer))  # type: ignore[misc]

    def _deliver(self, rank: int, flight: SimFlight[Any], answer: Any) -> None:
        if rank not in self._gone:
            flight.end(answer)

    def _later(self, act: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(self._random.expovariate(1 / self._mean_delay_s), act)


class SimTransport:
    """One rank's end.  Once an operation has failed, all that wait and all later ones fail."""

    def __init__(self, network: SimNetwork, rank: int) -> None:
        self.rank, self.size = rank, network.ranks
        self.waiting: list[SimFlight[Any]] = []
        self._network = network
        self._failed: PeerError | None = None

    def reduce_min(self, vector: Sequence[int], deadline_s: float) -> SimFlight[Sequence[int]]:
        flight: SimFlight[Sequence[int]] = SimFlight()
        self._issue("round", array("q", vector), flight, deadline_s)
        return flight

    def broadcast(self, data: bytes, deadline_s: float) -> SimFlight[bytes]:
        flight: SimFlight[bytes] = SimFlight()
        self._issue("intake", bytes(data), flight, deadline_s)
        return flight

    def close(self) -> None:
        self.fail(PeerError("this rank has closed its transport"))
        self._network.leave(self.rank)

    def fail(self, error: PeerError) -> None:
        """The network's: everything that waits fails, and whatever comes later."""
        if self._failed is None:
            self._failed = error
        waiting, self.waiting = self.waiting, []
        for flight in waiting:
            flight.end(error=self._failed)

    def _issue(self, kind: str, payload: Any, flight: SimFlight[Any], deadline_s: float) -> None:
        if self._failed is not None:
            flight.end(error=self._failed)
            return
        self.waiting.append(flight)
        late = asyncio.get_running_loop().call_later(
            deadline_s, lambda: self.fail(PeerError(f"no answer to a {kind} within {deadline_s} s"))
        )

        def ended() -> None:
            late.cancel()
            if flight in self.waiting:
                self.waiting.remove(flight)

        flight.when_done(ended)
        self._network.issue(kind, self.rank, payload, flight)
