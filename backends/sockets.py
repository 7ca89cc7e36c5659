"""Sockets of clients that are written here: bytes between a connection and the caller's buffers, and a few connections to share.

Nothing writes into a buffer once a call has ended: whatever ends it early closes its connection first.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, Protocol, TypeVar

_SOCKET_BYTES: Final = 4 << 20
_SKIP_BYTES: Final = 64 << 10
_TRIES: Final = 2  #: a connection that was idle may have been closed by the server
_MANY: Final = 4  #: objects for each further connection that a batch takes


class Wire:
    """One connection, not yet open.  One task at a time.

    Each wait raises TimeoutError after ``timeout_s`` without progress, and ConnectionError when the peer is gone.  ``path``: of a
    socket of this host, in place of host and port.
    """

    def __init__(self, host: str, port: int, path: str, timeout_s: float) -> None:
        self._host, self._port, self._path, self._timeout_s = host, port, path, timeout_s
        self._socket: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self.close()
        async with asyncio.timeout(self._timeout_s):
            family: socket.AddressFamily = socket.AF_UNIX
            address: Any = self._path
            if not self._path:
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                family, address = found[0][0], found[0][4]
            sock = self._socket = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            if not self._path:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
            await loop.sock_connect(sock, address)

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None

    async def send(self, *parts: bytes | memoryview) -> None:
        loop = asyncio.get_running_loop()
        for part in parts:
            async with asyncio.timeout(self._timeout_s):
                await loop.sock_sendall(self._open_socket(), part)

    async def receive(self, buffer: memoryview) -> int:
        """Some bytes, one at least."""
        async with asyncio.timeout(self._timeout_s):
            received = await asyncio.get_running_loop().sock_recv_into(self._open_socket(), buffer)
        if not received:
            raise ConnectionError("the server has closed the connection")
        return received

    async def fill(self, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            done += await self.receive(buffer[done:])

    async def skip(self, length: int) -> None:
        scratch = memoryview(bytearray(min(length, _SKIP_BYTES)))
        while length:
            length -= await self.receive(scratch[: min(length, _SKIP_BYTES)])

    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("not connected")
        return self._socket


class Connection(Protocol):
    @property
    def is_open(self) -> bool: ...

    async def open(self) -> None: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=Connection)
T = TypeVar("T")


class Pool(Generic[C]):
    """At most ``size`` connections, opened when needed, each used by one task at a time."""

    def __init__(self, make: Callable[[], C], size: int) -> None:
        self.reconnects = 0
        self._make, self._size = make, size
        self._idle: list[C] = []
        self._all: set[C] = set()
        self._free = asyncio.Semaphore(size)
        self._closed = False

    def __len__(self) -> int:
        return len(self._all)

    def close(self) -> None:
        """Also those in use: who waits on one gets an error."""
        self._closed = True
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()

    async def run(self, use: Callable[[C], Awaitable[T]]) -> T:
        """``use`` one; again, with a new one, if it turns out that the server has closed the one that was idle.

        Raises what ``use`` raises, and ConnectionError after `close`.
        """
        for tries_left in reversed(range(_TRIES)):
            was_idle = bool(self._idle)
            try:
                async with self.connection() as connection:
                    return await use(connection)
            except ConnectionError:
                if not was_idle or not tries_left or self._closed:
                    raise
                self.reconnects += 1
                self._drop_idle()  # whatever has ended this one has ended them too
        raise AssertionError("the last try returns or raises")

    def shares(self, n: int) -> list[range]:
        """``n`` objects cut into parts for as many connections as are worth their while."""
        parts = max(1, min(self._size, n // _MANY))
        return [range(n * i // parts, n * (i + 1) // parts) for i in range(parts)]

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[C]:
        """Closed unless the block ends well: answers may be under way that nobody takes."""
        if self._closed:
            raise ConnectionError("closed")
        async with self._free:
            connection = self._idle.pop() if self._idle else self._make()
            self._all.add(connection)
            clean = False
            try:
                if not connection.is_open:
                    await connection.open()
                yield connection
                clean = not self._closed
            finally:
                if clean:
                    self._idle.append(connection)
                else:
                    connection.close()
                    self._all.discard(connection)

    def _drop_idle(self) -> None:
        for connection in self._idle:
            connection.close()
            self._all.discard(connection)
        self._idle.clear()
