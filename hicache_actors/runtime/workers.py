"""Blocking calls in daemon threads of our own.

The default executor and anyio's worker threads are joined when the loop or the interpreter ends, so one hung read keeps the whole
process from exiting.  Here a call whose caller has left (cancelled, or past its deadline) is *lost*: its thread goes on with it, is
counted, and is replaced, up to a bound.  Nothing here keeps the interpreter alive.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

from hicache_actors.errors import BackendError, StoppedError
from hicache_actors.runtime.observation import WorkersSnapshot

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_LEAVING_S = 1.0


class _Call:
    __slots__ = ("abandoned", "args", "ended", "fn", "future", "started", "thread")

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn = fn
        self.args = args
        self.future: Future[Any] = Future()
        self.started = self.ended = self.abandoned = False
        self.thread: threading.Thread | None = None  # that runs it

    @property
    def name(self) -> str:
        return str(getattr(self.fn, "__qualname__", repr(self.fn)))


class Workers:
    """At most ``size`` calls at once, and at most ``max_lost`` lost ones beside them; threads start on demand.

    ``max_lost`` None is for calls that do end, such as computations: a lost one keeps its place, and others wait for it.

    On a loop with a true attribute ``threadless`` (virtual time) calls run on the loop itself, one per callback.
    """

    def __init__(self, name: str, size: int = 4, *, max_lost: int | None = 4) -> None:
        if size < 1 or (max_lost is not None and max_lost < 0):
            raise ValueError(f"size = {size}, max_lost = {max_lost}: at least 1 and 0")
        self.name = name
        self._size = size
        self._max_lost = max_lost
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._calls: dict[_Call, None] = {}  # queued or running, in order of submission
        self._numbers = 0
        self._lost = 0
        self._closed = False

    def submit(self, fn: Callable[[*Ts], T], *args: *Ts) -> Future[T]:
        """Any thread.  The future ends when ``fn`` has really returned; cancelling it works only while ``fn`` has not begun.

        Raises StoppedError after close, BackendError while more than ``max_lost`` calls are lost.
        """
        return self._submit(fn, args).future

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts, on_end: Callable[[], object] | None = None) -> T:
        """Wait for ``fn(*args)``; raises what it raises, and what `submit` raises.

        A caller that is cancelled leaves at once: a call that has not begun is dropped, one that has is lost until it returns.
        Whatever memory ``fn`` touches must stay valid until then: ``on_end`` is called exactly once, in any thread, when ``fn``
        has returned or will never begin, also if it was refused.
        """
        try:
            call = self._submit(fn, args)
        except Exception:
            if on_end is not None:
                on_end()
            raise
        if on_end is not None:
            call.future.add_done_callback(lambda _: on_end())
        try:
            await _ended(call.future)
        except BaseException:
            if not call.future.cancel():
                self._abandon(call)
            raise
        if call.future.cancelled():  # not by us: we would have left above
            raise StoppedError(f"workers {self.name} were closed before {call.name} began")
        result: T = call.future.result()
        return result

    @property
    def lost(self) -> int:
        return self._lost

    def snapshot(self) -> WorkersSnapshot:
        with self._lock:
            running = sum(call.started for call in self._calls)
            return WorkersSnapshot(self.name, len(self._threads), running, len(self._calls) - running, self._lost)

    def close(self, timeout_s: float = 0.0) -> tuple[str, ...]:
        """Refuse and drop what has not begun, wait up to ``timeout_s`` for the rest; -> names of calls still running.

        Blocks the calling thread; idempotent.  Memory that those calls touch must stay mapped.
        """
        self._shut()
        return self._join(time.monotonic() + timeout_s)

    async def aclose(self, timeout_s: float) -> tuple[str, ...]:
        """`close` without blocking the loop."""
        self._shut()
        with self._lock:
            running = [asyncio.ensure_future(_ended(call.future)) for call in self._calls]
        if running:
            try:
                await asyncio.wait(running, timeout=timeout_s)
            finally:
                for waiting in running:
                    waiting.cancel()
        return self._join(0.0)

    def _submit(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> _Call:
        call = _Call(fn, args)
        loop = _threadless_loop()
        with self._lock:
            if self._closed:
                raise StoppedError(f"workers {self.name} are closed")
            if self._max_lost is not None and self._lost > self._max_lost:
                raise BackendError(f"workers {self.name}: {self._lost} calls hang, {self._max_lost} are allowed")
            self._calls[call] = None
            if loop is None:
                self._queue.put(call)
                self._grow()
        if loop is not None:
            loop.call_soon(self._execute, call)
        return call

    def _grow(self) -> None:
        if len(self._threads) < min(len(self._calls), self._size + min(self._lost, self._max_lost or 0)):
            self._numbers += 1
            thread = threading.Thread(target=self._work, name=f"hicache-{self.name}-{self._numbers}", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            call = self._queue.get()
            if call is None:
                break
            self._execute(call)
            del call  # an idle thread keeps no buffers alive
            with self._lock:
                if len(self._threads) > self._size + self._lost:  # it was lost and has been replaced
                    self._threads.discard(threading.current_thread())  # now, or another one leaves as well
                    return
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _execute(self, call: _Call) -> None:
        with self._lock:
            call.thread = threading.current_thread()
            call.started = call.future.set_running_or_notify_cancel()
            if not call.started:
                del self._calls[call]
                return
        result = error = None
        try:
            result = call.fn(*call.args)
        except BaseException as raised:  # belongs to the caller, whatever it is: it must not wait for ever
            error = raised
        with self._lock:
            call.ended = True
            self._lost -= call.abandoned
            del self._calls[call]
        if error is None:
            call.future.set_result(result)
        else:
            call.future.set_exception(error)

    def _abandon(self, call: _Call) -> None:
        with self._lock:
            if call.ended:
                return
            call.abandoned = True
            self._lost += 1
            if not self._closed:
                self._grow()

    def _shut(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting = [call for call in self._calls if not call.started]
            for _ in self._threads:
                self._queue.put(None)
        for call in waiting:
            call.future.cancel()

    def _join(self, until: float) -> tuple[str, ...]:
        with self._lock:
            busy = {call.thread for call in self._calls if call.started}
            threads = list(self._threads)
        for thread in threads:
            # one that runs no call is on its way out: a join of microseconds, so that a clean close leaves no thread behind
            thread.join(max(0.0, until - time.monotonic()) if thread in busy else _LEAVING_S)
        with self._lock:
            return tuple(call.name for call in self._calls if call.started)


async def _ended(future: Future[Any]) -> None:
    """Wait until ``future`` has ended, without touching its result; cancelling this wait does not touch the call."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def notify(_: Future[Any]) -> None:
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:
            if not loop.is_closed():
                raise
            # the loop is gone, and the waiter with it

    future.add_done_callback(notify)
    await waiter


def _threadless_loop() -> asyncio.AbstractEventLoop | None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop if getattr(loop, "threadless", False) else None
