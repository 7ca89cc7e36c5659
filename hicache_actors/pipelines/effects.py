"""Effects become work: the one place where what Core decided is started.

`execute` is called by the driver at the end of each section, on Core's owner thread; pipelines run on the loop.  Effects keep
their order.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from hicache_actors.core.records import Changed
from hicache_actors.core.words import (
    Effect,
    Forget,
    Gather,
    Grant,
    Settled,
    StartAttach,
    StartBackup,
    StartClear,
    StartDrain,
    StartLoad,
    StartOpen,
    StartPrefetch,
    StartWriteBack,
    StopJob,
    UseStorage,
    UseWeights,
    Wake,
)
from hicache_actors.errors import HiCacheError, StoppedError
from hicache_actors.pipelines.attach import attach
from hicache_actors.pipelines.backup import backup
from hicache_actors.pipelines.clear import clear
from hicache_actors.pipelines.job import OpenJob, run_job
from hicache_actors.pipelines.load import load
from hicache_actors.pipelines.movers import Movers
from hicache_actors.pipelines.opening import open_memory
from hicache_actors.pipelines.prefetch import Found, look_up, prefetch
from hicache_actors.pipelines.write_back import copy_at_once, write_back
from hicache_actors.ranks import Board
from hicache_actors.runtime import System, bind_log
from hicache_actors.tiers.storage import Store
from hicache_actors.transfer.batch import Batch
from hicache_actors.transfer.completions import fired

T = TypeVar("T")
S = TypeVar("S", StartPrefetch, StartLoad, StartWriteBack, StartBackup, StartAttach, StartClear, StartOpen)


class Pipelines:
    """The open jobs of this rank, and the waiters whose answers come from Core."""

    def __init__(self, system: System, movers: Movers, board: Board, layers: int) -> None:
        self._system, self._movers, self._board, self._layers = system, movers, board, layers
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._jobs: dict[int, OpenJob] = {}
        self._waiters: dict[int, tuple[asyncio.Future[Any], Callable[[Any], Any]]] = {}
        self._gathering: set[int] = set()  # jobs that are open, and not started yet
        self._looking_up: set[OpenJob] = set()  # jobs that have no pipeline yet, and touch nothing
        self._idle = asyncio.Event()
        self._drains: set[asyncio.Task[None]] = set()
        self._draining = True
        self.on_changed: Callable[[Changed], None] = lambda _: None  #: loop thread
        self._log = bind_log(part="pipelines")

    # -- any thread ----------------------------------------------------------------------------------------------------

    def execute(self, effects: list[Effect]) -> None:
        """Start what the effects ask for: at once on the loop, else by one call to it."""
        if threading.get_ident() == self._loop_thread:
            self._start(effects)
        else:
            self._loop.call_soon_threadsafe(self._start, effects)

    def open_job(self, job: int) -> OpenJob:
        """The local half of a job that is open in Core."""
        with self._lock:
            found = self._jobs.get(job)
            if found is None:
                found = self._jobs[job] = OpenJob(job, self._board, self._layers, self._movers.device.device.make_end)
            return found

    def wait_for(self, waiter: int, future: asyncio.Future[T], answer: Callable[[Any], T]) -> None:
        """``future``, of the loop, gets what ``answer`` makes of Core's answer.  Inside the section that made the waiter.

        ``answer`` runs in the order of the effects: a job that the value names is still open inside, while it may have ended by
        the time that the future's waiter runs.
        """
        self._waiters[waiter] = future, answer

    def leave(self, waiter: int) -> None:
        """Its caller has gone."""
        self._waiters.pop(waiter, None)

    # -- loop thread ---------------------------------------------------------------------------------------------------

    @property
    def open_jobs(self) -> int:
        return len(self._jobs)

    def give_up(self, why: BaseException) -> None:
        """The task group is dying: no open job may wait for an answer that will not come.

        RELEASED is not given up: each pipeline ends by itself, and what it submitted is waited for.  A lookup holds nothing.
        """
        for job in list(self._jobs.values()):
            job.answer_rest(why)
        for job in self._looking_up:
            job.close()

    def stop_waiting(self) -> None:
        """The cache is closing: nobody is answered any more."""
        waiters, self._waiters = self._waiters, {}
        for future, _ in waiters.values():
            if not future.done():
                future.set_exception(StoppedError("the cache has been closed"))
                future.exception()  # a caller that is being cancelled does not ask for it any more

    def stop_waits(self) -> None:
        """Locally: each fetch ends between batches with what it has, and neither stores nor host memory are opened any more."""
        self._movers.host.stop_opening()
        for job in list(self._jobs.values()):
            job.stop()

    async def stop_draining(self) -> int:
        """The cache has ended: nobody waits for the engine's events any more -> how many drains still did."""
        self._draining = False
        waiting = set(self._drains)
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)
        return len(waiting)

    async def idle(self) -> None:
        """Wait until no job is open."""
        while self._jobs or self._gathering:
            self._idle.clear()
            await self._idle.wait()

    def _start(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartLoad():
                    self._spawn("load", load, effect)
                case StartWriteBack():
                    self._write_back(effect)
                case Gather():
                    self._gathering.add(effect.job)
                case StartBackup():
                    self._gathering.discard(effect.job)
                    self._spawn_at_store(backup, effect)
                case StartPrefetch():
                    self._fetch(effect)
                case StartDrain():
                    if self._draining:
                        self._drain(effect)
                case Grant():
                    self.open_job(effect.job).grant(effect.slots)
                case Settled():
                    self.open_job(effect.job).settle(effect.pages)
                case StopJob():
                    self.open_job(effect.job).stop()
                case Forget():
                    with self._lock:
                        self._jobs.pop(effect.job, None)
                    if not self._jobs:
                        self._idle.set()
                case Wake():
                    self._wake(effect)
                case StartAttach():
                    self._spawn("attach", attach, effect)
                case StartClear():
                    self._spawn_at_store(clear, effect)
                case StartOpen():
                    self._spawn("open", open_memory, effect)
                case Changed():
                    self.on_changed(effect)
                case UseStorage():
                    self._movers.storage.switch(effect)
                case UseWeights():
                    self._movers.storage.use_weights(effect.weights)

    def _spawn(
        self,
        name: str,
        pipeline: Callable[[Movers, S, OpenJob], Coroutine[Any, Any, None]],
        start: S,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        job = self.open_job(start.job)
        try:
            self._system.spawn(name, self._run, pipeline, start, job, ended)
        except StoppedError as why:
            ended()
            job.answer_rest(why)
            job.close()

    def _spawn_at_store(
        self, pipeline: Callable[[Movers, Store, S, OpenJob], Coroutine[Any, Any, None]], start: S
    ) -> None:
        """The job is about the store that is attached now, and the names that it gives now, whichever are when it runs."""
        store = self._enter_store(self.open_job(start.job))
        if store is None:
            return
        named = store.named()

        async def at_store(movers: Movers, start: S, job: OpenJob) -> None:
            await pipeline(movers, named, start, job)

        self._spawn(pipeline.__name__, at_store, start, store.leave)

    def _enter_store(self, job: OpenJob) -> Store | None:
        """The store, which the job has to leave; None: the cache is closing, and has taken back what Core was attaching."""
        store = self._movers.storage.store
        if store is None:
            job.answer_rest()
            job.close()
        else:
            store.enter()
        return store

    def _fetch(self, start: StartPrefetch) -> None:
        """Look up at once; the pipeline begins when there is something to read, or much to hash first."""
        job = self.open_job(start.job)
        store = self._enter_store(job)
        if store is None:
            return
        named = store.named()

        def go_on(found: Found | None) -> None:
            self._looking_up.discard(job)
            if found is None or found.pages:
                self._spawn("prefetch", partial(prefetch, store=named, found=found), start, store.leave)
            else:
                store.leave()
                job.answer_rest()
                job.close()

        self._looking_up.add(job)
        try:
            look_up(self._movers, named, start, job, go_on)
        except Exception as error:  # a bug: the pipeline meets it again, in the group that it breaks
            self._log.error("lookup_failed", job=start.job, exc_info=error)
            if job in self._looking_up:
                go_on(None)

    def _write_back(self, start: StartWriteBack) -> None:
        batches = self._movers.batches(start.target)
        if start.events or len(batches) > 1:
            self._spawn("write_back", write_back, start)
        else:  # not here: readers of this section's tokens go first
            self._loop.call_soon(self._copy_at_once, start, batches[0], self.open_job(start.job))

    def _copy_at_once(self, start: StartWriteBack, batch: Batch, job: OpenJob) -> None:
        def over(bug: Exception | None) -> None:
            if bug is None:
                job.close()
            else:
                if not isinstance(bug, StoppedError):  # the group may be closing, and tell nobody
                    self._log.error("write_back_failed", job=start.job, exc_info=bug)
                self._spawn("write_back", partial(_fail, bug), start)  # in the group that it breaks

        if self._system.state != "running":
            over(StoppedError(f"the system is {self._system.state}"))
            return
        try:
            copy_at_once(self._movers, start, batch, job, over)
        except Exception as error:
            over(error)

    async def _run(
        self,
        pipeline: Callable[[Movers, S, OpenJob], Coroutine[Any, Any, None]],
        start: S,
        job: OpenJob,
        ended: Callable[[], None],
    ) -> None:
        try:
            await run_job(job, pipeline(self._movers, start, job))
        finally:
            ended()

    def _drain(self, start: StartDrain) -> None:
        """Outside the task group: an engine's forward ends when it ends, whatever has become of ours."""
        job = self.open_job(start.job)
        task = self._loop.create_task(self._wait_all(start, job), name=f"drain-{start.job}")
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _wait_all(self, start: StartDrain, job: OpenJob) -> None:
        sound = True
        for event in start.events:
            sound = await self._ended_well(event, job) and sound
        for hold in start.holds:  # how the engine's work ended is its own affair
            await self._ended_well(hold, job)
        job.close(sound=sound)

    async def _ended_well(self, event: object, job: OpenJob) -> bool:
        try:
            return await fired(event) is None
        except HiCacheError as error:
            # Its device is gone, so nothing writes through it any more.
            self._log.error("event_lost", job=job.job, exc_info=error)
            return False

    def _wake(self, effect: Wake) -> None:
        future, answer = self._waiters.pop(effect.waiter, (None, None))
        if future is not None and answer is not None and not future.done():
            future.set_result(answer(effect.value))


async def _fail(bug: Exception, movers: Movers, start: StartWriteBack, job: OpenJob) -> None:
    """A pipeline that has its bug already."""
    raise bug
