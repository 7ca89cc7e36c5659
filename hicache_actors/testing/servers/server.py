"""A server process of a test, whatever it is: in a folder of its own, with an end that cannot be missed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

START_S: Final = 60.0
_STOP_S: Final = 10.0


class Server:
    """``with Server(...) as server:`` starts it and waits until ``ready`` says so; at the end it is killed, with its children.

    ``url`` is what a storage URL for it says.  What it prints goes to ``folder/NAME.log``.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        folder: Path,
        url: str,
        ready: Callable[[], bool],
        *,
        environment: Mapping[str, str] | None = None,
        start_s: float = START_S,
    ) -> None:
        self.name, self.url, self.folder = name, url, folder
        self.log = folder / f"{name}.log"
        self._argv, self._ready, self._start_s = [str(word) for word in argv], ready, start_s
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._others: list[Server] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def with_it(self, other: Server) -> None:
        """``other``, which this one needs, ends with it."""
        self._others.append(other)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Raises RuntimeError, with the end of its log, if it ends or is not ready in time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        until_s = time.monotonic() + self._start_s
        while not self._ready():
            if self._process.poll() is not None:
                self.kill()
                raise RuntimeError(f"{self.name} has ended: {self._end_of_log()}")
            if time.monotonic() > until_s:
                self.kill()
                raise RuntimeError(f"{self.name} is not ready after {self._start_s:g} s: {self._end_of_log()}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, for it, its children, and those that end with it; idempotent."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        for other in self._others:
            other.kill()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not end it in time."""
        self._signal(signal.SIGTERM)
        if self._process is not None:
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def freeze(self) -> None:
        """It keeps its connections, and answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


def free_port() -> int:
    """Of loopback; taken by nobody a moment ago."""
    return free_ports(1)[0]


def free_ports(n: int, *, also: int = 0) -> list[int]:
    """``n`` of them; ``also``: that much above each is another one that is free."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < n:
            try:
                probe = held.enter_context(socket.create_server(("127.0.0.1", 0)))
                port: int = probe.getsockname()[1]
                if also:
                    held.enter_context(socket.create_server(("127.0.0.1", port + also)))
            except (OSError, OverflowError):
                continue
            found.append(port)
    return found


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
