"""The CPU device whose streams are native threads: copies, waits, layers and their ends need no GIL and no thread of Python.

A copy that can be said as loops over addresses is run by native code; any other piece of work is called in a thread of Python
that belongs to its stream, in its turn.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from hicache_actors.cuda_ext.controls import ControlledDevice, ControlledStream, Counts, Gate, Kind
from hicache_actors.cuda_ext.device import Event, Work
from hicache_actors.cuda_ext.loop_ring import LoopRing
from hicache_actors.cuda_ext.native.copies import ENGINES, plans
from hicache_actors.cuda_ext.native.events import ERRORS
from hicache_actors.cuda_ext.native.library import loaded
from hicache_actors.cuda_ext.native.streams import CALL, EXTERNAL, RECORD, WAIT, Faults, RawStream
from hicache_actors.cuda_ext.native.structs import CallCopies, Op, Plan
from hicache_actors.cuda_ext.teller import DeviceTeller
from hicache_actors.cuda_ext.tickets import NativeTicket
from hicache_actors.errors import HiCacheError, StoppedError, TransferError, UsageError
from hicache_actors.runtime import bind_log
from hicache_actors.transfer.affine import AffineCopy
from hicache_actors.transfer.completions import End, has_fired
from hicache_actors.transfer.engines import CPU, Engines
from hicache_actors.transfer.plan import CopyWork
from hicache_actors.transfer.waits import LayerWaits

EXIT_S: Final = 5.0

REAP_AT: Final = 64
"""Submissions after which a stream looks which of them have ended; the teller looks every second as well."""

_LATE: Final[list[tuple[RawStream, deque[tuple[int, object]]]]] = []
"""Streams that still ran something when their device was forgotten, with what that touches."""


class NativeCpuDevice(ControlledDevice["NativeStream"]):
    """KV tensors on the CPU.  Every method may be called from any thread; only `close` blocks.

    A piece of work that fails fails its own ticket; the stream goes on with the next.  A stream that has died is found by a
    watchdog, and the device is lost then: everything open fails.
    """

    kind: Kind = "cpu"
    implementation = "native threads"

    def __init__(self, name: str = "cpu", *, copy_threads: int = 1, watch_s: float = 1.0) -> None:
        """``copy_threads``: that share a copy.  ``watch_s``: how often a device with open work is looked after.

        Raises `RuntimeError` where the native library is not in use.
        """
        super().__init__(name)
        self.copy_threads, self.watch_s = copy_threads, watch_s
        self.engines = Engines()  #: for streams that are made later
        self.faults = Faults()
        device = weakref.ref(self)
        self.teller = DeviceTeller(
            name, functools.partial(_look_after, device), functools.partial(_lose, device), watch_s
        )
        weakref.finalize(self, self.teller.close, 0.0)
        self.copy_function = loaded().address("hic_call_copies")

    def explain(self, copy: AffineCopy) -> str:
        return self.engines.explain(copy, CPU)

    def listen(self) -> LoopRing | None:
        try:
            return LoopRing.open()
        except OSError as error:  # no descriptor left: the teller wakes coroutines then
            bind_log(part="device").warning("loop_ring_not_opened", device=self.name, error=str(error))
            return None

    def make_end(self) -> NativeTicket:
        return NativeTicket(self.teller)

    def throttle(self, gb_s: float | None = None, latency_s: float = 0.0, *, stream: str | None = None) -> None:
        super().throttle(gb_s, latency_s, stream=stream)
        with self._lock:
            streams = list(self._streams.values())
        for each in streams:
            self._set_speed(each)

    def fail_next(self, error: BaseException, *, works: int = 1, after: int = 0, stream: str | None = None) -> None:
        number = None if stream is None else self.stream(stream).number
        self.faults.add(ERRORS.code(error), works, after, number)

    def break_stream(self, stream: str, error: BaseException) -> None:
        """As when a GPU's context dies: the stream does nothing and tells nothing any more, until the watchdog finds it."""
        self.stream(stream).raw.break_off(ERRORS.code(error))

    def look_after(self) -> bool:
        """For the teller: whether work is open.  Loses the device if a stream has died."""
        with self._lock:
            counts = [(stream, stream.raw.counts()) for stream in self._streams.values()]
        for stream, count in counts:
            if count.broken and self._lost is None:
                error = ERRORS.error(count.broken)
                self.lose(TransferError(f"stream {stream.name} has died: {error}"))
        open_work = [stream.reap() for stream, _ in counts]
        return any(open_work)

    def close(self, timeout_s: float) -> bool:
        """Blocks: never call it on a loop's thread or in a callback.  What did not end in time goes on in its thread."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            self.closed = True
            streams = list(self._streams.values())
        for stream in streams:
            stream.raw.finish()
        in_time = [stream.join(end_s) for stream in streams]
        for stream in streams:
            stream.drop(StoppedError(f"device {self.name} was closed before this work began"))
            stream.reap()
        self.teller.close(end_s - time.monotonic())
        return all(in_time) and not any(stream.raw.counts().dropped for stream in streams)

    def _make_stream(self, name: str) -> NativeStream:
        stream = NativeStream(name, len(self._streams), self)
        self._set_speed(stream)
        if self._lost is not None:
            stream.drop(self._lost)
        return stream

    def _set_speed(self, stream: NativeStream) -> None:
        latency_s, byte_s = self._speeds.get(stream.name) or self._speeds.get(None, (0.0, 0.0))
        stream.raw.speed(latency_s, byte_s)


class NativeStream(ControlledStream):
    """One native thread, started by the first submission."""

    def __init__(self, name: str, number: int, device: NativeCpuDevice) -> None:
        super().__init__(name)
        self.number = number
        self.raw = RawStream(f"hic-{name}", number, device.faults)
        self.gate = NativeGate(self.raw, device.teller)
        self._device_name, self._teller = device.name, device.teller
        self._copy_function, self._copy_threads = device.copy_function, device.copy_threads
        self._engines = device.engines
        self._lock = threading.Lock()
        # What native code may still touch, by the number of its last op.
        self._live: deque[tuple[int, object]] = deque()
        self._external: dict[int, Work] = {}
        self._numbers = 0
        self._runner: threading.Thread | None = None
        weakref.finalize(self, _forget, self.raw, self._live)

    def submit(self, work: Work) -> NativeTicket:
        ticket = NativeTicket(self._teller, why=self.raw.error)
        self._submit([work], [None], ticket)
        return ticket

    def submit_layers(self, works: Sequence[Work], waits: LayerWaits, hold: Callable[[End], None]) -> NativeTicket:
        """One call, one ticket.  Layers end by themselves where ``waits`` were made of this device's ends."""
        ends = [waits.end(layer) for layer in range(len(works))]
        own = [end for end in ends if isinstance(end, NativeTicket)]
        tickets = own if len(own) == len(ends) else [NativeTicket(self._teller, why=self.raw.error) for _ in works]
        whole = NativeTicket(self._teller, why=self.raw.error)
        self._submit(works, tickets, whole)
        hold(whole)
        if tickets is not own:
            for layer, ticket in enumerate(tickets):
                waits.follow(layer, ticket)
        return whole

    def wait_event(self, event: Event) -> None:
        if has_fired(event):
            return
        if isinstance(event, NativeTicket):
            self._put([_waiting(event)], keeps=event)
            return
        bridge = NativeTicket(self._teller)
        self._put([_waiting(bridge)], keeps=bridge)
        self._teller.follow(event, bridge)

    def record(self) -> NativeTicket:
        ticket = NativeTicket(self._teller)
        address, generation = ticket.event
        self._put([Op(kind=RECORD, event=address, generation=generation)], keeps=None)
        return ticket

    def counts(self) -> Counts:
        counts = self.raw.counts()
        return Counts(counts.submitted, counts.finished, counts.failed, counts.moved_bytes)

    def halt(self, error: BaseException) -> None:
        self.raw.break_off(ERRORS.code(error))

    def drop(self, error: BaseException) -> None:
        self.raw.drop(ERRORS.code(error))

    def join(self, end_s: float) -> bool:
        """Wait for both its threads, until the monotonic clock says ``end_s`` -> whether everything submitted was done."""
        ended = self.raw.join(end_s - time.monotonic())
        runner = self._runner
        if ended and runner is not None and runner is not threading.current_thread():
            runner.join(max(0.0, end_s - time.monotonic()))
        return ended

    def reap(self) -> bool:
        """Let go of what native code is done with -> whether anything is open."""
        passed = self.raw.counts().passed
        with self._lock:
            while self._live and self._live[0][0] <= passed:
                self._live.popleft()
            return bool(self._live)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _submit(self, works: Sequence[Work], ends: Sequence[NativeTicket | None], whole: NativeTicket) -> None:
        ops, keeps = [], []
        for work, end in zip(works, ends, strict=True):
            op, kept = self._op(work)
            if end is not None:
                op.event, op.generation = end.event
            ops.append(op)
            keeps.append(kept)
        self._put(ops, (keeps, ends), whole)

    def _put(self, ops: list[Op], keeps: object, whole: NativeTicket | None = None) -> None:
        if len(self._live) >= REAP_AT:
            self.reap()
        with self._lock:
            number = self.raw.submit(ops, None if whole is None else whole.event)
            self._live.append((number, keeps))
        self._teller.watch()

    def _op(self, work: Work) -> tuple[Op, object]:
        """-> what the native stream is told, and what must live until it has been done."""
        if isinstance(work, CopyWork):
            try:
                copy = work.affine()
            except HiCacheError:  # closed memory, or more than a plan can say: `run` does it, or fails in its turn
                return self._external_op(work)
            each = plans(copy)
            array = (Plan * len(each))(*each)
            engine = ENGINES[self._engines.choose(copy, CPU)]
            call = CallCopies(ctypes.addressof(array), len(each), self._copy_threads, engine, copy.to_host)
            op = Op(kind=CALL, bytes=work.nbytes, call=self._copy_function, argument=ctypes.addressof(call))
            return op, (copy, array, call)
        return self._external_op(work)

    def _external_op(self, work: Work) -> tuple[Op, object]:
        with self._lock:
            self._numbers += 1
            number = self._numbers
            self._external[number] = work
            if self._runner is None:
                self._runner = threading.Thread(
                    target=_do_external_work,
                    args=(self.raw, self._external),
                    name=f"hicache-{self._device_name}-{self.name}",
                    daemon=True,
                )
                self._runner.start()
        return Op(kind=EXTERNAL, bytes=work.nbytes, argument=number), work


class NativeGate(Gate):
    """The stream itself stands before it."""

    def __init__(self, raw: RawStream, teller: DeviceTeller) -> None:
        self._raw, self._teller = raw, teller
        self._lock = threading.Lock()
        self._reached = NativeTicket(teller)

    @property
    def reached(self) -> NativeTicket:
        return self._reached

    def shut(self) -> None:
        with self._lock:
            self._reached = NativeTicket(self._teller)
            self._raw.shut_gate(self._reached.event)

    def allow(self, works: int = 1) -> None:
        with self._lock:
            fresh = NativeTicket(self._teller)
            took_over = self._raw.allow(works, fresh.event)
            if took_over is None:
                raise UsageError("the gate is open")
            if took_over:
                self._reached = fresh

    def open(self) -> None:
        self._raw.open_gate()


def _waiting(ticket: NativeTicket) -> Op:
    address, generation = ticket.event
    return Op(kind=WAIT, event=address, generation=generation)


def _do_external_work(raw: RawStream, works: dict[int, Work]) -> None:
    """The thread of one stream for work that only Python can do."""
    while (number := raw.next_external()) is not None:
        code = 0
        try:
            works.pop(number).run()
        except BaseException as error:
            code = ERRORS.code(error)
        raw.end_external(code)


def _look_after(device: weakref.ref[NativeCpuDevice]) -> bool:
    here = device()
    return here is not None and here.look_after()


def _lose(device: weakref.ref[NativeCpuDevice], error: BaseException) -> None:
    here = device()
    if here is not None:
        here.lose(TransferError(f"an event that a stream waits for failed: {error}"))


def _forget(raw: RawStream, live: deque[tuple[int, object]]) -> None:
    """A stream is gone: its thread shall end, and what it still touches lives until then."""
    raw.finish()
    raw.drop(ERRORS.code(StoppedError("the device is gone")))
    if not raw.join(0.0):
        _LATE.append((raw, live))


@atexit.register
def _wait_for_late_work() -> None:
    """Memory is taken apart soon: native code that still copies shall have the time to end."""
    end_s = time.monotonic() + EXIT_S
    for raw, _ in _LATE:
        if raw.counts().calling:  # threads of Python stop by themselves
            raw.join(end_s - time.monotonic())
