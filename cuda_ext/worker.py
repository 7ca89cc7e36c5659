"""Streams that are threads: each one takes its items in order, off the event loop, and calls nobody's code but the work's.

`TorchCpuDevice` does the work in that thread; CUDA devices only submit it there, and tickets end when the GPU says so.  So the
loop never waits for a driver, and tests hold, slow, fail and lose every one of these devices in the same words.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from typing import Any, TypeVar

from hicache_actors.cuda_ext.controls import ControlledDevice, CountingStream
from hicache_actors.cuda_ext.device import Event, Work
from hicache_actors.errors import StoppedError, TransferError
from hicache_actors.transfer.completions import POLL_S, Completion, End, has_fired, notify

W = TypeVar("W", bound="WorkerStream")


class WorkerDevice(ControlledDevice[W]):
    """Every method may be called from any thread; only `close` blocks.

    A piece of work that raises fails its own ticket; the stream goes on with the next.
    """

    def close(self, timeout_s: float) -> bool:
        """Blocks: never call it on a loop's thread or in a callback.  Work that did not end in time stays in its daemon thread."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            self.closed = True
            streams = list(self._streams.values())
        for stream in streams:
            stream.finish()
        in_time = [stream.join(max(0.0, end_s - time.monotonic())) for stream in streams]
        for stream in streams:
            stream.drop(StoppedError(f"device {self.name} was closed before this work began"))
        return all(in_time)


_Item = tuple[End | None, Work | None, Event | None]
"""(ticket, work to run or None for a record, event to wait for)."""


class WorkerStream(CountingStream):
    """One worker thread, started by the first item; `submit`, `wait_event` and `record` never block."""

    def __init__(self, name: str, device: WorkerDevice[Any]) -> None:
        super().__init__(name)
        self._device = device
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[_Item] = deque()
        self._open: dict[End, Work | None] = {}  # taken from the queue, not ended
        self._stopping = False
        self._dropped: BaseException | None = None
        self._drops = 0
        self._wakes = 0  # so that a gate opened between asking and waiting is not missed
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> End:
        ticket = self._make_ticket()
        self._put((ticket, work, None))
        return ticket

    def wait_event(self, event: Event) -> None:
        if not has_fired(event):
            self._put((None, None, event))

    def record(self) -> End:
        ticket = self._make_ticket()
        self._put((ticket, None, None))
        return ticket

    def drop(self, error: BaseException) -> None:
        with self._changed:
            self._dropped = self._dropped or error
            queued = [ticket for ticket, _, _ in self._queue if ticket is not None]
            tickets = [*self._open, *queued]
            self._queue.clear()
            self._open.clear()
            self.failed += len(tickets)
            self._drops += len(tickets)
            self._changed.notify_all()
        for ticket in tickets:
            ticket.finish(error)

    def finish(self) -> None:
        """Let the thread end once its queue is empty."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread and for what it has begun -> whether everything submitted was run."""
        end_s = time.monotonic() + timeout_s
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return False
        with self._changed:
            while self._open:
                rest_s = end_s - time.monotonic()
                if rest_s <= 0:
                    return False
                self._changed.wait(rest_s)
        return not self._drops

    # -- what a kind of device adds: all on the worker thread ------------------------------------------------------------

    def _make_ticket(self) -> End:
        """Any thread."""
        return Completion()

    @abstractmethod
    def _run(self, work: Work, ticket: End) -> None:
        """Do the work, or submit it; `_end` the ticket then, or later from any thread.  What is raised fails the ticket."""

    @abstractmethod
    def _record(self, ticket: End) -> None:
        """`_end` the ticket when all that was begun before has ended."""

    def _order_after(self, event: Event) -> bool:
        """Whether what is submitted from now on runs after ``event`` without this thread having to wait for it.

        What is raised loses the device, here and when an event is asked.
        """
        return False

    def _end(self, ticket: End, error: BaseException | None = None) -> None:
        """Any thread.  A ticket that was dropped has failed already, and stays as it is."""
        with self._changed:
            if ticket not in self._open:
                return
            work = self._open.pop(ticket)
            if error is not None:
                self.failed += 1
            elif work is not None:
                self.finished += 1
                self.moved_bytes += work.nbytes
            self._changed.notify_all()
        ticket.finish(error)

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _put(self, item: _Item) -> None:
        lost = self._device.lost  # not under the lock: to see a loss first is to drop everything
        with self._changed:
            if self._stopping:
                raise StoppedError(f"device {self._device.name} is closed")
            error = self._dropped or lost
            if error is None:
                self._queue.append(item)
                self.submitted += item[1] is not None
                if self._thread is None:
                    name = f"hicache-{self._device.name}-{self.name}"
                    self._thread = threading.Thread(target=self._main, name=name, daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if error is not None and item[0] is not None:
            item[0].finish(error)

    def _gate_changed(self) -> None:
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def _main(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopping:
                    self._changed.wait()
                if not self._queue:
                    return
                ticket, work, event = self._queue.popleft()
                if ticket is not None:
                    self._open[ticket] = work
            if event is not None:
                self._wait_for(event)
            elif ticket is not None and (work is None or self._pass_gate()):
                self._take(work, ticket)

    def _wait_for(self, event: Event) -> None:
        try:
            if not self._order_after(event):
                self._await_event(event)
        except Exception as error:
            self._device.lose(TransferError(f"an event that stream {self.name} waits for failed: {error}"))

    def _take(self, work: Work | None, ticket: End) -> None:
        try:
            if work is None:
                self._record(ticket)
            elif (planned := self._device.take_fault(self.name)) is not None:
                self._end(ticket, planned)
            else:
                self._run(work, ticket)
        except BaseException as raised:
            self._end(ticket, raised)

    def _pass_gate(self) -> bool:
        """-> False if the stream was dropped meanwhile (the ticket has failed then)."""
        while True:
            with self._changed:
                seen = self._wakes
                if self._dropped:
                    return False
            if self.gate.take():  # outside the lock: its callbacks may open the gate
                return True
            with self._changed:
                if self._wakes == seen and not self._dropped:
                    self._changed.wait()

    def _await_event(self, event: Event) -> None:
        waiting = [True]

        def over() -> None:
            with self._changed:
                waiting.clear()
                self._changed.notify_all()

        poll_s = None if notify(event, over) else POLL_S
        while not has_fired(event):
            with self._changed:
                if self._dropped:
                    return
                if waiting:
                    self._changed.wait(poll_s)
