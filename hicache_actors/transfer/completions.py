"""Completions: something has finished.  Set from any thread, seen by threads, callbacks and coroutines.

An engine event may be an `End` (every `Ticket` is one), a `threading.Event`, a `concurrent.futures.Future`, or anything
with ``query() -> bool``, such as ``torch.cuda.Event``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Final, Protocol, runtime_checkable

from hicache_actors.errors import TransferError, UsageError
from hicache_actors.runtime import bind_log

POLL_S: Final = 0.001
"""How often an event is asked that can do no more.  Never below 1 ms: asyncio rounds shorter sleeps up, uvloop down to a spin."""


@runtime_checkable
class Notifying(Protocol):
    """An event that calls back: at once, on the caller's thread, if it has fired already."""

    def add_callback(self, callback: Callable[[], None]) -> None: ...


@runtime_checkable
class Ending(Notifying, Protocol):
    """The end of submitted work: a `Ticket`."""

    @property
    def error(self) -> BaseException | None: ...


@runtime_checkable
class Queryable(Protocol):
    def query(self) -> bool: ...


class End(ABC):
    """Finished once, with or without an error.  Every method may be called from any thread.

    `Completion` is one in Python; devices with streams of their own bring another, for which no thread of Python is woken.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """Why it failed; None before the end and after success."""

    @abstractmethod
    def query(self) -> bool:
        """Whether it has finished, well or badly."""

    @abstractmethod
    def finish(self, error: BaseException | None = None) -> bool:
        """End it, and have the callbacks called -> whether this call did.  Later calls change nothing."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Block this thread until the end -> False on timeout.  Never on an event loop's thread."""

    @abstractmethod
    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once at the end, in the order in which they were added: on the thread that finishes it or tells of
        it, or at once on this one if it has come already.

        It must be short and must not block.  What it raises is logged: it must not stop the thread that calls.
        """

    def resolve(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        """Resolve ``future`` at the end, unless it is done by then.  Called on the thread of ``loop``."""
        self.add_callback(lambda: _post(loop, future))


class Completion(End):
    """An end in Python: whoever finishes it wakes those who wait."""

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_waiter")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._waiter: threading.Event | None = None

    @property
    def error(self) -> BaseException | None:
        return self._error

    def query(self) -> bool:
        return self._done

    def finish(self, error: BaseException | None = None) -> bool:
        """End it and call the callbacks on this thread -> whether this call did.  Later calls change nothing."""
        with self._lock:
            if self._done:
                return False
            self._error, self._done = error, True
            callbacks, self._callbacks = self._callbacks, []
            if self._waiter is not None:
                self._waiter.set()
        for callback in callbacks:
            call(callback)
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        if self._done:
            return True
        with self._lock:
            if self._done:
                return True
            if self._waiter is None:
                self._waiter = threading.Event()
            waiter = self._waiter
        return waiter.wait(timeout_s)

    def add_callback(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        call(callback)


def call(callback: Callable[[], object]) -> None:
    """Call the callback of an end; what it raises is logged."""
    try:
        callback()
    except Exception:
        bind_log(part="device").exception("completion_callback_failed", callback=repr(callback))


def check_event(event: object) -> None:
    """Raises `UsageError` for what is no event.  Does not ask it."""
    if isinstance(event, End):  # nearly all are; to ask whether a class has a protocol's methods takes 10 us
        return
    if not isinstance(event, Queryable | threading.Event | concurrent.futures.Future):
        raise UsageError(
            f"{event!r} is no event: needs query() -> bool (torch.cuda.Event, a Ticket), threading.Event or "
            "concurrent.futures.Future"
        )


def has_fired(event: object) -> bool:
    """Ask once.  Raises `UsageError` for what is no event, and whatever the event's own ``query`` raises."""
    if isinstance(event, End):
        return event.query()
    check_event(event)
    if isinstance(event, Queryable):
        return event.query()
    if isinstance(event, threading.Event):
        return event.is_set()
    assert isinstance(event, concurrent.futures.Future)
    return event.done()


def notify(event: object, callback: Callable[[], None]) -> bool:
    """Have ``callback`` called once when ``event`` has fired -> False if it cannot call back and must be polled.

    The callback runs on whichever thread finishes the event, or at once on this one.
    """
    if isinstance(event, End | Notifying):
        event.add_callback(callback)
    elif isinstance(event, concurrent.futures.Future):
        event.add_done_callback(lambda _: callback())
    else:
        return False
    return True


def end_of(event: Notifying) -> asyncio.Future[None]:
    """A future of the running loop, resolved at the end, well or badly.  Cancelling it touches nothing else."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    if isinstance(event, End):
        event.resolve(loop, future)
    else:
        event.add_callback(lambda: _post(loop, future))
    return future


async def fired(event: object) -> BaseException | None:
    """Wait on the loop until ``event`` has fired -> the error of a ticket or future that failed, else None.

    Cancelling the wait touches neither the event nor the work behind it, nor anybody else who waits.  Events that cannot call
    back are polled every millisecond.  Raises `UsageError` for what is no event, `TransferError` if asking it fails.
    """
    if isinstance(event, End):
        if not event.query():
            await end_of(event)
        return event.error
    if not _ask(event):
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if notify(event, lambda: _post(loop, future)):
            await future
        else:
            while not _ask(event):  # noqa: ASYNC110  a foreign event has nothing else to offer
                await asyncio.sleep(POLL_S)
    if isinstance(event, concurrent.futures.Future):
        return TransferError(f"{event!r} was cancelled") if event.cancelled() else event.exception()
    return event.error if isinstance(event, Ending) else None


async def all_fired(events: Iterable[object]) -> BaseException | None:
    """`fired`, one after the other -> the first error that one of them ended with."""
    first: BaseException | None = None
    for event in events:
        error = await fired(event)
        first = first or error
    return first


def _ask(event: object) -> bool:
    try:
        return has_fired(event)
    except UsageError:
        raise
    except Exception as error:
        raise TransferError(f"asking {event!r} failed: {error}") from error


def _post(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(_resolve, future)
    except RuntimeError:
        # The loop was closed while the work ran on: nobody is left to be told.
        if not loop.is_closed():
            raise


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
