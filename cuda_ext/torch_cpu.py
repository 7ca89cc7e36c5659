"""A device made of threads: each stream is one worker that runs work in order, truly beside the event loop.

Copies let the GIL go, so the loop and a forward pass go on.  The thread settings of torch are never touched: they are
process-wide, and a copy thread that changed them would change the results of later forward passes.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from hicache_actors.cuda_ext.controls import ControlledDevice, ControlledStream, Kind
from hicache_actors.cuda_ext.device import Event, Work
from hicache_actors.errors import StoppedError, TransferError
from hicache_actors.transfer.completions import POLL_S, Completion, has_fired, notify


class TorchCpuDevice(ControlledDevice["CpuStream"]):
    """KV tensors on the CPU.  Every method may be called from any thread; only `close` blocks.

    A piece of work that raises fails its own ticket; the stream goes on with the next.
    """

    kind: Kind = "cpu"

    def __init__(self, name: str = "cpu") -> None:
        super().__init__(name)

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

    def _make_stream(self, name: str) -> CpuStream:
        return CpuStream(name, self)


_Item = tuple[Completion | None, Work | None, Event | None]
"""(ticket, work to run or None for a record, event to wait for)."""


class CpuStream(ControlledStream):
    """One worker thread, started by the first work; `submit`, `wait_event` and `record` never block."""

    def __init__(self, name: str, device: TorchCpuDevice) -> None:
        super().__init__(name)
        self._device = device
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[_Item] = deque()
        self._running: Completion | None = None
        self._stopping = False
        self._dropped: BaseException | None = None
        self._drops = 0
        self._wakes = 0  # so that a gate opened between asking and waiting is not missed
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> Completion:
        ticket = Completion()
        self._put((ticket, work, None))
        return ticket

    def wait_event(self, event: Event) -> None:
        if not has_fired(event):
            self._put((None, None, event))

    def record(self) -> Completion:
        ticket = Completion()
        self._put((ticket, None, None))
        return ticket

    def drop(self, error: BaseException) -> None:
        with self._changed:
            self._dropped = self._dropped or error
            tickets = [self._running, *(ticket for ticket, _, _ in self._queue)]
            open_tickets = [ticket for ticket in tickets if ticket is not None]
            self._queue.clear()
            self._running = None
            self.failed += len(open_tickets)
            self._drops += len(open_tickets)
            self._changed.notify_all()
        for ticket in open_tickets:
            ticket.finish(error)

    def finish(self) -> None:
        """Let the thread end once its queue is empty."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread -> whether everything submitted was run."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return False
        return not self._drops

    def _put(self, item: _Item) -> None:
        with self._changed:
            if self._stopping:
                raise StoppedError(f"device {self._device.name} is closed")
            error = self._dropped or self._device.lost
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

    # -- the worker thread ---------------------------------------------------------------------------------------------

    def _main(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopping:
                    self._changed.wait()
                if not self._queue:
                    return
                ticket, work, event = self._queue.popleft()
                self._running = ticket
            if event is not None:
                self._await_event(event)
            elif work is None:
                self._end(ticket)
            elif self._pass_gate():
                self._run(work, ticket)

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

    def _run(self, work: Work, ticket: Completion | None) -> None:
        error = self._device.take_fault(self.name)
        started_s = time.monotonic()
        if error is None:
            try:
                work.run()
            except BaseException as raised:
                error = raised
            rest_s = started_s + self._device.duration_s(self.name, work.nbytes) - time.monotonic()
            if rest_s > 0:
                time.sleep(rest_s)
        self._end(ticket, work, error)

    def _end(self, ticket: Completion | None, work: Work | None = None, error: BaseException | None = None) -> None:
        with self._changed:
            if self._running is None:
                return  # dropped: the ticket has failed already
            self._running = None
            if error is not None:
                self.failed += 1
            elif work is not None:
                self.finished += 1
                self.moved_bytes += work.nbytes
        assert ticket is not None
        ticket.finish(error)

    def _await_event(self, event: Event) -> None:
        waiting = [True]

        def over() -> None:
            with self._changed:
                waiting.clear()
                self._changed.notify_all()

        poll_s = None if notify(event, over) else POLL_S
        try:
            while not has_fired(event):
                with self._changed:
                    if self._dropped:
                        return
                    if waiting:
                        self._changed.wait(poll_s)
        except Exception as error:
            self._device.lose(TransferError(f"an event that stream {self.name} waits for failed: {error}"))
