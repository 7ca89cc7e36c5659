"""Tickets of native devices: ends that native threads finish, wait for and tell of without waking a thread of Python."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from hicache_actors.cuda_ext.loop_ring import ring_of
from hicache_actors.cuda_ext.native.events import ERRORS, Event, events
from hicache_actors.errors import TransferError
from hicache_actors.transfer.completions import End, call


class Teller(Protocol):
    """A thread of Python that calls back."""

    def tell(self, ticket: NativeTicket, callback: Callable[[], object]) -> None:
        """Call ``callback`` once the ticket has ended."""


SIGNALS_S: Final = 0.25
"""How long a signal (Ctrl-C) waits for a main thread that waits for native work."""

_MAKING: Final = threading.Lock()


class _Callbacks:
    """Each is called once, in order.  Who comes while another thread calls them waits until it has done so."""

    __slots__ = ("_lock", "_waiting")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a callback may ask the ticket
        self._waiting: list[Callable[[], object]] = []

    def add(self, callback: Callable[[], object]) -> None:
        with self._lock:
            self._waiting.append(callback)

    def call(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                call(callback)


class NativeTicket(End):
    """One generation of a native event.

    On a loop that has a `LoopRing`, a coroutine that waits is woken by it; elsewhere, and for callbacks, by the device's teller.
    """

    __slots__ = ("__weakref__", "_callbacks", "_done", "_error", "_events", "_teller", "_why", "event")

    def __init__(self, teller: Teller, why: Callable[[], str] | None = None) -> None:
        """``why``: says in words why the last native call failed."""
        self._events = events()
        self.event: Event = self._events.take()
        self._teller, self._why = teller, why
        self._done = False
        self._callbacks: _Callbacks | None = None
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        return self._error if self.query() else None

    def query(self) -> bool:
        if not self._done and self._events.query(*self.event):
            code = self._events.code(self.event[0])
            if code > 0:
                self._error = ERRORS.error(code)
            elif code < 0:
                self._error = TransferError("native work failed" if self._why is None else self._why())
            self._why = None
            self._done = True
        if self._done and self._callbacks is not None:
            self._callbacks.call()
        return self._done

    def finish(self, error: BaseException | None = None) -> bool:
        """For ends that no stream ends, or that shall end before: the stream's own end then changes nothing."""
        ended: int = self._events.finish(*self.event, 0 if error is None else ERRORS.code(error))
        return ended == 1

    def wait(self, timeout_s: float | None = None) -> bool:
        """The GIL is let go, and no thread of Python has to run for it to return."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._done:
            rest_s = math.inf if end_s is None else end_s - time.monotonic()
            if self._events.wait(*self.event, int(max(0.0, min(rest_s, SIGNALS_S)) * 1e9)) or rest_s <= SIGNALS_S:
                break
        return self.query()

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Called by whoever sees the end first: the teller, or a thread that asks or waits.  So who has seen it may rely on the
        callbacks, and they come too while a loop stands still.
        """
        with _MAKING:
            first = self._callbacks is None
            self._callbacks = callbacks = self._callbacks or _Callbacks()
        callbacks.add(callback)
        if not self.query() and first:
            self._teller.tell(self, self.query)

    def resolve(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        ring = ring_of(loop)
        if ring is None:
            super().resolve(loop, future)
        else:
            ring.watch(self.event, future)

    def __del__(self) -> None:
        if hasattr(self, "event"):
            self._events.give_back(self.event)  # where a stream still waits for it, it is not used again
