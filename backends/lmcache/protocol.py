"""The protocol of ``lmcache_server``, as LMCache 0.5.6 speaks it: fixed heads, one request at a time.

A request is nine int32 (command, length of what follows, memory format, type of numbers, place, four dimensions) and a key of 150
bytes, padded with spaces; PUT is followed by its payload and has no reply.  A reply is nine int32 (200 or 400, length, and the same
seven), then the payload.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import Final

from hicache_actors.backends.sockets import Wire

_KEY_BYTES: Final = 150
_REQUEST: Final = struct.Struct(f"9i{_KEY_BYTES}s")
_REPLY: Final = struct.Struct("9i")
_FOUND: Final = 200
_BYTES: Final = (1, 6, 0)  #: one flat run, of uint8, in the server's memory


class _Command(enum.IntEnum):
    PUT = 1
    GET = 2
    EXIST = 3


def wire_key(key: str) -> bytes:
    """The server takes only keys of its own form, ``model@world@worker@hash@type``: ours goes into the hash."""
    return f"hicache@1@0@{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}@uint8".encode()


class LMCacheConnection:
    """One task at a time."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._wire = Wire(host, port, "", timeout_s)

    @property
    def is_open(self) -> bool:
        return self._wire.is_open

    async def open(self) -> None:
        await self._wire.open()

    def close(self) -> None:
        self._wire.close()

    async def exists(self, key: str) -> bool:
        await self._wire.send(_request(_Command.EXIST, key))
        return (await self._reply())[0]

    async def get_into(self, key: str, buffer: memoryview) -> int:
        """-> the object's length, or -1; ``buffer`` holds it if it has exactly that length."""
        await self._wire.send(_request(_Command.GET, key))
        found, length = await self._reply()
        if not found:
            return -1
        if length == len(buffer):
            await self._wire.fill(buffer)
        else:
            await self._wire.skip(length)
        return length

    async def put(self, key: str, value: memoryview) -> None:
        """Not acknowledged: what is asked next on this connection is answered after it is stored."""
        await self._wire.send(_request(_Command.PUT, key, len(value)), value)

    async def _reply(self) -> tuple[bool, int]:
        head = bytearray(_REPLY.size)
        await self._wire.fill(memoryview(head))
        code, length, *_ = _REPLY.unpack(head)
        if code not in (_FOUND, 400) or length < 0:
            raise ConnectionError(f"an answer that is not of this protocol: code {code}, length {length}")
        return code == _FOUND, length


def _request(command: _Command, key: str, length: int = 0) -> bytes:
    return _REQUEST.pack(command, length, *_BYTES, length, 0, 0, 0, wire_key(key).ljust(_KEY_BYTES))
