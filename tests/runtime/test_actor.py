"""Actors: the table of handlers, tell, ask and call, and askers that go away."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import msgspec
import pytest

from hicache_actors.errors import MailboxFull, StoppedError, UsageError
from hicache_actors.runtime import MESSAGES_PER_TURN, Actor, Ask, Control, Declined, Message, System, handles

every_loop = pytest.mark.parametrize("anyio_backend", ["virtual:3", "asyncio", "uvloop"], indirect=True)
real_loops = pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)


class Add(Message, frozen=True):
    count: int


class Completed(Control, frozen=True):
    job: int


class Grow(Ask[int | Declined], frozen=True):
    by: int


class Total(Ask[int], frozen=True):
    pass


class Explode(Ask[None], frozen=True):
    error: Any


class Rush(Ask[int], frozen=True):
    """Its handler first lets the asker be cancelled, then works."""

    cancel: Any
    by: int
    error: Any = None


class Unknown(Message, frozen=True):
    pass


class Counter(Actor):
    mailbox_limit = 1000

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.total = 0
        self.order: list[object] = []

    @handles(Add)
    def add(self, message: Add) -> None:
        self.total += message.count
        self.order.append(message.count)

    @handles(Completed)
    def completed(self, message: Completed) -> None:
        self.order.append(f"job {message.job}")

    @handles(Grow)
    def grow(self, message: Grow) -> int | Declined:
        if message.by > 100:
            return Declined("too much")
        self.total += message.by
        return self.total

    @handles(Total)
    def answer(self, message: Total) -> int:
        return self.total

    @handles(Explode)
    def explode(self, message: Explode) -> None:
        raise message.error

    @handles(Rush)
    def rush(self, message: Rush) -> int:
        message.cancel()
        self.total += message.by
        if message.error is not None:
            raise message.error
        return self.total


class Small(Counter):
    mailbox_limit = 2


@pytest.fixture
def complaints() -> Iterator[list[dict[str, Any]]]:
    """What the loop's exception handler hears: "exception was never retrieved" and the like."""
    heard: list[dict[str, Any]] = []
    yield heard
    assert heard == []


# -- class creation ------------------------------------------------------------------------------------------------------------


def test_an_async_handler_is_refused_at_class_creation() -> None:
    with pytest.raises(TypeError, match=r"Wrong\.add: a handler is a plain def"):

        class Wrong(Actor):
            @handles(Add)
            async def add(self, message: Add) -> None:
                pass


def test_overriding_a_handler_with_an_async_one_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Worse\.add"):

        class Worse(Counter):
            async def add(self, message: Add) -> None:  # type: ignore[override]
                pass


def test_two_handlers_of_one_message_are_refused() -> None:
    with pytest.raises(TypeError, match="both handle Add"):

        class Twice(Actor):
            @handles(Add)
            def one(self, message: Add) -> None: ...

            @handles(Add)
            def two(self, message: Add) -> None: ...


def test_only_frozen_tagged_messages_are_handled() -> None:
    class Thawed(msgspec.Struct):
        pass

    class Untagged(Message, frozen=True, tag=False):
        pass

    with pytest.raises(TypeError, match="neither a Message nor an Ask"):

        class First(Actor):
            @handles(Thawed)  # type: ignore[type-var]
            def one(self, message: Thawed) -> None: ...

    with pytest.raises(TypeError, match="frozen, tagged"):

        class Second(Actor):
            @handles(Untagged)
            def one(self, message: Untagged) -> None: ...


@every_loop
async def test_a_subclass_overrides_a_handler_by_its_method_name(anyio_backend_name: str) -> None:
    class Doubling(Counter):
        def add(self, message: Add) -> None:
            self.total += 2 * message.count

    async with System() as system:
        plain, doubling = Counter(), Doubling()
        await system.start(plain, doubling)
        plain.tell(Add(3))
        doubling.tell(Add(3))
        assert (await plain.ask(Total()), await doubling.ask(Total())) == (3, 6)


def test_messages_can_be_encoded_and_decoded_by_tag() -> None:
    encoded = msgspec.json.encode(Completed(7))
    assert msgspec.json.decode(encoded, type=Add | Completed) == Completed(7)


# -- tell, ask, call -----------------------------------------------------------------------------------------------------------


@every_loop
async def test_tells_come_in_order_and_asks_are_answered(anyio_backend_name: str) -> None:
    async with System() as system:
        counter = Counter()
        await system.start(counter)
        for count in range(200):
            counter.tell(Add(count))
        assert await counter.ask(Total()) == sum(range(200))
        assert counter.order == list(range(200))


@every_loop
async def test_control_overtakes_data(anyio_backend_name: str) -> None:
    async with System() as system:
        counter = Counter()
        await system.start(counter)
        counter.tell(Add(1))
        counter.tell(Add(2))
        counter.tell(Completed(9))
        await counter.ask(Total())
        assert counter.order == ["job 9", 1, 2]


@every_loop
async def test_an_exception_in_an_ask_goes_to_the_asker_only(anyio_backend_name: str) -> None:
    async with System() as system:
        counter = Counter()
        await system.start(counter)
        with pytest.raises(KeyError, match="mine"):
            await counter.ask(Explode(KeyError("mine")))
        with pytest.raises(RuntimeError, match="StopIteration"):
            await counter.ask(Explode(StopIteration()))
        counter.tell(Add(1))
        assert await counter.ask(Total()) == 1
        assert counter.snapshot().errors == 2
        assert system.failed is None


@every_loop
async def test_a_refusal_is_a_value_and_is_counted(anyio_backend_name: str) -> None:
    async with System() as system:
        counter = Counter()
        await system.start(counter)
        assert await counter.ask(Grow(101)) == Declined("too much")
        assert counter.call(Grow(102)) == Declined("too much")
        assert await counter.ask(Grow(5)) == 5
        snapshot = counter.snapshot()
        assert (snapshot.handled, snapshot.declined, snapshot.errors) == (3, 2, 0)
        assert snapshot.data_high_water == 1


@every_loop
async def test_call_runs_at_once_ahead_of_the_queue(anyio_backend_name: str) -> None:
    async with System() as system:
        counter = Counter()
        await system.start(counter)
        counter.tell(Add(10))
        assert counter.call(Total()) == 0
        assert await counter.ask(Total()) == 10
        with pytest.raises(KeyError):
            counter.call(Explode(KeyError()))
        assert system.failed is None


async def test_a_message_without_handler_is_the_callers_mistake() -> None:
    async with System() as system:
        counter = Counter()
        await system.start(counter)
        with pytest.raises(UsageError, match="no handler for Unknown"):
            counter.tell(Unknown())
        assert system.failed is None


@every_loop
async def test_a_full_mailbox_raises_to_the_teller_and_the_asker(anyio_backend_name: str) -> None:
    async with System() as system:
        small = Small()
        await system.start(small)
        small.tell(Add(1))
        small.tell(Add(1))
        with pytest.raises(MailboxFull):
            small.tell(Add(1))
        with pytest.raises(MailboxFull):
            await small.ask(Total())
        small.tell(Completed(1))  # frees resources: never refused
        await anyio.wait_all_tasks_blocked()
        assert (small.total, small.snapshot().refused) == (2, 2)


@real_loops
async def test_at_most_64_messages_before_the_loop_gets_a_turn(anyio_backend_name: str) -> None:
    async with System() as system:
        counter = Counter()
        await system.start(counter)
        for _ in range(500):
            counter.tell(Add(1))
        seen = [0]
        while seen[-1] < 500:
            await asyncio.sleep(0)
            seen.append(counter.total)
        assert max(after - before for before, after in itertools.pairwise(seen)) == MESSAGES_PER_TURN


# -- askers that go away -------------------------------------------------------------------------------------------------------


@every_loop
@pytest.mark.parametrize("native", [True, False], ids=["native", "scope"])
async def test_the_reply_is_dropped_when_the_asker_is_cancelled_and_the_work_stands(
    anyio_backend_name: str, native: bool, complaints: list[dict[str, Any]]
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with System() as system:
        counter = Counter()
        await system.start(counter)
        if native:
            asker: asyncio.Task[int] = asyncio.create_task(counter.ask(Rush(lambda: asker.cancel(), 5)))
            with pytest.raises(asyncio.CancelledError):
                await asker
        else:
            with anyio.CancelScope() as scope:
                await counter.ask(Rush(scope.cancel, 5))
            assert scope.cancelled_caught
        assert await counter.ask(Total()) == 5
        assert counter.snapshot().handled == 2
    gc.collect()


@every_loop
async def test_an_error_for_an_asker_that_has_gone_is_logged_and_kills_nothing(
    anyio_backend_name: str, complaints: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with System() as system:
        counter = Counter()
        await system.start(counter)
        with anyio.CancelScope() as scope:
            await counter.ask(Rush(scope.cancel, 0, KeyError("unheard")))
        assert await counter.ask(Total()) == 0
        assert counter.snapshot().errors == 1
    gc.collect()
    assert "asker_gone" in caplog.text
    assert "unheard" in caplog.text


@real_loops  # in plain order, so that both messages are handled in one turn
async def test_an_asker_cancelled_between_the_error_and_its_resumption_leaves_no_complaint(
    anyio_backend_name: str, complaints: list[dict[str, Any]]
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def scenario() -> None:
        async with System() as system:
            counter = Counter()
            await system.start(counter)
            asker = asyncio.create_task(counter.ask(Explode(KeyError("late"))))
            rush = asyncio.create_task(counter.ask(Rush(asker.cancel, 1)))
            with pytest.raises(asyncio.CancelledError):
                await asker
            assert await rush == 1

    await scenario()
    gc.collect()  # a future that is dropped with an exception nobody has seen complains


@every_loop
async def test_two_askers_one_cancelled(anyio_backend_name: str) -> None:
    """Each waits on a future of its own: cancelling one must not cancel the other."""
    async with System() as system:
        counter = Counter()
        await system.start(counter)
        first = asyncio.create_task(counter.ask(Grow(1)))
        second = asyncio.create_task(counter.ask(Grow(1)))
        await asyncio.sleep(0)
        first.cancel()
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert results[1] in (1, 2)
        assert isinstance(results[0], asyncio.CancelledError | int)


# -- life and threads ----------------------------------------------------------------------------------------------------------


@every_loop
async def test_what_is_queued_at_stop_is_answered_or_counted(anyio_backend_name: str) -> None:
    counter = Counter()
    async with System() as system:
        await system.start(counter)
        counter._stop()  # control: overtakes what follows
        counter.tell(Add(1))
        with pytest.raises(StoppedError, match="before it answered"):
            await counter.ask(Total())
        with pytest.raises(StoppedError):
            counter.tell(Add(1))
        with pytest.raises(StoppedError):
            counter.call(Total())
    assert counter.state == "stopped"
    assert counter.snapshot().discarded == 1


async def test_before_start_tells_wait_and_asks_are_refused() -> None:
    counter = Counter()
    counter.tell(Add(4))
    with pytest.raises(UsageError):
        await counter.ask(Total())
    with pytest.raises(StoppedError):
        counter.call(Total())
    with pytest.raises(UsageError):
        _ = counter.system
    async with System() as system:
        await system.start(counter)
        assert await counter.ask(Total()) == 4


@real_loops
async def test_threads_may_tell_but_neither_ask_nor_call(anyio_backend_name: str) -> None:
    async with System() as system:
        counter = Counter()
        await system.start(counter)
        refused: list[UsageError] = []
        done = threading.Event()

        def engine() -> None:
            for _ in range(100):
                counter.tell(Add(1))
            try:
                counter.call(Total())
            except UsageError as error:
                refused.append(error)
            try:
                asyncio.run(counter.ask(Total()))
            except UsageError as error:
                refused.append(error)
            counter.tell(Add(1000))
            done.set()

        thread = threading.Thread(target=engine)
        thread.start()
        with anyio.fail_after(60):
            await anyio.to_thread.run_sync(thread.join)
            assert await counter.ask(Total()) == 1100
        assert done.is_set()
        assert len(refused) == 2


@every_loop
async def test_the_ring_holds_the_last_256_messages(anyio_backend_name: str) -> None:
    async with System() as system:
        counter = Counter()
        await system.start(counter)
        for count in range(300):
            counter.tell(Add(count))
        await counter.ask(Total())
        recent = counter.recent()
        assert len(recent) == 256
        assert recent[0] == Add(45)
        assert recent[-1] == Total()
        replayed = Counter()
        await system.start(Counter("other"))
        for message in recent[:-1]:
            replayed._table[type(message)](replayed, message)
        assert replayed.total == sum(range(45, 300))
