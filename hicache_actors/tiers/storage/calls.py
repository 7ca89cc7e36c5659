"""The calls to one store: limits, deadlines, breakers.

A call runs in a task of its own, outside the system's group: nobody cancels it, neither the job that wants it nor a dying
group; a caller stops waiting and goes, and the memory that the call touches is held until it has really ended.  What a backend
does wrong ends here: an error, an answer that breaks the contract, or none, is a miss, counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from hicache_actors.config import StorageConfig
from hicache_actors.errors import BackendError, StoppedError
from hicache_actors.tiers.storage.call import Call
from hicache_actors.tiers.storage.lanes import make_lanes
from hicache_actors.tiers.storage.latency import Latency
from hicache_actors.tiers.storage.staging import Staging
from hicache_actors.tiers.storage.threads import direction_of_call
from hicache_actors.tiers.storage.words import CallBegun, CallFailed, CallRefused, Direction, Note, Refusal

T = TypeVar("T")
R = TypeVar("R")
_UNJUDGED: Final = ("quarantine", "delete", "list")  #: who cannot remove objects, or list them, may serve all the same


class Calls:
    """Loop thread only.  ``note`` takes what is counted, ``quiet`` is called when the last open call has ended."""

    def __init__(
        self, config: StorageConfig, staging: Staging | None, note: Note, log: Any, quiet: Callable[[], None]
    ) -> None:
        self.open: set[Call[Any]] = set()
        self.latency = Latency()
        self.cut = False  #: no call is made any more
        self._note, self._log, self._quiet = note, log, quiet
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._shed_latency_s = config.shed_latency_s
        self._timeouts_s: dict[Direction, float] = {
            "query": config.query_timeout_s,
            "read": config.read_timeout_s,
            "write": config.write_timeout_s,
        }
        self.lanes = make_lanes(config, staging, note, log)

    def start(
        self,
        call: Call[T],
        direction: Direction,
        work: Callable[[], Coroutine[Any, Any, R]],
        then: Callable[[R], Coroutine[Any, Any, T]],
        first: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> Call[T]:
        """Make a call when its turn comes, or refuse it.

        ``work`` is the backend's part, under the deadline; ``first`` and ``then``, before and after it, are ours.
        """
        lane = self.lanes[direction]
        reason = self._refusal(direction) or self._shed(direction, call.nbytes)
        if reason is None and lane.blocked(call):
            reason = "hung"
        if reason is not None:
            self._note(CallRefused(direction, reason))
            call.end()
            return call
        call.on_withdraw(lambda: lane.withdraw(call))
        lane.enter(call)
        self._spawn(call, self._perform(call, direction, work, then, first))
        return call

    def compute(self, call: Call[T], work: Callable[[], Coroutine[Any, Any, T]]) -> Call[T]:
        """Run what does not go to the backend: it is bounded by itself."""
        if self.cut:
            call.end()
            return call

        async def compute() -> None:
            call.settle(await work())

        self._spawn(call, compute())
        return call

    def cut_off(self) -> None:
        """Make no call any more, and let nobody wait: what runs answers now, and ends when it ends."""
        self.cut = True
        for lane in self.lanes.values():
            lane.refuse_waiting("detached")
        for call in self.open:
            call.give_up()

    async def finish(self, timeout_s: float) -> int:
        """Wait for the calls that run, then let go of the rest -> how many may still touch host memory."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        left = [task for task in self._tasks if not task.done()]
        for task in left:
            task.cancel()
        return len(left)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _refusal(self, direction: Direction) -> Refusal | None:
        if self.cut:
            return "detached"
        if self.lanes[direction].shut:
            return "hung"
        now_s = self._loop.time()
        # A hit that cannot be read would only evict others from the host.
        asked: tuple[Direction, ...] = ("query", "read") if direction == "query" else (direction,)
        return "breaker" if any(self.lanes[each].breaker.refuses(now_s) for each in asked) else None

    def _shed(self, direction: Direction, nbytes: int) -> Refusal | None:
        """Under pressure stores go first: a page that is not stored is computed again, maybe; one that is not read, now."""
        if direction != "write":
            return None
        if self.lanes["write"].overflows(nbytes):
            return "credits"
        latency_s = self.latency.average_s(self._loop.time())
        return "latency" if latency_s is not None and latency_s > self._shed_latency_s else None

    def _spawn(self, call: Call[Any], running: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(self._run(call, running), name=f"storage-{call.kind}")
        self._tasks.add(task)
        self.open.add(call)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._end(call)  # it may have been let go before its first step

        task.add_done_callback(done)

    def _end(self, call: Call[Any]) -> None:
        if call not in self.open:
            return
        self.open.discard(call)
        call.end()
        if not self.open:
            self._quiet()

    async def _run(self, call: Call[Any], running: Coroutine[Any, Any, None]) -> None:
        try:
            await running
        except (BackendError, StoppedError) as error:
            self._failed(call, error)
        except Exception as error:
            # A plug-in's bug is still the outside world: it must not take the cache down, but it must be seen.
            self._log.error("backend_bug", call=call.kind, exc_info=error)
            self._failed(call, error)
        finally:
            self._end(call)

    async def _perform(
        self,
        call: Call[T],
        direction: Direction,
        work: Callable[[], Coroutine[Any, Any, R]],
        then: Callable[[R], Coroutine[Any, Any, T]],
        first: Callable[[], Coroutine[Any, Any, None]] | None,
    ) -> None:
        lane = self.lanes[direction]
        try:
            if not await call.turn or not call.wanted():
                return
            if first is not None:
                await first()
            reason = self._refusal(direction)
            if reason is not None:
                self._note(CallRefused(direction, reason))
                return
            direction_of_call.set(direction)
            answer = await self._at_backend(call, direction, work)
            if not call.answered:
                call.settle(await then(answer))
        finally:
            lane.leave(call)

    async def _at_backend(self, call: Call[T], direction: Direction, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        lane, begun_s = self.lanes[direction], self._loop.time()
        judged = call.kind not in _UNJUDGED
        probe = judged and lane.breaker.begin(begun_s)
        timer = self._loop.call_later(self._timeouts_s[direction], self._overdue, call, direction, judged, probe)
        self._note(CallBegun(call.kind))
        error: Exception | None = StoppedError("the call was let go")
        try:
            answer = await work()
            error = None
        except Exception as raised:
            error = raised
            raise
        finally:
            timer.cancel()
            if judged and not call.overdue:
                self._judge(direction, error, probe, begun_s)
            lane.leave(call)
        return answer

    def _judge(self, direction: Direction, error: Exception | None, probe: bool, begun_s: float) -> None:
        breaker, now_s = self.lanes[direction].breaker, self._loop.time()
        if error is None:
            breaker.succeeded(now_s, probe=probe)
            if direction == "read":
                self.latency.add(now_s - begun_s, now_s)
        elif isinstance(error, StoppedError):
            breaker.dropped(probe=probe)
        else:
            breaker.failed(now_s, _text(error), probe=probe)

    def _overdue(self, call: Call[Any], direction: Direction, judged: bool, probe: bool) -> None:
        """Nobody waits for the call any more; what it touches is held until it returns."""
        lane, timeout_s, now_s = self.lanes[direction], self._timeouts_s[direction], self._loop.time()
        call.overdue = True
        error = f"TimeoutError: no answer within {timeout_s} s"
        self._log.warning("call_hangs", call=call.kind, timeout_s=timeout_s)
        self._note(CallFailed(call.kind, error))
        if judged:
            lane.breaker.failed(now_s, error, probe=probe)
        if direction == "read":
            self.latency.add(timeout_s, now_s)
        lane.overdue(call)
        call.give_up()

    def _failed(self, call: Call[Any], error: Exception) -> None:
        if not call.overdue:
            self._note(CallFailed(call.kind, _text(error)))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
