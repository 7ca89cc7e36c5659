"""The system: one task group for all actors and pipelines, started and stopped in order, failing as a whole.

The group lives in a task of its own.  So a failure inside never cancels the code that opened the system, and a native cancel of
that code never cuts the work inside: callers hold handles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVarTuple

import anyio
import anyio.abc

from hicache_actors.errors import StoppedError, UsageError
from hicache_actors.runtime.actor import Actor
from hicache_actors.runtime.observation import (
    Failure,
    JobsSnapshot,
    SystemSnapshot,
    SystemState,
    bind_log,
    describe_rings,
    unwrap,
)
from hicache_actors.runtime.sniffing import as_in_a_task

Ts = TypeVarTuple("Ts")


class Job:
    """Handle of a spawned pipeline.  ``error`` is what it raised, None if it ended well or was cancelled."""

    __slots__ = ("_ended", "_scope", "cancelled", "error", "name", "number")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.cancelled = False
        self.error: BaseException | None = None
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> None:
        """Cancel its scope.  Only for pipelines that wait on nothing submitted: a transfer is never cancelled, only waited for."""
        self._scope.cancel()

    async def wait(self) -> None:
        """Until it has ended, in whatever way.  Any number of waiters; cancelling one touches nothing else."""
        await self._ended.wait()


class _Tally:
    __slots__ = ("cancelled", "ended", "failed", "started")

    def __init__(self) -> None:
        self.started = self.ended = self.cancelled = self.failed = 0


class _Life:
    """A started actor: its scope, and the event of its end."""

    __slots__ = ("actor", "ended", "scope")

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()


class System:
    """``async with System() as system: await system.start(device, host)``; or `open` and `close`.  Loop thread only.

    ``stop_deadline_s`` holds for each stage of `close`: first the running pipelines, then each actor, last started first.
    ``on_failure`` is called once, on the loop, at the moment of the first failure and before anything is torn down.
    """

    def __init__(
        self,
        name: str = "hicache",
        *,
        start_deadline_s: float = 30.0,
        stop_deadline_s: float = 5.0,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.name = name
        self.log = bind_log(system=name)
        self.failure: Failure | None = None
        self._start_deadline_s = start_deadline_s
        self._stop_deadline_s = stop_deadline_s
        self._on_failure = on_failure
        self._state: SystemState = "new"
        self._lives: dict[str, _Life] = {}
        self._jobs: dict[int, Job] = {}
        self._tallies: dict[str, _Tally] = {}
        self._numbers = 0
        self._late: list[str] = []
        self._group: anyio.abc.TaskGroup | None = None
        self._task: asyncio.Task[None] | None = None
        self._close_asked = asyncio.Event()
        self._stages_done = asyncio.Event()

    # -- life ------------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> SystemState:
        return self._state

    @property
    def failed(self) -> BaseException | None:
        """The first failure, unwrapped; final."""
        return None if self.failure is None else self.failure.error

    async def open(self) -> None:
        """Raises UsageError the second time: a system is not reused."""
        if self._task is not None:
            raise UsageError(f"system {self.name} has been opened before")
        opened = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(opened), name=f"{self.name}-system")
        await opened

    async def start(self, *actors: Actor, deadline_s: float | None = None) -> None:
        """Start actors in this order, each within its deadline; they stop in reverse order.

        Raises what an `Actor.on_start` raises (TimeoutError past the deadline); the system lives, earlier actors go on.
        """
        for actor in actors:
            group = self._accepting()
            if actor.name in self._lives:
                raise UsageError(f"system {self.name} already has an actor named {actor.name}")
            actor._bind(self)
            life = _Life(actor)
            started = asyncio.get_running_loop().create_future()
            limit_s = self._start_deadline_s if deadline_s is None else deadline_s
            self._lives[actor.name] = life
            group.start_soon(self._run_actor, life, started, limit_s, name=f"{self.name}.{actor.name}")
            await started

    def spawn(self, name: str, pipeline: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> Job:
        """Run ``pipeline(*args)`` in the task group.  What it raises fails the system.  Raises StoppedError when closing."""
        return as_in_a_task(lambda: self._spawn(name, pipeline, args))

    def _spawn(self, name: str, pipeline: Callable[[*Ts], Awaitable[object]], args: tuple[*Ts]) -> Job:
        group = self._accepting()
        self._numbers += 1
        job = Job(name, self._numbers)
        self._jobs[job.number] = job
        tally = self._tallies.get(name)
        if tally is None:
            tally = self._tallies[name] = _Tally()
        tally.started += 1
        group.start_soon(self._run_job, job, tally, pipeline, args, name=f"{self.name}.{name}-{job.number}")
        return job

    async def close(self) -> tuple[str, ...]:
        """Stop everything in order; -> names of what missed its deadline and was cancelled.  Idempotent, does not raise `failed`.

        Pipelines may run to their end; then each actor handles the control messages told before and discards its data lane,
        asks in it get StoppedError.  The stages run in the system's own task: a cancelled caller leaves early, but they go on.
        """
        if self._task is None:
            self._state = "stopped"
            return ()
        if self._state == "running":
            self._state = "closing"
        self._close_asked.set()
        with anyio.CancelScope(shield=True):
            stages = asyncio.ensure_future(self._stages_done.wait())
            try:
                await asyncio.wait({self._task, stages}, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait({self._task}, timeout=self._stop_deadline_s)
            finally:
                stages.cancel()
        if not self._task.done():
            self.log.error("stop_abandoned", left=self._left())
        return tuple(dict.fromkeys([*self._late, *self._left()]))

    async def __aenter__(self) -> System:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes, and raises `failed` unless the body raised already."""
        await self.close()
        if error is None and self.failed is not None:
            raise self.failed

    def snapshot(self) -> SystemSnapshot:
        jobs = []
        for name, tally in self._tallies.items():
            over = tally.ended + tally.cancelled + tally.failed
            jobs.append(
                JobsSnapshot(name, tally.started, tally.started - over, tally.ended, tally.cancelled, tally.failed)
            )
        return SystemSnapshot(
            name=self.name,
            state=self._state,
            failure=None if self.failure is None else repr(self.failure.error),
            actors=tuple(life.actor.snapshot() for life in self._lives.values()),
            jobs=tuple(jobs),
        )

    def describe_rings(self) -> dict[str, list[str]]:
        """The last messages of each actor, as text for a log."""
        return describe_rings(self._rings())

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _rings(self) -> dict[str, tuple[object, ...]]:
        return {name: life.actor.recent() for name, life in self._lives.items()}

    def _accepting(self) -> anyio.abc.TaskGroup:
        if self._state != "running" or self._group is None:
            raise StoppedError(f"system {self.name} is {self._state}")
        return self._group

    async def _run(self, opened: asyncio.Future[None]) -> None:
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                self._state = "running"
                opened.set_result(None)
                await self._close_asked.wait()
                await self._stop_stages()
                group.cancel_scope.cancel()
        except Exception as error:
            self._fail(self.name, error)
        finally:
            self._group = None
            self._state = "stopped" if self.failure is None else "failed"
            self._stages_done.set()

    async def _stop_stages(self) -> None:
        with anyio.move_on_after(self._stop_deadline_s):
            await self._jobs_ended()
        if self._jobs:
            self._late.extend(job.name for job in self._jobs.values())
            for job in self._jobs.values():
                job.cancel()
            with anyio.move_on_after(self._stop_deadline_s):
                await self._jobs_ended()
        for life in reversed(self._lives.values()):
            life.actor._stop()
            with anyio.move_on_after(self._stop_deadline_s) as stage:
                await life.ended.wait()
            if stage.cancelled_caught:
                self._late.append(life.actor.name)
                life.scope.cancel()
                with anyio.move_on_after(self._stop_deadline_s):
                    await life.ended.wait()
        if self._late:
            self.log.warning("stop_late", late=self._late)
        self._stages_done.set()

    async def _jobs_ended(self) -> None:
        while self._jobs:
            await next(iter(self._jobs.values())).wait()

    def _left(self) -> list[str]:
        actors = [name for name, life in self._lives.items() if not life.ended.is_set()]
        return [job.name for job in self._jobs.values()] + actors

    async def _run_job(
        self, job: Job, tally: _Tally, pipeline: Callable[[*Ts], Awaitable[object]], args: tuple[*Ts]
    ) -> None:
        try:
            with job._scope:
                await pipeline(*args)
            job.cancelled = job._scope.cancelled_caught
        except Exception as error:
            job.error = unwrap(error)
            self._fail(f"{job.name}-{job.number}", error)
            raise
        except BaseException:
            job.cancelled = True
            raise
        finally:
            if job.error is not None:
                tally.failed += 1
            elif job.cancelled:
                tally.cancelled += 1
            else:
                tally.ended += 1
            del self._jobs[job.number]
            job._ended.set()

    async def _run_actor(self, life: _Life, started: asyncio.Future[None], limit_s: float) -> None:
        actor = life.actor
        try:
            with life.scope:
                if not await self._start_actor(actor, started, limit_s):
                    return
                try:
                    await actor._serve()
                except Exception as error:
                    self._fail(actor.name, error)
                    self._tell_failure(actor, error)
                    raise
                finally:
                    await self._stop_actor(actor)
        finally:
            life.ended.set()

    async def _start_actor(self, actor: Actor, started: asyncio.Future[None], limit_s: float) -> bool:
        try:
            with anyio.fail_after(limit_s):
                await actor.on_start()
        except BaseException as error:
            actor.failure = error
            actor._end()
            del self._lives[actor.name]
            heard = error if isinstance(error, Exception) else StoppedError(f"system {self.name} stopped meanwhile")
            if not started.done():
                started.set_exception(heard)
            elif isinstance(error, Exception):
                self.log.error("start_failed", actor=actor.name, exc_info=error)  # who called start was cancelled
            if not isinstance(error, Exception):
                raise
            return False
        if not started.done():
            started.set_result(None)
        return True

    async def _stop_actor(self, actor: Actor) -> None:
        with anyio.move_on_after(self._stop_deadline_s, shield=True) as stage:
            try:
                await actor.on_stop()
            except Exception as error:
                self._fail(actor.name, error)
        if stage.cancelled_caught:
            self._late.append(actor.name)

    def _tell_failure(self, actor: Actor, error: Exception) -> None:
        try:
            actor.on_failure(error)
        except Exception as second:
            self.log.error("on_failure_failed", actor=actor.name, exc_info=second)

    def _fail(self, source: str, error: BaseException) -> None:
        """Record the first failure, at once; log what comes after it."""
        cause = unwrap(error)
        if self.failure is not None:
            if cause is not self.failure.error and error is not self.failure.error:
                self.log.error("failed_again", source=source, exc_info=cause)
            return
        self.failure = Failure(source, cause, self._rings())
        self._state = "failed"
        self.log.error("system_failed", source=source, rings=describe_rings(self.failure.rings), exc_info=cause)
        if self._on_failure is not None:
            try:
                self._on_failure(cause)
            except Exception as second:
                self.log.error("on_failure_failed", source=source, exc_info=second)
