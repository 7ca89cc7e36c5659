"""The one thread of Python that a native device needs: it calls back, asks foreign events, and looks whether the device lives.

It sleeps without the GIL, and without a time limit while there is nothing to look after.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Final

from hicache_actors.cuda_ext.native.ring import Ring
from hicache_actors.cuda_ext.tickets import NativeTicket
from hicache_actors.transfer.completions import POLL_S, call, has_fired, notify

WATCH_S: Final = 1.0
"""How often a device with open work is asked whether it lives."""


class DeviceTeller:
    """Any thread may call.  The thread begins with the first call that needs it, and ends with `close`."""

    def __init__(
        self,
        name: str,
        check: Callable[[], bool],
        on_broken_event: Callable[[BaseException], None],
        watch_s: float = WATCH_S,
    ) -> None:
        """``check``: asked every ``watch_s`` while it answers that work is open; loses the device if it finds it dead.

        ``on_broken_event``: told what a foreign event raised when it was asked.
        """
        self._name, self._check, self._on_broken_event, self._watch_s = name, check, on_broken_event, watch_s
        self._lock = threading.RLock()  # a collection of garbage inside it may forget the device, and so close it
        self._ring: Ring[tuple[NativeTicket, Callable[[], object]]] = Ring()
        self._asked: list[tuple[object, NativeTicket]] = []
        self._thread: threading.Thread | None = None
        self._watching = self._closing = False
        self._told = threading.Event()  # all that had ended before `close`

    def tell(self, ticket: NativeTicket, callback: Callable[[], object]) -> None:
        """Call ``callback`` on the teller's thread once the ticket has ended."""
        self._ring.add(ticket.event, (ticket, callback))
        self._begin()

    def follow(self, event: object, ticket: NativeTicket) -> None:
        """Finish ``ticket`` when the foreign ``event`` has fired: when it calls back, or when it answers so."""
        if notify(event, functools.partial(_finish, ticket)):
            return
        with self._lock:
            self._asked.append((event, ticket))
        self._begin()
        self._ring.poke()

    def watch(self) -> None:
        """Work was submitted: look after the device until ``check`` says that none is open."""
        if not self._watching:
            self._watching = True
            self._begin()
            self._ring.poke()

    def close(self, timeout_s: float) -> bool:
        """Call back what has ended, ask nobody any more, and end -> whether the thread has ended in time.

        It stays, asleep, for callbacks of tickets that nobody has finished yet.
        """
        with self._lock:
            self._closing = True
            self._asked.clear()
            thread = self._thread
        self._ring.poke()
        if thread is None or thread is threading.current_thread():
            return True
        end_s = time.monotonic() + timeout_s
        self._told.wait(timeout_s)
        if not len(self._ring):
            thread.join(max(0.0, end_s - time.monotonic()))
        return not thread.is_alive()

    def _begin(self) -> None:
        if self._thread is None or self._closing:
            with self._lock:
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._main, name=f"hicache-{self._name}-teller", daemon=True)
                    self._thread.start()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        due_s = time.monotonic() + self._watch_s
        while True:
            closing = self._closing
            for _, callback in self._ring.take():
                call(callback)
            if closing:
                self._told.set()
            self._ask()
            if self._watching and time.monotonic() >= due_s:
                # First no, then look: who submits meanwhile says yes again.
                self._watching = False
                if self._check():
                    self._watching = True
                due_s = time.monotonic() + self._watch_s
            with self._lock:
                if self._closing and not len(self._ring) and not self._asked:
                    self._thread = None
                    self._told.set()  # whoever began to close since this turn began
                    return
                limit_s = POLL_S if self._asked else self._watch_s if self._watching else None
            self._ring.wait(limit_s)

    def _ask(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, []
        left = []
        for event, ticket in asked:
            try:
                fired = has_fired(event)
            except Exception as error:
                self._on_broken_event(error)
                fired = True
            if fired:
                ticket.finish()
            else:
                left.append((event, ticket))
        with self._lock:
            if not self._closing:
                self._asked = left + self._asked


def _finish(ticket: NativeTicket) -> None:
    ticket.finish()
