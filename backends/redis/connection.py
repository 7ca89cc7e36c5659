"""One connection that speaks RESP2 and moves values between the socket and the caller's buffers without a copy of its own.

Format: https://redis.io/docs/latest/develop/reference/protocol-spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from hicache_actors.backends.redis.options import RedisOptions
from hicache_actors.backends.sockets import Wire

Reply: TypeAlias = "bytes | int | list[Reply] | ServerError | None"

_LINE_BYTES: Final = 512  #: of any line: errors are the longest
_AHEAD_BYTES: Final = 32  #: read with a line: little of a value that follows it is copied twice


class ServerError(Exception):
    """What the server answered in place of a result.  ``code`` is its first word, such as ``OOM``."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


class Connection:
    """Commands and their replies, in order.  One task at a time; after an exception that is no `ServerError` it is of no use."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._wire = Wire(options.host, options.port, options.path, options.timeout_s)
        self._ahead = memoryview(bytearray(_LINE_BYTES))
        self._start = self._end = 0

    @property
    def is_open(self) -> bool:
        return self._wire.is_open

    async def open(self) -> None:
        """Raises OSError, TimeoutError, or `ServerError` if the server refuses the user, or the database."""
        options = self._options
        self._start = self._end = 0
        await self._wire.open()
        if options.password:
            user = [options.user] if options.user else []
            await self.call("AUTH", *user, options.password)
        if options.db:
            await self.call("SELECT", str(options.db))

    def close(self) -> None:
        self._wire.close()

    async def call(self, *words: str) -> Reply:
        """One command and its reply; raises `ServerError` if that is an error."""
        await self.send(command(*words))
        reply = await self.reply()
        if isinstance(reply, ServerError):
            raise reply
        return reply

    async def send(self, *parts: bytes | memoryview) -> None:
        await self._wire.send(*parts)

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
            line, end, _ = bytes(self._ahead[self._start : self._end]).partition(b"\r\n")
            if end:
                self._start += len(line) + 2
                return line
            await self._read_ahead()

    async def _end_of_value(self) -> None:
        while self._end - self._start < 2:
            await self._read_ahead()
        self._start += 2

    async def _fill(self, buffer: memoryview) -> None:
        done = min(len(buffer), self._end - self._start)
        buffer[:done] = self._ahead[self._start : self._start + done]
        self._start += done
        await self._wire.fill(buffer[done:])

    async def _skip(self, length: int) -> None:
        ahead = min(length, self._end - self._start)
        self._start += ahead
        await self._wire.skip(length - ahead)

    async def _read_ahead(self) -> None:
        left = self._end - self._start
        if self._start:
            self._ahead[:left] = bytes(self._ahead[self._start : self._end])
            self._start, self._end = 0, left
        room = self._ahead[left : left + _AHEAD_BYTES]
        if not room:
            raise ConnectionError("a line without an end")
        self._end += await self._wire.receive(room)


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
