"""What stands for the module torch.cuda where there is no GPU: each stream is a list of events that tests let happen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FakeCuda:
    """Copies take place when they are submitted; events behind them fire then, or when a held stream is let go."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.results: list[int] = []  #: of the next calls of the runtime
        self.held: set[int] = set()  #: priorities of streams whose events do not fire
        self.broken: Exception | None = None  #: what asking or waiting raises
        self.streams: list[FakeStream] = []
        self.capturing: set[FakeStream] = set()
        self._current: FakeStream | None = None
        self._changed = threading.Condition()
        outer = self

        class Event(FakeEvent):
            def __init__(self, blocking: bool = False) -> None:
                super().__init__(outer, blocking)

        class Stream(FakeStream):
            def __init__(self, device: int, priority: int = 0) -> None:
                super().__init__(outer, priority)

        self.Event, self.Stream = Event, Stream

    def hold(self, priority: int) -> None:
        self.held.add(priority)

    def let_go(self) -> None:
        with self._changed:
            self.held.clear()
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self.broken = error
            self._changed.notify_all()

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._current, before = stream, self._current
        yield
        self._current = before

    def is_current_stream_capturing(self) -> bool:
        return self._current in self.capturing

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        result = self.results.pop(0) if self.results else 0
        if result == 0:
            assert flags == 3
            assert address not in self.registered
            self.registered[address] = nbytes
        return result

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 713


class FakeStream:
    def __init__(self, cuda: FakeCuda, priority: int) -> None:
        self.cuda, self.priority = cuda, priority
        self.waited_for: list[Any] = []
        cuda.streams.append(self)

    def wait_event(self, event: FakeEvent) -> None:
        self.waited_for.append(event)


class FakeEvent:
    def __init__(self, cuda: FakeCuda, blocking: bool) -> None:
        self.cuda, self.blocking = cuda, blocking
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def query(self) -> bool:
        if self.cuda.broken is not None:
            raise self.cuda.broken
        return self.stream is not None and self.stream.priority not in self.cuda.held

    def synchronize(self) -> None:
        assert self.blocking, "a wait that spins"
        with self.cuda._changed:
            self.cuda._changed.wait_for(self.query)
