"""What drives an engine: turns of decisions, on the cache's loop or in a thread of the engine's own, and the thread that computes.

A turn takes in messages, settles passes that have ended, decides the next one and launches it.  With two steps in flight the
computing thread finds the next pass ready when it has ended one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import anyio

from hicache_actors.cache.handles import Load, Prefetch
from hicache_actors.errors import StoppedError
from hicache_actors.integrations.serving.model import ServedModel
from hicache_actors.integrations.serving.request import Pass, Request
from hicache_actors.integrations.serving.scheduler import Scheduler
from hicache_actors.integrations.serving.words import Ending
from hicache_actors.ranks import Driver, StepDriver
from hicache_actors.runtime import Workers

News = list[tuple[Request, list[int], Ending | None]]
Message = Callable[[Scheduler], object]

_LOOK_AGAIN_S: Final = 0.005  #: for room, or for local news in an empty step


class Turns(ABC):
    """``deliver`` is called on the loop with what callers are to be told."""

    def __init__(self, scheduler: Scheduler, served: ServedModel, deliver: Callable[[News], None]) -> None:
        self.scheduler, self.served = scheduler, served
        self.under_way: deque[Pass] = deque()
        self.failure: Exception | None = None
        self._deliver = deliver
        self._depth = scheduler.config.steps_in_flight
        self._inbox: deque[Message] = deque()
        self._compute = Workers("serving-compute", 1)
        self._close_by_s: float | None = None

    # -- any thread -----------------------------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """The next turn runs it."""
        self._inbox.append(message)
        self.wake()

    @abstractmethod
    def wake(self) -> None:
        """Have a turn made soon."""

    # -- the loop's thread ----------------------------------------------------------------------------------------------

    @abstractmethod
    async def run(self) -> None:
        """Make turns until `close`; raises what broke them, after all requests have been ended with it."""

    def close(self, timeout_s: float) -> None:
        """End all requests; `run` returns when no pass is under way, or after ``timeout_s``."""
        self._close_by_s = time.monotonic() + timeout_s
        self.wake()

    async def aclose(self, timeout_s: float) -> None:
        """End the thread that computes."""
        await self._compute.aclose(timeout_s)

    # -- the thread of decisions ----------------------------------------------------------------------------------------

    def _decide(self) -> Pass | None:
        """One turn's decisions -> what is to be launched."""
        scheduler = self.scheduler
        while self._inbox:
            self._inbox.popleft()(scheduler)
        while self.under_way and self.under_way[0].settled:
            scheduler.settle(self.under_way.popleft())
        if self._close_by_s is not None:
            self._end_all(None)
            return None
        return scheduler.plan(self.under_way) if len(self.under_way) < self._depth else None

    def _end_all(self, error: Exception | None) -> None:
        for request in self.scheduler.requests():
            self.scheduler.end(request, "aborted" if error is None else "error", error)

    def _launch(self, planned: Pass) -> None:
        self.under_way.append(planned)

        def ended(future: Future[None]) -> None:
            if future.cancelled():
                planned.error = StoppedError("the engine was closed before this pass began")
            planned.ended.finish()
            self.wake()

        self._compute.submit(planned.run, self.served).add_done_callback(ended)

    @property
    def _finished(self) -> bool:
        return self._close_by_s is not None and (not self.under_way or time.monotonic() >= self._close_by_s)

    def _take_news(self) -> News:
        news, self.scheduler.news = self.scheduler.news, []
        return news

    def _break(self, error: Exception) -> None:
        """A bug, or the cache has been closed: nobody is served any more, and pages go back when passes under way have ended."""
        self.failure = error
        while self._inbox:
            self._inbox.popleft()(self.scheduler)
        self._end_all(error)


class LoopTurns(Turns):
    """Decisions on the cache's loop (driver="auto")."""

    def __init__(
        self, scheduler: Scheduler, served: ServedModel, deliver: Callable[[News], None], driver: Driver
    ) -> None:
        super().__init__(scheduler, served, deliver)
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._driver = driver
        self._news = asyncio.Event()

    def wake(self) -> None:
        if threading.get_ident() == self._loop_thread:
            self._news.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    def watch(self, what: Prefetch | Load) -> None:
        """Make a turn when it is settled."""
        what.when_settled(self._news.set)

    async def run(self) -> None:
        try:
            while not self._finished:
                self._news.clear()
                with self._driver.together():  # as many jobs as a step has, not as many as it has requests
                    planned = self._decide()
                    # Before the section ends, and starts what saves the pages: passes and readers go first.
                    if planned is not None:
                        self._launch(planned)
                    self._deliver(self._take_news())
                if planned is not None and len(self.under_way) < self._depth:
                    await asyncio.sleep(0)
                    continue
                looks_again = (self.scheduler.looks_again and not self.under_way) or self._close_by_s is not None
                with anyio.move_on_after(_LOOK_AGAIN_S if looks_again else None):
                    await self._news.wait()
        except asyncio.CancelledError:
            self._break(StoppedError("the engine's task has been cancelled"))
            raise
        except Exception as error:
            self._break(error)
            raise
        finally:
            self._deliver(self._take_news())


class StepTurns(Turns):
    """Decisions in a thread of the engine's own, one step a turn (driver="step")."""

    def __init__(
        self, scheduler: Scheduler, served: ServedModel, deliver: Callable[[News], None], driver: StepDriver
    ) -> None:
        super().__init__(scheduler, served, deliver)
        self._loop = asyncio.get_running_loop()
        self._driver = driver
        self._news = threading.Event()
        self._thread = Workers("serving-steps", 1)

    def wake(self) -> None:
        self._news.set()

    async def run(self) -> None:
        self._driver.board.on_news = self.wake
        steps = self._thread.submit(self._steps)
        try:
            await asyncio.wrap_future(steps)
        finally:
            self._driver.board.on_news = None

    async def aclose(self, timeout_s: float) -> None:
        await super().aclose(timeout_s)
        await self._thread.aclose(timeout_s)

    def _steps(self) -> None:
        driver = self._driver
        try:
            while not self._finished:
                self._news.clear()
                driver.begin_step(pace=False)
                try:
                    planned = self._decide()
                finally:
                    driver.end_step()
                if planned is not None:
                    self._launch(planned)
                self._tell()
                if planned is None or len(self.under_way) >= self._depth:
                    self._news.wait(self._pace_s())
        except Exception as error:
            self._break(error)
            raise
        finally:
            self._tell()

    def _pace_s(self) -> float | None:
        """How long to wait for news: of passes, copies, stores and callers."""
        if self._driver.needs_step and not self.under_way:
            return self._driver.pace_s
        waits = self._driver.needs_step or self.scheduler.looks_again or self._close_by_s is not None
        return _LOOK_AGAIN_S if waits else None

    def _tell(self) -> None:
        news = self._take_news()
        if news and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, news)
