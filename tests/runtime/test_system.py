"""The system: order of start and stop, deadlines, failing as a whole, and what the outside sees of it."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import msgspec
import pytest

from hicache_actors.errors import StoppedError, UsageError
from hicache_actors.runtime import Actor, Ask, Control, Message, System, handles, unwrap
from hicache_actors.testing.loop import run_virtual

every_loop = pytest.mark.parametrize("anyio_backend", ["virtual:3", "asyncio", "uvloop"], indirect=True)
virtual_only = pytest.mark.parametrize("anyio_backend", ["virtual:3", "virtual:4"], indirect=True)


class Note(Message, frozen=True):
    text: str


class Ended(Control, frozen=True):
    text: str


class Boom(Message, frozen=True):
    error: Any


class Read(Ask[int], frozen=True):
    pass


class Stage(Actor):
    """Writes its life into a common diary."""

    def __init__(self, name: str, diary: list[str]) -> None:
        super().__init__(name)
        self.diary = diary

    async def on_start(self) -> None:
        self.diary.append(f"+{self.name}")

    async def on_stop(self) -> None:
        self.diary.append(f"-{self.name}")

    def on_failure(self, error: BaseException) -> None:
        self.diary.append(f"!{self.name} {error!r}")

    @handles(Note)
    def note(self, message: Note) -> None:
        self.diary.append(message.text)

    @handles(Ended)
    def ended(self, message: Ended) -> None:
        self.diary.append(message.text)

    @handles(Boom)
    def boom(self, message: Boom) -> None:
        raise message.error

    @handles(Read)
    def read(self, message: Read) -> int:
        return len(self.diary)


class SlowStart(Stage):
    async def on_start(self) -> None:
        await anyio.sleep(100)


class Unwilling(Stage):
    async def on_stop(self) -> None:
        self.diary.append(f"-{self.name}...")
        await anyio.sleep_forever()


async def _forever() -> None:
    await anyio.sleep_forever()


# -- start and stop ------------------------------------------------------------------------------------------------------------


@every_loop
async def test_actors_start_in_order_and_stop_in_reverse(anyio_backend_name: str) -> None:
    diary: list[str] = []
    async with System() as system:
        await system.start(Stage("a", diary), Stage("b", diary))
        await system.start(Stage("c", diary))
        assert diary == ["+a", "+b", "+c"]
        assert system.snapshot().state == "running"
    assert diary == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert system.state == "stopped"
    assert await system.close() == ()


@every_loop
async def test_pipelines_end_before_actors_stop(anyio_backend_name: str) -> None:
    diary: list[str] = []
    stage = Stage("tier", diary)

    async def pipeline(text: str) -> None:
        await anyio.sleep(0.02)
        stage.tell(Note("work for later"))
        stage.tell(Ended(text))

    async with System() as system:
        await system.start(stage)
        stage.spawn("write", pipeline, "written")
    # the end of a pipeline is control and comes before the stop; work that nobody will do any more may be discarded
    assert [line for line in diary if line != "work for later"] == ["+tier", "written", "-tier"]
    assert stage.snapshot().discarded + stage.snapshot().handled == 2


@virtual_only
async def test_each_stage_of_the_stop_has_its_deadline(anyio_backend_name: str) -> None:
    diary: list[str] = []
    system = System(stop_deadline_s=5.0)
    await system.open()
    await system.start(Stage("a", diary), Unwilling("b", diary), Stage("c", diary))
    job = system.spawn("endless", _forever)
    started = anyio.current_time()
    assert await system.close() == ("endless", "b")
    # 5 s for the pipelines, then 5 s for b
    assert anyio.current_time() - started == pytest.approx(10.0)
    assert diary == ["+a", "+b", "+c", "-c", "-b...", "-a"]
    assert (job.ended, job.cancelled, job.error) == (True, True, None)


@virtual_only
async def test_a_pipeline_that_nothing_ends_is_abandoned_and_named(anyio_backend_name: str) -> None:
    release = anyio.Event()

    async def shielded() -> None:
        with anyio.CancelScope(shield=True):
            await release.wait()

    system = System(stop_deadline_s=5.0)
    await system.open()
    job = system.spawn("deaf", shielded)
    started = anyio.current_time()
    assert await system.close() == ("deaf",)
    assert anyio.current_time() - started == pytest.approx(15.0)
    release.set()
    await job.wait()
    assert await system.close() == ("deaf",)
    assert system.state == "stopped"


@every_loop
async def test_a_start_that_fails_is_raised_and_undoes_the_earlier_ones(anyio_backend_name: str) -> None:
    class Broken(Stage):
        async def on_start(self) -> None:
            raise OSError("no such folder")

    diary: list[str] = []

    async def scenario() -> None:
        async with System() as system:
            await system.start(Stage("a", diary), Broken("b", diary), Stage("c", diary))

    with pytest.raises(OSError, match="no such folder"):
        await scenario()
    assert diary == ["+a", "-a"]


@virtual_only
async def test_a_start_past_its_deadline(anyio_backend_name: str) -> None:
    diary: list[str] = []
    async with System(start_deadline_s=30.0) as system:
        with pytest.raises(TimeoutError):
            await system.start(SlowStart("slow", diary))
        with pytest.raises(TimeoutError):
            await system.start(SlowStart("slow", diary), deadline_s=1.0)
        await system.start(SlowStart("slow", diary), deadline_s=200.0)
        assert anyio.current_time() == pytest.approx(131.0, abs=1.0)
        assert system.failed is None


async def test_names_are_unique_and_systems_not_reused() -> None:
    async with System() as system:
        await system.start(Stage("a", []))
        with pytest.raises(UsageError, match="already has an actor named a"):
            await system.start(Stage("a", []))
    with pytest.raises(UsageError):
        await system.open()
    with pytest.raises(StoppedError):
        system.spawn("late", _forever)
    with pytest.raises(StoppedError):
        await System().start(Stage("a", []))


# -- pipelines -----------------------------------------------------------------------------------------------------------------


@every_loop
async def test_pipelines_are_named_and_counted(anyio_backend_name: str) -> None:
    async with System() as system:
        jobs = [system.spawn("load", anyio.sleep, 0) for _ in range(3)]
        endless = system.spawn("load", _forever)
        for job in jobs:
            await job.wait()
        (counts,) = system.snapshot().jobs
        assert (counts.name, counts.started, counts.running, counts.ended) == ("load", 4, 1, 3)
        endless.cancel()
        await endless.wait()
        (counts,) = system.snapshot().jobs
        assert (counts.running, counts.ended, counts.cancelled, counts.failed) == (0, 3, 1, 0)
        assert endless.cancelled
        assert not jobs[0].cancelled


@every_loop
async def test_native_cancel_of_who_waits_for_a_job_does_not_touch_the_job(anyio_backend_name: str) -> None:
    finished: list[int] = []

    async def work() -> None:
        await anyio.sleep(0.02)
        finished.append(1)

    async with System() as system:
        job = system.spawn("work", work)
        waiters = [asyncio.create_task(job.wait()) for _ in range(2)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        await waiters[1]
        assert finished == [1]
        with pytest.raises(asyncio.CancelledError):
            await waiters[0]


# -- failure -------------------------------------------------------------------------------------------------------------------


@every_loop
async def test_an_exception_in_a_told_handler_fails_the_system_and_dumps_the_rings(
    anyio_backend_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    diary: list[str] = []
    heard: list[BaseException] = []
    error = ValueError("planted")
    system = System(on_failure=heard.append)
    await system.open()
    broken, healthy = Stage("broken", diary), Stage("healthy", diary)
    await system.start(healthy, broken)
    job = system.spawn("endless", _forever)
    broken.tell(Note("before"))
    broken.tell(Boom(error))
    broken.tell(Note("never"))
    pending = [asyncio.create_task(actor.ask(Read())) for actor in (broken, healthy)]
    await job.wait()
    answers = await asyncio.gather(*pending, return_exceptions=True)
    assert isinstance(answers[0], StoppedError)  # the healthy one may have answered before
    assert await system.close() == ()

    assert system.failed is error
    assert heard == [error]
    assert system.state == "failed"
    assert system.snapshot().failure == repr(error)
    assert [snapshot.state for snapshot in system.snapshot().actors] == ["stopped", "failed"]
    assert [line for line in diary if "broken" in line] == ["+broken", f"!broken {error!r}", "-broken"]
    assert "-healthy" in diary
    assert "never" not in diary
    assert job.cancelled
    assert system.failure is not None
    assert system.failure.source == "broken"
    assert system.failure.rings["broken"] == (Note("before"), Boom(error))
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1  # one log says it all
    text = caplog.text
    assert "system_failed" in text
    assert "Note(text='before')" in text
    assert "ValueError: planted" in text
    for actor in (broken, healthy):
        with pytest.raises(StoppedError):
            actor.tell(Note("late"))


@every_loop
async def test_a_failure_inside_does_not_cancel_who_opened_the_system(anyio_backend_name: str) -> None:
    async def scenario() -> str:
        async with System() as system:
            stage = Stage("a", [])
            await system.start(stage)
            stage.tell(Boom(KeyError("inside")))
            await anyio.sleep(0.02)  # an engine's request goes on
            assert system.failed is not None
            return "served"
        raise AssertionError("not reached")

    with pytest.raises(KeyError, match="inside"):  # and the bug is not swallowed either
        await scenario()


@every_loop
async def test_the_bodys_own_exception_wins(anyio_backend_name: str) -> None:
    async def scenario() -> None:
        async with System() as system:
            system.spawn("broken", _raise, KeyError("inside"))
            await anyio.sleep(0.01)
            raise OSError("outside")

    with pytest.raises(OSError, match="outside"):
        await scenario()


async def _raise(error: Exception) -> None:
    raise error


@every_loop
async def test_single_causes_are_unwrapped(anyio_backend_name: str) -> None:
    error = OSError("deep")

    async def pipeline() -> None:
        async with anyio.create_task_group() as outer:
            async with anyio.create_task_group() as inner:
                inner.start_soon(_raise, error)
            outer.start_soon(_forever)

    system = System()
    await system.open()
    job = system.spawn("nested", pipeline)
    await job.wait()
    await system.close()
    assert system.failed is error
    assert job.error is error
    assert system.failure is not None
    assert system.failure.source == "nested-1"
    assert system.snapshot().jobs[0].failed == 1
    several = ExceptionGroup("two", [OSError("one"), ValueError("two")])
    assert unwrap(ExceptionGroup("around", [several])) is several


@every_loop
async def test_only_the_first_failure_counts_and_hooks_may_fail(
    anyio_backend_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Clumsy(Stage):
        def on_failure(self, error: BaseException) -> None:
            raise RuntimeError("hook")

        async def on_stop(self) -> None:
            raise RuntimeError("stop")

    def report(error: BaseException) -> None:
        raise RuntimeError("report")

    system = System(on_failure=report)
    await system.open()
    clumsy = Clumsy("clumsy", [])
    await system.start(clumsy)
    job = system.spawn("endless", _forever)
    clumsy.tell(Boom(KeyError("first")))
    await job.wait()  # ends with the group; a close before would overtake the message
    await system.close()
    assert isinstance(system.failed, KeyError)
    assert caplog.text.count("on_failure_failed") == 2
    assert caplog.text.count("failed_again") == 1


@every_loop
async def test_an_on_stop_that_raises_fails_the_system(anyio_backend_name: str) -> None:
    class Broken(Stage):
        async def on_stop(self) -> None:
            raise OSError("cannot close")

    diary: list[str] = []

    async def scenario() -> None:
        async with System() as system:
            await system.start(Stage("a", diary), Broken("b", diary))

    with pytest.raises(OSError, match="cannot close"):
        await scenario()
    assert diary == ["+a", "+b", "-a"]


# -- cancellation from outside -------------------------------------------------------------------------------------------------


@every_loop
@pytest.mark.parametrize("native", [True, False], ids=["native", "scope"])
async def test_cancelling_the_host_stops_everything_in_order(anyio_backend_name: str, native: bool) -> None:
    diary: list[str] = []
    ready = anyio.Event()
    jobs = []

    async def pipeline() -> None:
        await anyio.sleep(0.02)
        diary.append("transfer finished")

    async def host() -> None:
        async with System() as system:
            await system.start(Stage("a", diary), Stage("b", diary))
            jobs.append(system.spawn("transfer", pipeline))
            ready.set()
            await anyio.sleep_forever()

    if native:
        task = asyncio.create_task(host())
        await ready.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        async with anyio.create_task_group() as group:
            group.start_soon(host)
            await ready.wait()
            group.cancel_scope.cancel()
    assert diary == ["+a", "+b", "transfer finished", "-b", "-a"]
    assert not jobs[0].cancelled


@every_loop
async def test_a_second_native_cancel_during_close_does_not_cut_the_stages(anyio_backend_name: str) -> None:
    diary: list[str] = []
    system = System()
    await system.open()
    await system.start(Stage("a", diary))

    async def pipeline() -> None:
        await anyio.sleep(0.02)
        diary.append("transfer finished")

    system.spawn("transfer", pipeline)
    closing = asyncio.create_task(system.close())
    await anyio.sleep(0.001)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert await system.close() == ()
    assert diary == ["+a", "transfer finished", "-a"]


# -- snapshots and determinism -------------------------------------------------------------------------------------------------


async def test_a_snapshot_is_frozen_and_encodable() -> None:
    async with System("cache") as system:
        stage = Stage("a", [])
        await system.start(stage)
        stage.tell(Note("x"))
        await stage.ask(Read())
        snapshot = system.snapshot()
        assert snapshot.actors[0].handled == 2
        assert msgspec.json.decode(msgspec.json.encode(snapshot), type=type(snapshot)) == snapshot
        with pytest.raises(AttributeError):
            snapshot.name = "other"  # type: ignore[misc]


def test_whole_systems_are_repeatable_by_seed() -> None:
    async def main() -> tuple[str, ...]:
        diary: list[str] = []

        async def pipeline(stage: Stage, name: str) -> None:
            for step in range(3):
                await asyncio.sleep(0)
                stage.tell(Ended(f"{name}{step}"))

        async with System() as system:
            stages = [Stage(name, diary) for name in "ab"]
            await system.start(*stages)
            for stage in stages:
                for name in "xy":
                    stage.spawn("p", pipeline, stage, f"{stage.name}{name}")
        return tuple(diary)

    runs = {seed: run_virtual(main, seed) for seed in range(30)}
    assert runs == {seed: run_virtual(main, seed) for seed in range(30)}
    assert len(set(runs.values())) > 15
    assert len({tuple(sorted(run)) for run in runs.values()}) == 1
