"""One connection that speaks RESP2 and moves values between the socket and the caller's buffers without a copy of its own.

Format: https://redis.io/docs/latest/develop/reference/protocol-spec.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Final, TypeAlias

from hicache_actors.backends.redis.options import RedisOptions

Reply: TypeAlias = "bytes | int | list[Reply] | ServerError | None"

_LINE_BYTES: Final = 512  #: of any line: errors are the longest
_AHEAD_BYTES: Final = 32  #: read with a line: little of a value that follows it is copied twice
_SOCKET_BYTES: Final = 4 << 20
_SKIP_BYTES: Final = 64 << 10


class ServerError(Exception):
    """What the server answered in place of a result.  ``code`` is its first word, such as ``OOM``."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


class Connection:
    """Commands and their replies, in order.  One task at a time; after an exception that is no `ServerError` it is of no use.

    Each wait ends after ``timeout_s`` without progress, with TimeoutError.
    """

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._socket: socket.socket | None = None
        self._loop = asyncio.get_running_loop()
        self._ahead = bytearray(_LINE_BYTES)
        self._view = memoryview(self._ahead)
        self._start = self._end = 0

    async def open(self) -> None:
        """Raises OSError, TimeoutError, or `ServerError` if the server refuses the user, or the database."""
        options = self._options
        self.close()
        family, address = _where(options)
        if options.host:
            found = await self._loop.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
            family, address = found[0][0], found[0][4]
        self._start = self._end = 0
        sock = self._socket = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        if options.host:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        async with asyncio.timeout(options.timeout_s):
            await self._loop.sock_connect(sock, address)
        if options.password:
            user = [options.user] if options.user else []
            await self.call("AUTH", *user, options.password)
        if options.db:
            await self.call("SELECT", str(options.db))

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None

    async def call(self, *words: str) -> Reply:
        """One command and its reply; raises `ServerError` if that is an error."""
        await self.send(command(*words))
        reply = await self.reply()
        if isinstance(reply, ServerError):
            raise reply
        return reply

    async def send(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            async with asyncio.timeout(self._options.timeout_s):
                await self._loop.sock_sendall(self._open_socket(), part)

    async def reply(self) -> Reply:
        """The next reply, whole; errors are returned, not raised."""
        line = await self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(rest.decode("utf-8", "replace"))
        if kind == b":":
            return _whole(rest)
        if kind == b"$":
            length = _whole(rest)
            if length < 0:
                return None
            value = bytearray(length)
            await self._fill(memoryview(value))
            await self._end_of_value()
            return bytes(value)
        if kind == b"*":
            return [await self.reply() for _ in range(max(0, _whole(rest)))]
        raise ConnectionError(f"an answer that is not RESP: {line[:40]!r}")

    async def value_into(self, buffer: memoryview) -> bool | ServerError:
        """The next reply, a value, into ``buffer`` -> whether it is there and has exactly that length; others are skipped."""
        line = await self._line()
        if line[:1] == b"-":
            return ServerError(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            raise ConnectionError(f"a value was asked for, the answer is {line[:40]!r}")
        length = _whole(line[1:])
        if length < 0:
            return False
        if length == len(buffer):
            await self._fill(buffer)
        else:
            await self._skip(length)
        await self._end_of_value()
        return length == len(buffer)

    async def _line(self) -> bytes:
        while True:
            at = self._ahead.find(b"\r\n", self._start, self._end)
            if at >= 0:
                line = bytes(self._view[self._start : at])
                self._start = at + 2
                return line
            await self._read_ahead()

    async def _end_of_value(self) -> None:
        while self._end - self._start < 2:
            await self._read_ahead()
        self._start += 2

    async def _fill(self, buffer: memoryview) -> None:
        done = min(len(buffer), self._end - self._start)
        buffer[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < len(buffer):
            done += await self._receive(buffer[done:])

    async def _skip(self, length: int) -> None:
        scratch = memoryview(bytearray(min(length, _SKIP_BYTES)))
        while length:
            part = scratch[: min(length, _SKIP_BYTES)]
            await self._fill(part)
            length -= len(part)

    async def _read_ahead(self) -> None:
        left = self._end - self._start
        if self._start:
            self._view[:left] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, left
        room = self._view[left : left + _AHEAD_BYTES]
        if not room:
            raise ConnectionError("a line without an end")
        self._end += await self._receive(room)

    async def _receive(self, buffer: memoryview) -> int:
        async with asyncio.timeout(self._options.timeout_s):
            received = await self._loop.sock_recv_into(self._open_socket(), buffer)
        if not received:
            raise ConnectionError("the server has closed the connection")
        return received

    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("not connected")
        return self._socket


def command(*words: str | bytes) -> bytes:
    parts = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def command_with_value(value: memoryview, before: Sequence[str], after: Sequence[str] = ()) -> tuple[bytes, bytes]:
    """What goes before ``value`` and what after it, for one command with ``value`` among its words."""
    words = len(before) + 1 + len(after)
    head = command(*before).partition(b"\r\n")[2]
    tail = command(*after).partition(b"\r\n")[2] if after else b""
    return b"*%d\r\n%s$%d\r\n" % (words, head, len(value)), b"\r\n" + tail


def _whole(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConnectionError(f"an answer that is not RESP: a number is {text[:40]!r}") from None


def _where(options: RedisOptions) -> tuple[socket.AddressFamily, str | tuple[object, ...]]:
    return (socket.AF_UNIX, options.path) if not options.host else (socket.AF_INET, (options.host, options.port))
