"""One direction of a store: whose turn it is, what is under way, and what hangs."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Any

from hicache_actors.runtime.breaker import Breaker
from hicache_actors.tiers.storage.call import Call
from hicache_actors.tiers.storage.staging import StagingPool
from hicache_actors.tiers.storage.words import LaneSnapshot, Refusal


class Lane:
    """Calls wait by priority of their request (higher first), then by age.

    ``limit_bytes`` are the credits of calls that run; a call that is larger runs alone.  A call that hangs gives its place and its
    credits back: what hangs is bounded by ``max_hung`` and the calls that ran beside it.  With ``max_hung`` calls hanging, the lane
    is shut: all that waits and all that comes is refused, until one has returned.  ``refused`` is told of each.

    ``staging``: a call whose turn it is gets its slots there, and gives them back when it has really ended.

    ``yields``: while it is true, one call runs at a time.  ``moved`` is called when calls have begun, ended or come to wait.
    """

    def __init__(
        self,
        *,
        concurrency: int,
        limit_bytes: int | None,
        max_hung: int,
        breaker: Breaker,
        refused: Callable[[Refusal], object],
        staging: StagingPool | None = None,
        yields: Callable[[], bool] = lambda: False,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.breaker = breaker
        self.limit_bytes = limit_bytes
        self._concurrency, self._max_hung, self._staging = concurrency, max_hung, staging
        self._refused, self._yields, self._moved = refused, yields, moved
        self._queue: list[tuple[int, int, Call[Any]]] = []
        self._running: set[Call[Any]] = set()
        self._hung: set[Call[Any]] = set()
        self._waiting_bytes = self._in_flight_bytes = self._hung_bytes = 0
        self._numbers = 0

    @property
    def shut(self) -> bool:
        return len(self._hung) >= self._max_hung

    def blocked(self, call: Call[Any]) -> bool:
        """Whether calls that hang would have to return first."""
        return self.shut or (self._staging is not None and not self._staging.could_take(call.pages))

    @property
    def idle(self) -> bool:
        """Nobody waits, and nothing runs or hangs."""
        return not (self._queue or self._running or self._hung)

    @property
    def waiting(self) -> bool:
        return bool(self._queue)

    def overflows(self, nbytes: int) -> bool:
        """Whether with this call more bytes would wait than may be under way."""
        return (
            self.limit_bytes is not None and self._waiting_bytes > 0 and self._waiting_bytes + nbytes > self.limit_bytes
        )

    def enter(self, call: Call[Any]) -> None:
        """Queue a call; ``call.turn`` says when it may begin.  Whoever began must `leave`."""
        self._numbers += 1
        call.state = "waiting"
        insort(self._queue, (-call.priority, self._numbers, call))
        self._waiting_bytes += call.nbytes
        self.pump()

    def pump(self) -> None:
        """Let those begin whose turn it is."""
        if self.shut:
            self.refuse_waiting("hung")
        while self._queue and len(self._running) < self._places:
            call = self._queue[0][2]
            if self.blocked(call):
                self._refuse(call, "hung")
                continue
            if not self._fits(call.nbytes) or not self._stage(call):
                break
            self._queue.pop(0)
            self._waiting_bytes -= call.nbytes
            call.state = "running"
            self._running.add(call)
            self._in_flight_bytes += call.nbytes
            call.turn.set_result(True)
        self._moved()

    def overdue(self, call: Call[Any]) -> None:
        """A running call has missed its deadline."""
        self._running.discard(call)
        self._in_flight_bytes -= call.nbytes
        call.state = "hung"
        self._hung.add(call)
        self._hung_bytes += call.nbytes
        if self._staging is not None:
            self._staging.hang(call.staged)
        self.pump()

    def leave(self, call: Call[Any]) -> None:
        """The call has returned, or will not begin.  Idempotent."""
        if call.state == "running":
            self._running.discard(call)
            self._in_flight_bytes -= call.nbytes
        elif call.state == "hung":
            self._hung.discard(call)
            self._hung_bytes -= call.nbytes
        elif call.state == "waiting":
            self._take_out(call)
        else:
            return
        call.state = "left"
        self.pump()

    def withdraw(self, call: Call[Any]) -> None:
        """Nobody wants it: forget it, if it has not begun."""
        if call.state == "waiting":
            self.leave(call)
            call.turn.set_result(False)

    def refuse_waiting(self, reason: Refusal) -> None:
        for _, _, call in list(self._queue):
            self._refuse(call, reason)

    def snapshot(self, now_s: float) -> LaneSnapshot:
        """Any thread."""
        return LaneSnapshot(
            waiting_calls=len(self._queue),
            waiting_bytes=self._waiting_bytes,
            running_calls=len(self._running),
            concurrency=self._concurrency,
            in_flight_bytes=self._in_flight_bytes,
            limit_bytes=self.limit_bytes,
            hung_calls=len(self._hung),
            max_hung_calls=self._max_hung,
            hung_bytes=self._hung_bytes,
            breaker=self.breaker.snapshot(now_s),
        )

    @property
    def _places(self) -> int:
        return 1 if self._yields() else self._concurrency

    def _fits(self, nbytes: int) -> bool:
        return (
            self.limit_bytes is None or not self._in_flight_bytes or self._in_flight_bytes + nbytes <= self.limit_bytes
        )

    def _stage(self, call: Call[Any]) -> bool:
        """Give it its staging slots -> False if they are not there yet."""
        staging = self._staging
        if staging is None:
            return True
        slots = staging.take(call.pages, self.pump)
        if slots is None:
            return False
        call.staged = slots
        call.add_callback(lambda: staging.give(slots))
        return True

    def _refuse(self, call: Call[Any], reason: Refusal) -> None:
        self._take_out(call)
        call.state = "left"
        self._refused(reason)
        call.turn.set_result(False)

    def _take_out(self, call: Call[Any]) -> None:
        self._queue = [entry for entry in self._queue if entry[2] is not call]
        self._waiting_bytes -= call.nbytes
