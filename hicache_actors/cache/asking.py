"""How frontends on the loop ask Core: an intent, its answer, and no way to leave that keeps anything behind."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, TypeVar

from hicache_actors.cache.admission import Admission
from hicache_actors.cache.handles import Lease
from hicache_actors.core import Core
from hicache_actors.errors import HiCacheError, StoppedError
from hicache_actors.pipelines.effects import Pipelines
from hicache_actors.ranks import Driver, StepDriver
from hicache_actors.ranks.intents import AnyTold, LeaveRoom, TakeBack

T = TypeVar("T")

LAST_STEP_S: Final = 0.25  #: after a deadline: for the step that takes the waiter out


class Asking:
    """Loop thread only."""

    def __init__(self, driver: Driver, pipelines: Pipelines) -> None:
        self._driver, self._pipelines = driver, pipelines
        self._numbers = itertools.count(1)
        self._undecided: weakref.WeakSet[asyncio.Future[Any]] = weakref.WeakSet()
        self._stopped = False

    def decide(self, intent: Callable[[Core], object], told: AnyTold | None) -> None:
        """Run a decision: at once with driver="auto", else in the next step, on all ranks.  It must not raise."""
        if isinstance(self._driver, StepDriver):
            self._driver.post(intent, told)
        else:
            self._driver.defer(intent)

    def decision(self, decision: Callable[[Core], T], told: AnyTold | None) -> asyncio.Future[T]:
        """`decide` -> a future of what comes of it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def decide(core: Core) -> None:
            try:
                value = decision(core)
            except Exception as error:
                if not _refused(core, error):
                    raise
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_resolve, future, value)

        self._undecided.add(future)
        self.decide(decide, told)
        return future

    async def decided(self, decision: Callable[[Core], T], told: AnyTold | None = None) -> T:
        """`decide`, and wait for what came of it."""
        return await self.decision(decision, told)

    async def ask(
        self,
        ask: Callable[[Core], int],
        answer: Callable[[Any], T],
        cancel: Callable[[Core, int], Any],
        deadline_s: float | None = None,
        give_back: Callable[[T], None] | None = None,
        unheard: Callable[[], Any] = lambda: None,
        *,
        told: Callable[[int], AnyTold],
    ) -> T:
        """Put a waiter into Core and wait for its answer, or take it out again: however this ends, it is not left behind.

        ``answer`` makes the result of what Core says, on the loop, before anything later reaches it; after ``deadline_s`` that is
        what ``cancel`` returns, or ``unheard`` if no step comes.  A result that its caller does not live to see goes to
        ``give_back``.  ``told`` makes the message for the other ranks, of the ask's number.
        """
        if self._stopped:
            raise StoppedError("the cache is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        waiter: int | None = None

        def put(core: Core) -> None:
            nonlocal waiter
            try:
                waiter = ask(core)
            except Exception as error:
                if not _refused(core, error):
                    raise
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                self._pipelines.wait_for(waiter, future, answer)

        def take_out(core: Core) -> Any:
            if waiter is None:
                return None
            self._pipelines.leave(waiter)
            return cancel(core, waiter)

        number = next(self._numbers)
        back = _told_back(number, cancel)
        self._undecided.add(future)
        self.decide(put, told(number))
        try:
            await asyncio.wait({future}, timeout=deadline_s)
            if future.done():
                return future.result()
            late = self.decision(take_out, back)
            await asyncio.wait({late}, timeout=LAST_STEP_S)
            if future.done():  # the answer was on its way
                return future.result()
            return answer(late.result() if late.done() else unheard())
        except BaseException:
            if give_back is not None and future.done() and future.exception() is None:
                give_back(future.result())
            else:
                future.cancel()  # an answer that is on its way makes no handle any more
                self.decide(take_out, back)
            raise

    def stop(self) -> None:
        """Nobody is answered any more, neither who waits inside Core nor who waits for a step.  Idempotent."""
        self._stopped = True
        self._pipelines.stop_waiting()
        for future in list(self._undecided):
            _fail(future, StoppedError("the cache has been closed"))


class Acquire:
    """`HiCache.acquire`: one intent in Core, and no way to leave it that keeps a pin."""

    def __init__(self, asking: Asking, admission: Admission, deadline_s: float | None) -> None:
        self._asking, self._admission, self._deadline_s = asking, admission, deadline_s
        self._lease: Lease | None = None

    async def __aenter__(self) -> Lease:
        self._lease = await self._asking.ask(
            lambda core: self._admission.ask(core, self._deadline_s),
            self._admission.answer,
            self._admission.cancel,
            give_back=Lease.hand_back,
            told=lambda number: self._admission.told(number, self._deadline_s),
        )
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lease is not None:
            self._lease.hand_back()


def _told_back(number: int, cancel: Callable[[Core, int], Any]) -> AnyTold:
    """`cancel`, for the other ranks."""
    return LeaveRoom(number) if cancel is Core.leave_room else TakeBack(number, cancel is not Core.cancel_waiter)


def _refused(core: Core, error: Exception) -> bool:
    """Whether that is the answer: what is no refusal is a bug, and after it the driver asks what is left of Core once more."""
    return core.degraded or isinstance(error, HiCacheError)


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # its caller may have gone: that is no "never retrieved"
