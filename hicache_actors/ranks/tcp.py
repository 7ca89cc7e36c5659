"""Rounds over TCP: a star with rank 0 as its hub.

Each message carries its kind and number, so a stray one is recognised.  The end of a stream is the death of its rank: the hub tells
all others by closing theirs.  A thread with an event loop of its own moves the bytes, so a busy frontend delays no round.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from hicache_actors.errors import PeerError
from hicache_actors.ranks.group import RankGroup
from hicache_actors.ranks.transport import Flight, FutureFlight

T = TypeVar("T")

_HEAD: Final = struct.Struct("<BQI")  # kind, number of the operation, bytes that follow
_HELLO, _REDUCE, _BROADCAST = 0, 1, 2
_LONGEST_HELLO: Final = 4096
_GREETING_S: Final = 2.0  #: a hub that is closing may accept and never answer
_RETRY_S: Final = 0.02  #: between two tries to reach a hub that is not up yet


class TcpTransport:
    """Made by all ranks of ``group``, within its start deadline.  Blocks; raises `PeerError`."""

    def __init__(self, group: RankGroup) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="hicache-ranks", daemon=True)
        self._lost: PeerError | None = None
        self._numbers = {_REDUCE: 0, _BROADCAST: 0}
        self._flights: dict[tuple[int, int], Future[Any]] = {}
        self._arrived: dict[int, dict[int, bytes]] = {}  # hub: number of a reduction -> rank -> vector
        self._early: dict[tuple[int, int], bytes] = {}  # others: a broadcast that was not asked for yet
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._thread.start()
        meeting = asyncio.run_coroutine_threadsafe(self._meet(), self._loop)
        try:
            meeting.result(group.start_deadline_s + 1.0)
        except (OSError, TimeoutError, EOFError, PeerError) as error:
            self.close()
            raise PeerError(f"{group.name}: the ranks did not meet: {error!r}") from error

    def reduce_min(self, vector: Sequence[int], deadline_s: float) -> Flight[Sequence[int]]:
        return self._issue(_REDUCE, array("q", vector).tobytes(), deadline_s)

    def broadcast(self, data: bytes, deadline_s: float) -> Flight[bytes]:
        return self._issue(_BROADCAST, data if self.rank == 0 else b"", deadline_s)

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._lose, PeerError("this rank has left its group"), True)

    # -- any thread ----------------------------------------------------------------------------------------------------

    def _issue(self, kind: int, data: bytes, deadline_s: float) -> Flight[Any]:
        number = self._numbers[kind] + 1
        if self._lost is not None and (kind, number) not in self._early:
            raise PeerError(str(self._lost)) from self._lost
        self._numbers[kind] = number
        future: Future[Any] = Future()
        self._loop.call_soon_threadsafe(self._start, kind, number, data, future, deadline_s)
        return FutureFlight(future)

    # -- the thread of the transport -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _start(self, kind: int, number: int, data: bytes, future: Future[Any], deadline_s: float) -> None:
        if (kind, number) in self._early:  # it has come, whatever has become of its sender since
            future.set_result(self._early.pop((kind, number)))
            return
        if self._lost is not None:
            future.set_exception(self._lost)
            return
        self._flights[kind, number] = future
        timer = self._loop.call_later(deadline_s, self._late, kind, number, deadline_s)
        future.add_done_callback(lambda _: timer.cancel())
        if kind == _REDUCE:
            if self.rank == 0:
                self._reduce(number, 0, data)
            else:
                self._send(0, kind, number, data)
        elif self.rank == 0:
            for peer in self._writers:
                self._send(peer, kind, number, data)
            self._end(kind, number, data)

    def _reduce(self, number: int, rank: int, data: bytes) -> None:
        vectors = self._arrived.setdefault(number, {})
        vectors[rank] = data
        if len(vectors) < self.size:
            return
        del self._arrived[number]
        if len({len(vector) for vector in vectors.values()}) != 1:
            self._lose(PeerError(f"reduction {number}: vectors of different lengths"))
            return
        columns = zip(*(array("q", vector) for vector in vectors.values()), strict=True)
        reduced = array("q", map(min, columns))
        for peer in self._writers:
            self._send(peer, _REDUCE, number, reduced.tobytes())
        self._end(_REDUCE, number, reduced)

    def _end(self, kind: int, number: int, value: object) -> None:
        future = self._flights.pop((kind, number), None)
        if future is not None:
            future.set_result(value)

    def _late(self, kind: int, number: int, deadline_s: float) -> None:
        if (kind, number) in self._flights:
            here = self._arrived.get(number)
            missing = "" if here is None else f" of ranks {sorted({*range(self.size)} - {*here})}"
            self._lose(PeerError(f"no answer{missing} within {deadline_s:g} s"))

    def _send(self, peer: int, kind: int, number: int, data: bytes) -> None:
        self._writers[peer].write(_HEAD.pack(kind, number, len(data)) + data)

    def _lose(self, why: PeerError, stop: bool = False) -> None:
        """All flights fail, now and later; closing the streams tells the peers."""
        if self._lost is None:
            self._lost = why
        if self._server is not None:
            self._server.close()  # before anybody hears of it: the next epoch may listen at the same address
        for writer in self._writers.values():
            writer.close()
        flights, self._flights = self._flights, {}
        for future in flights.values():
            future.set_exception(self._lost)
        if stop:
            for task in self._tasks:
                task.cancel()
            self._loop.call_soon(self._loop.stop)

    # -- meeting -------------------------------------------------------------------------------------------------------

    async def _meet(self) -> None:
        host, port = self._group.endpoint()
        async with asyncio.timeout(self._group.start_deadline_s):
            if self.rank:
                reader, writer = await self._connect(host, port)
                self._writers[0] = writer
                self._read(0, reader, writer)
                return
            everybody = asyncio.Event()
            self._server = await asyncio.start_server(lambda r, w: self._greet(r, w, everybody), host, port)
            await everybody.wait()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Until the hub of this very group answers: it may not be up yet, or may be one of an older epoch."""
        hello = f"{self._group.name} {self.size} {self.rank}".encode()
        while True:
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(_GREETING_S):
                    reader, writer = await asyncio.open_connection(host, port)
                    writer.write(_HEAD.pack(_HELLO, self.rank, len(hello)) + hello)
                    kind, _, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                if kind == _HELLO and not length:
                    return reader, writer
                writer.close()
            await asyncio.sleep(_RETRY_S)

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, everybody: asyncio.Event
    ) -> None:
        try:
            kind, rank, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
            name = (await reader.readexactly(min(length, _LONGEST_HELLO))).decode(errors="replace")
        except (EOFError, OSError):
            return
        if kind != _HELLO or name != f"{self._group.name} {self.size} {rank}" or everybody.is_set():
            writer.close()
            return
        writer.write(_HEAD.pack(_HELLO, rank, 0))
        if rank in self._writers:  # it has not heard the answer in time, and tries again
            self._writers[rank].close()
        self._writers[rank] = writer
        self._read(rank, reader, writer)
        if len(self._writers) == self.size - 1:
            everybody.set()

    def _read(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._listen(peer, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                kind, number, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                data = await reader.readexactly(length)
                if self.rank == 0:
                    self._reduce(number, peer, data)
                elif kind == _REDUCE:
                    self._end(kind, number, array("q", data))
                elif (kind, number) in self._flights:
                    self._end(kind, number, data)
                else:
                    self._early[kind, number] = data
        except (EOFError, OSError):
            if self._writers.get(peer) is writer:
                self._lose(PeerError(f"rank {peer} has gone"))
