"""A device without threads: streams on the timers of an event loop, for tests in virtual time."""

from __future__ import annotations

import asyncio
from collections import deque

from hicache_actors.cuda_ext.controls import ControlledDevice, CountingStream, Kind
from hicache_actors.cuda_ext.device import Event, Work
from hicache_actors.errors import StoppedError, TransferError, UsageError
from hicache_actors.transfer.completions import POLL_S, Completion, has_fired, notify


class SimTicket(Completion):
    """Ends on the loop, so no thread can wait for it."""

    __slots__ = ()

    def wait(self, timeout_s: float | None = None) -> bool:
        """True if it has ended.  Raises `UsageError` if not: await `fired` instead."""
        if not self.query():
            raise UsageError(
                "a SimDevice works on the loop's timers, which a waiting thread would stop: await fired(ticket)"
            )
        return True


class SimDevice(ControlledDevice["SimStream"]):
    """Each piece of work lasts latency + bytes / bandwidth, and moves its bytes at the end of that time: until then the target
    holds old bytes, and a source that is overwritten too early is copied wrong.

    One loop, one thread: every method is called on the loop's thread.  ``gb_s`` in units of 1e9 bytes a second.
    """

    kind: Kind = "sim"
    implementation = "timers of the loop"

    def __init__(self, name: str = "sim", *, gb_s: float | None = 10.0, latency_s: float = 20e-6) -> None:
        super().__init__(name)
        self.throttle(gb_s, latency_s)

    def close(self, timeout_s: float) -> bool:
        """Does not block: it runs at once what would end within ``timeout_s`` of the loop's time."""
        self.closed = True
        streams = list(self._streams.values())
        left_s = dict.fromkeys(streams, timeout_s)
        moved = True
        while moved:  # a stream may wait for what another one does
            moved = False
            for stream in streams:
                while (took_s := stream.hurry(left_s[stream])) is not None:
                    left_s[stream] -= took_s
                    moved = True
        in_time = [stream.empty for stream in streams]
        for stream in streams:
            stream.drop(StoppedError(f"device {self.name} was closed before this work began"))
        return all(in_time)

    def _make_stream(self, name: str) -> SimStream:
        return SimStream(name, self)


_Item = tuple[SimTicket | None, Work | None, Event | None]
"""(ticket, work to run or None for a record, event to wait for)."""


class SimStream(CountingStream):
    """At most one piece of work has a timer at a time, so order holds however the loop orders its timers."""

    def __init__(self, name: str, device: SimDevice) -> None:
        super().__init__(name)
        self._device = device
        self._queue: deque[_Item] = deque()
        self._running: tuple[SimTicket, Work, BaseException | None] | None = None  # with its planned failure
        self._timer: asyncio.TimerHandle | None = None  # of the running work
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the timer
        self._awaited: Event | None = None
        self._dropped: BaseException | None = None
        self._drops = 0

    @property
    def empty(self) -> bool:
        """Whether everything submitted was run."""
        return not self._queue and self._timer is None and self._awaited is None and not self._drops

    def submit(self, work: Work) -> SimTicket:
        ticket = SimTicket()
        self._put((ticket, work, None))
        return ticket

    def wait_event(self, event: Event) -> None:
        if not has_fired(event):
            self._put((None, None, event))

    def record(self) -> SimTicket:
        ticket = SimTicket()
        self._put((ticket, None, None))
        return ticket

    def drop(self, error: BaseException) -> None:
        self._dropped = self._dropped or error
        tickets = [ticket for ticket, _, _ in self._queue if ticket is not None]
        if self._running is not None:
            tickets.insert(0, self._running[0])
        self._queue.clear()
        self._awaited = None
        self.failed += len(tickets)
        self._drops += len(tickets)
        for ticket in tickets:
            ticket.finish(error)

    def hurry(self, budget_s: float) -> float | None:
        """End the running work, or do the next item, now -> its duration; None if there is none that fits or may pass."""
        if self._timer is not None and self._loop is not None:
            rest_s = max(0.0, self._timer.when() - self._loop.time())
            if rest_s > budget_s:
                return None
            self._timer.cancel()
            self._end()
            return rest_s
        if self._awaited is not None and self._over(self._awaited):
            self._awaited = None
            self._advance()
            return 0.0
        return None

    def _put(self, item: _Item) -> None:
        if self._device.closed:
            raise StoppedError(f"device {self._device.name} is closed")
        error = self._dropped or self._device.lost
        if error is not None:
            if item[0] is not None:
                item[0].finish(error)
            return
        self._queue.append(item)
        self.submitted += item[1] is not None
        self._advance()

    def _gate_changed(self) -> None:
        self._advance()

    def _advance(self) -> None:
        """Begin whatever can begin.  Callbacks of tickets may come back here: each item is taken before it is acted on."""
        while self._queue and self._timer is None and self._awaited is None:
            ticket, work, event = self._queue[0]
            if work is not None and not self.gate.take():
                return
            self._queue.popleft()
            if event is not None:
                self._await_event(event)
            elif work is not None and ticket is not None:
                self._running = ticket, work, self._device.take_fault(self.name)
                duration_s = self._device.duration_s(self.name, work.nbytes)
                self._loop = asyncio.get_running_loop()
                self._timer = self._loop.call_later(duration_s, self._end)
            elif ticket is not None:
                ticket.finish()

    def _end(self) -> None:
        assert self._running is not None
        (ticket, work, error), self._running, self._timer = self._running, None, None
        if error is None:
            try:
                work.run()
            except Exception as raised:
                error = raised
        if not ticket.query():  # else it was dropped, and only its bytes came late
            if error is None:
                self.finished += 1
                self.moved_bytes += work.nbytes
            else:
                self.failed += 1
            ticket.finish(error)
        self._advance()

    def _await_event(self, event: Event) -> None:
        self._awaited = event
        loop = asyncio.get_running_loop()

        def post() -> None:
            loop.call_soon_threadsafe(self._resume, event)

        if not notify(event, post):
            loop.call_later(POLL_S, self._poll, event)

    def _poll(self, event: Event) -> None:
        if self._over(event):
            self._resume(event)
        elif self._awaited is event:
            asyncio.get_running_loop().call_later(POLL_S, self._poll, event)

    def _over(self, event: Event) -> bool:
        try:
            return has_fired(event)
        except Exception as error:
            self._device.lose(TransferError(f"an event that stream {self.name} waits for failed: {error}"))
            return False

    def _resume(self, event: Event) -> None:
        if self._awaited is event:
            self._awaited = None
            self._advance()
