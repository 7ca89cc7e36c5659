"""What tests may do to a device: hold its streams at a gate, slow them, make their work fail, or lose the device.

Real devices cannot be told to do so on purpose; `TorchCpuDevice` and `testing.SimDevice` can, in the same words.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hicache_actors.errors import UsageError
from hicache_actors.transfer.completions import Completion


class Gate:
    """Stands before each piece of work of one stream (not before waits and records).  Open until shut.  Any thread may call.

    Leaving a ``with`` block opens it.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._on_change = on_change
        self._permits: int | None = None  # None: open
        self._reached = Completion()

    @property
    def reached(self) -> Completion:
        """Finished while work stands before the shut gate: wait for it instead of sleeping.  `allow` begins a new one."""
        return self._reached

    def shut(self) -> None:
        """Work that has begun goes on, the next waits."""
        with self._lock:
            self._permits, self._reached = 0, Completion()

    def allow(self, works: int = 1) -> None:
        """Let so many pieces of work pass the shut gate."""
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

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc: object) -> None:
        self.open()


class _Fault:
    """Fails ``works`` pieces of work after ``after`` others, of one stream or of any."""

    def __init__(self, error: BaseException, works: int, after: int, stream: str | None) -> None:
        self.error, self.works, self.after, self.stream = error, works, after, stream


class Controls:
    """Slow-downs and planned failures of one device.  Any thread may call."""

    def __init__(self) -> None:
        self._controls_lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._speeds: dict[str | None, tuple[float, float]] = {}

    def throttle(self, gb_s: float | None = None, latency_s: float = 0.0, *, stream: str | None = None) -> None:
        """Let each piece of work last ``latency_s`` + its bytes at ``gb_s`` (units of 1e9 bytes a second; None: no limit).

        ``stream``: only that one; else all that have no speed of their own.  Work that has begun keeps its speed.
        """
        with self._controls_lock:
            self._speeds[stream] = (latency_s, 0.0 if gb_s is None else 1 / (gb_s * 1e9))

    def fail_next(self, error: BaseException, *, works: int = 1, after: int = 0, stream: str | None = None) -> None:
        """Let ``works`` pieces of work fail with ``error`` instead of being run, once ``after`` others have been run."""
        with self._controls_lock:
            self._faults.append(_Fault(error, works, after, stream))

    def duration_s(self, stream: str, nbytes: int) -> float:
        """For the device: how long a piece of work shall last at least."""
        with self._controls_lock:
            latency_s, byte_s = self._speeds.get(stream) or self._speeds.get(None, (0.0, 0.0))
        return latency_s + nbytes * byte_s

    def take_fault(self, stream: str) -> BaseException | None:
        """For the device: the error with which the work that begins now shall fail."""
        with self._controls_lock:
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
