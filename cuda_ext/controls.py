"""What devices without a GPU share: named streams with counters, and what tests may do to them.

Hold a stream at a gate, slow it, make its work fail, or lose the device: real devices cannot be told to do so on purpose;
`TorchCpuDevice` and `testing.SimDevice` can, in the same words.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

from hicache_actors.cuda_ext.device import Event, Listener, Work
from hicache_actors.errors import StoppedError, UsageError
from hicache_actors.runtime import bind_log
from hicache_actors.transfer.completions import Completion, End
from hicache_actors.transfer.waits import LayerWaits

Kind = Literal["cpu", "cuda", "sim"]


class Gate(ABC):
    """Stands before each piece of work of one stream (not before waits and records).  Open until shut.  Any thread may call.

    Leaving a ``with`` block opens it.
    """

    @property
    @abstractmethod
    def reached(self) -> End:
        """Finished while work stands before the shut gate: wait for it instead of sleeping.  `allow` begins a new one."""

    @abstractmethod
    def shut(self) -> None:
        """Work that has begun goes on, the next waits."""

    @abstractmethod
    def allow(self, works: int = 1) -> None:
        """Let so many pieces of work pass the shut gate.  Raises `UsageError` if it is open."""

    @abstractmethod
    def open(self) -> None: ...

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc: object) -> None:
        self.open()


class AskedGate(Gate):
    """A gate of streams that are run in Python: they ask it."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._on_change = on_change
        self._permits: int | None = None  # None: open
        self._reached = Completion()

    @property
    def reached(self) -> Completion:
        return self._reached

    def shut(self) -> None:
        with self._lock:
            self._permits, self._reached = 0, Completion()

    def allow(self, works: int = 1) -> None:
        with self._lock:
            if self._permits is None:
                raise UsageError("the gate is open")
            self._permits += works
            if self._reached.query():
                self._reached = Completion()
        self._on_change()

    def open(self) -> None:
        with self._lock:
            self._permits = None
        self._on_change()

    def take(self) -> bool:
        """For the device: whether a piece of work that stands here may pass."""
        with self._lock:
            if self._permits is None:
                return True
            if self._permits:
                self._permits -= 1
                return True
            reached = self._reached
        reached.finish()
        return False


class _Fault:
    """Fails ``works`` pieces of work after ``after`` others, of one stream or of any."""

    def __init__(self, error: BaseException, works: int, after: int, stream: str | None) -> None:
        self.error, self.works, self.after, self.stream = error, works, after, stream


class Counts(NamedTuple):
    """Pieces of work of one stream.  ``failed`` counts records that were dropped, too."""

    submitted: int
    finished: int
    failed: int
    moved_bytes: int


class ControlledStream(ABC):
    """A stream of a `ControlledDevice`: what all kinds count and can be told."""

    gate: Gate

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def counts(self) -> Counts:
        """Any thread."""

    @abstractmethod
    def submit(self, work: Work) -> End:
        """Run ``work`` after everything submitted before -> its ticket.  Raises `StoppedError` after close."""

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """What is submitted later runs after ``event`` has fired, well or badly.

        An event that cannot call back is polled; if asking it raises, the device is lost, as with CUDA.
        """

    @abstractmethod
    def record(self) -> End:
        """A ticket for the end of everything submitted so far.  It carries no error: each ticket has its own."""

    def submit_layers(self, works: Sequence[Work], waits: LayerWaits, hold: Callable[[End], None]) -> End:
        """See `Stream`."""
        for layer, work in enumerate(works):
            ticket = self.submit(work)
            hold(ticket)
            waits.follow(layer, ticket)
        return ticket

    def halt(self, error: BaseException) -> None:
        """Begin nothing more, for the device is lost; `drop` follows.  So no stream goes on when another one's work fails."""

    @abstractmethod
    def drop(self, error: BaseException) -> None:
        """Fail everything that has not ended, and whatever is submitted later; work that runs now runs on unseen."""


class CountingStream(ControlledStream):
    """A stream that is run in Python: it counts for itself, and asks its gate."""

    gate: AskedGate

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.gate = AskedGate(self._gate_changed)
        self.submitted = self.finished = self.failed = self.moved_bytes = 0

    def counts(self) -> Counts:
        return Counts(self.submitted, self.finished, self.failed, self.moved_bytes)

    @abstractmethod
    def _gate_changed(self) -> None: ...


S = TypeVar("S", bound=ControlledStream)


class ControlledDevice(ABC, Generic[S]):
    """A device that tests can hold, slow and fail."""

    kind: Kind
    implementation: str = "threads of Python"
    """What runs the streams, and why it is not something better: one line for reports."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self._lock = threading.Lock()
        self._streams: dict[str, S] = {}
        self._lost: BaseException | None = None
        self._faults: list[_Fault] = []
        self._speeds: dict[str | None, tuple[float, float]] = {}

    def stream(self, name: str) -> S:
        """The stream of that name, made on first use.  Raises `StoppedError` after close."""
        with self._lock:
            stream = self._streams.get(name)
            if stream is None:
                if self.closed:
                    raise StoppedError(f"device {self.name} is closed")
                stream = self._streams[name] = self._make_stream(name)
            return stream

    @property
    def lost(self) -> BaseException | None:
        """Why the device is gone, if it is."""
        return self._lost

    def snapshot(self) -> Mapping[str, int | float | str]:
        """Pieces of work by what became of them, over all streams."""
        with self._lock:
            counts = [stream.counts() for stream in self._streams.values()]
        return {
            "device": self.name,
            "kind": self.kind,
            "implementation": self.implementation,
            "streams": len(counts),
            "submitted": sum(each.submitted for each in counts),
            "finished": sum(each.finished for each in counts),
            "failed": sum(each.failed for each in counts),
            "moved_bytes": sum(each.moved_bytes for each in counts),
            "lost": int(self._lost is not None),
        }

    def gate(self, stream: str) -> Gate:
        """Shut the gate of a stream -> the gate."""
        gate = self.stream(stream).gate
        gate.shut()
        return gate

    def lose(self, error: BaseException) -> None:
        """The device is gone: open tickets fail with ``error`` now, later ones at once.  For tests and watchdogs."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
            streams = list(self._streams.values())
        bind_log(part="device").error("device_lost", device=self.name, error=str(error))
        for stream in streams:
            stream.halt(error)
        for stream in streams:
            stream.drop(error)

    def throttle(self, gb_s: float | None = None, latency_s: float = 0.0, *, stream: str | None = None) -> None:
        """Let each piece of work last ``latency_s`` + its bytes at ``gb_s`` (units of 1e9 bytes a second; None: no limit).

        ``stream``: only that one; else all that have no speed of their own.  Work that has begun keeps its speed.
        """
        with self._lock:
            self._speeds[stream] = (latency_s, 0.0 if gb_s is None else 1 / (gb_s * 1e9))

    def fail_next(self, error: BaseException, *, works: int = 1, after: int = 0, stream: str | None = None) -> None:
        """Let ``works`` pieces of work fail with ``error`` instead of being run, once ``after`` others have been run."""
        with self._lock:
            self._faults.append(_Fault(error, works, after, stream))

    def listen(self) -> Listener | None:
        """See `Device`."""
        return None

    def register(self, address: int, nbytes: int, *, step_bytes: int) -> None:
        """See `Device`."""

    def make_end(self) -> End:
        """See `Device`."""
        return Completion()

    def duration_s(self, stream: str, nbytes: int) -> float:
        """For the device: how long a piece of work shall last at least."""
        with self._lock:
            latency_s, byte_s = self._speeds.get(stream) or self._speeds.get(None, (0.0, 0.0))
        return latency_s + nbytes * byte_s

    def take_fault(self, stream: str) -> BaseException | None:
        """For the device: the error with which the work that begins now shall fail."""
        with self._lock:
            error: BaseException | None = None
            for fault in self._faults:
                if fault.stream not in (None, stream):
                    continue
                if fault.after:
                    fault.after -= 1
                elif error is None:
                    fault.works -= 1
                    error = fault.error
            self._faults = [fault for fault in self._faults if fault.works]
            return error

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Refuse new work and wait for what was submitted -> True if all of it was run in time.

        If not, what has not begun is dropped (its tickets fail with `StoppedError`), and what has begun may still end later:
        its memory must stay mapped.  Idempotent.
        """

    @abstractmethod
    def _make_stream(self, name: str) -> S: ...
