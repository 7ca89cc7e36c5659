"""The backend: a batch is one hop to a worker thread, which looks up, moves and looks again."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.helping import Help, help_of
from hicache_actors.backends.objects import Expected, Verdict
from hicache_actors.backends.slab import store_file
from hicache_actors.backends.slab.doorkeeper import Doorkeeper
from hicache_actors.backends.slab.medium import File, Mapped, Medium, check
from hicache_actors.backends.slab.moves import Pieces
from hicache_actors.backends.slab.options import SlabOptions
from hicache_actors.backends.slab.store_file import StoreFile
from hicache_actors.backends.slab.table import Claim, Found
from hicache_actors.cuda_ext.native.buffers import pick, sizes
from hicache_actors.errors import BackendError
from hicache_actors.memory.shapes import BATCH_PAGES

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

_CLAIMED_AT_ONCE: Final = 256  # slots of one thread that nobody else can use meanwhile ...
_CLAIMED_PART: Final = 8  # ... and at most this part of all
_LOOKED_UP_AT_ONCE: Final = 256  # on the loop
_LISTED_AT_ONCE: Final = 4096


class _Store(NamedTuple):
    file: StoreFile
    medium: Medium


class SlabBackend(Backend):
    """Any number of processes of this host may open one store; each finds at once what another has acknowledged.

    All objects of a store have the length of the first, or less: one folder for each kind of model.  A full store makes those go
    that have not been used for long, whoever wrote them.  Nothing is synced: after a power failure the checksums of objects tell
    what is left of them.

    A process that is killed at any instant loses what was not acknowledged, and nothing else: see `Table`.
    """

    scope = "host"
    batch_pages = BATCH_PAGES
    checks = True

    def __init__(self, url: str, workers: Workers) -> None:
        self.url = url
        self.options = SlabOptions.parse(url)
        self._workers = workers
        self._store: _Store | None = None
        self._making = asyncio.Lock()
        self._door = Doorkeeper() if self.options.admit_second else None
        self._counts: Counter[str] = Counter()
        self._closed = False

    async def open(self) -> None:
        if await self._found() is None and not self._maps:
            with self._errors("open"):
                await self._workers.run(check, self.options)

    async def close(self) -> None:
        # The descriptors close with their last user: a call that hangs must never find its number given to another file.
        self._closed, self._store = True, None

    async def exists(self, keys: Sequence[str]) -> int:
        store = await self._found()
        leading = 0
        while store is not None and leading < len(keys):
            part = keys[leading : leading + _LOOKED_UP_AT_ONCE]
            absent = np.flatnonzero(store.file.table.look_up(part).slots < 0)
            here = int(absent[0]) if len(absent) else len(part)
            leading += here
            if here < len(part):
                break
            await asyncio.sleep(0)
        if self._door is not None:
            self._door.ask(keys[leading:])
        return leading

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        return (await self._read(keys, buffers, None))[0]

    async def peek(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        return (await self._read(keys, buffers, None, touch=False))[0]

    async def read_checked(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> list[Verdict | None]:
        return (await self._read(keys, buffers, expected))[1]

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        return await self._write(keys, buffers, None)

    async def write_sealed(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> list[Stored]:
        return await self._write(keys, buffers, expected)

    async def _read(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected | None, *, touch: bool = True
    ) -> tuple[list[bool], list[Verdict | None]]:
        """-> which were found, and what those are if something is expected."""
        store = await self._found()
        answer: tuple[list[bool], list[Verdict | None]] = [False] * len(keys), [None] * len(keys)
        if store is not None and keys:
            table, medium, help = store.file.table, store.medium, help_of(self._workers)

            def read() -> tuple[list[bool], list[Verdict | None]]:
                found = table.look_up(keys)
                here = np.flatnonzero((found.slots >= 0) & (found.lengths == sizes(buffers)))
                here = here[np.argsort(found.slots[here], kind="stable")]
                slots, numbers = found.slots[here], here.tolist()
                verdicts = medium.read(Pieces(slots.tolist(), pick(buffers, numbers), numbers), expected, help)
                # Where an entry has changed, somebody has written into the slot meanwhile.
                same = table.unchanged(slots, found.marks[here])
                if touch:
                    table.touch(slots[np.array(same, bool)], _now_ms())
                if all(same) and numbers == [*range(len(keys))]:  # all of them, in the order in which they were written
                    return [True] * len(keys), verdicts
                flags, judged = answer
                for at, verdict, unchanged in zip(numbers, verdicts, same, strict=True):
                    flags[at], judged[at] = unchanged, verdict if unchanged else None
                return answer

            with self._errors("read"):
                answer = await self._workers.run(read)
        hits = answer[0].count(True)
        self._counts["hits"] += hits
        self._counts["misses"] += len(keys) - hits
        return answer

    async def _write(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected | None
    ) -> list[Stored]:
        if not keys:
            return []
        store = await self._made(int(sizes(buffers).max()))
        step = max(1, min(_CLAIMED_AT_ONCE, store.file.geometry.slots // _CLAIMED_PART))
        parts = [range(start, min(start + step, len(keys))) for start in range(0, len(keys), step)]
        help = help_of(self._workers)

        def write() -> list[Stored]:
            return [
                outcome for part in parts for outcome in self._write_some(store, keys, buffers, part, expected, help)
            ]

        with self._errors("write"):
            outcomes = await self._workers.run(write)
        self._counts["written"] += outcomes.count(Stored.WRITTEN)
        self._counts["present"] += outcomes.count(Stored.PRESENT)
        return outcomes

    def _write_some(
        self,
        store: _Store,
        keys: Sequence[str],
        buffers: Sequence[memoryview],
        part: range,
        expected: Expected | None,
        help: Help,
    ) -> list[Stored]:
        """In a worker thread."""
        table = store.file.table
        outcomes = dict.fromkeys(part, Stored.FAILED)
        with table.changing():
            lengths = sizes(buffers)
            wanted = self._admitted(store.file, keys, lengths, part)
            answers = table.claim_many([keys[at] for at in wanted], lengths[wanted].tolist())
        claims: list[tuple[Claim, int]] = []
        present: list[Found] = []
        for at, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, Claim):
                claims.append((answer, at))
            elif answer is None:
                self._counts["all_busy"] += 1
            else:
                present.append(answer)
                outcomes[at] = Stored.PRESENT
        claims.sort()
        claimed, numbers = [claim for claim, _ in claims], [at for _, at in claims]
        pieces = Pieces([claim.slot for claim in claimed], pick(buffers, numbers), numbers)
        try:
            store.medium.write(pieces, expected, help)
        except BaseException:
            with table.changing():
                table.give_up(claimed)
            raise
        now_ms = _now_ms()
        if present:
            table.touch(np.array([found.slot for found in present]), now_ms)
        with table.changing():
            stays = table.publish_many(claimed, now_ms)
        for (_, at), stayed in zip(claims, stays, strict=True):
            outcomes[at] = Stored.WRITTEN if stayed else Stored.PRESENT
        return list(outcomes.values())

    async def delete(self, keys: Sequence[str]) -> int:
        store = await self._found()
        if store is None:
            return 0
        table = store.file.table

        def remove() -> int:
            with table.changing():
                return table.remove(keys)

        return await self._workers.run(remove)

    async def quarantine(self, key: str) -> bool:
        removed = await self.delete([key]) > 0
        self._counts["quarantined"] += removed
        return removed

    async def lengths(self, keys: Sequence[str]) -> list[int | None]:
        store = await self._found()
        found = [None] * len(keys) if store is None else store.file.table.find_many(keys)
        return [None if slot is None else slot.length for slot in found]

    async def clear(self) -> None:
        store = await self._found()
        if store is not None:
            table = store.file.table

            def clear() -> None:
                with table.changing():
                    table.clear()

            await self._workers.run(clear)

    async def keys(self) -> AsyncIterator[str]:
        store = await self._found()
        slots = 0 if store is None else store.file.table.slots
        for start in range(0, slots, _LISTED_AT_ONCE):
            assert store is not None
            part = range(start, min(start + _LISTED_AT_ONCE, slots))
            for key in await self._workers.run(store.file.table.keys, part):
                yield key

    def longest_bytes(self) -> int:
        return 0 if self._store is None else self._store.file.geometry.slot_bytes

    def stats(self) -> Mapping[str, int | float | str]:
        """``io``: ``direct`` past the page cache, ``buffered`` through it, ``both`` (from it what it has, else past it), or
        ``mapped``; ``requests``: what keeps several of them under way, ``io_uring`` or ``threads``; ``why_*``: why it is not the
        better one."""
        store = self._store
        if store is None:
            return {"slots": 0, **self._counts}
        geometry = store.file.geometry
        return {
            **store.medium.facts, "slots": geometry.slots, "slot_bytes": geometry.slot_bytes,
            "file_bytes": geometry.file_bytes, **self._counts,
        }  # fmt: skip

    @property
    def _maps(self) -> bool:
        return self.options.kind != "slab"

    def _admitted(self, file: StoreFile, keys: Sequence[str], lengths: NDArray[np.uint64], part: range) -> list[int]:
        """Which of ``part`` may be stored.  While nobody else changes the table."""
        wanted: list[int] = []
        limit_bytes = self.options.write_bytes_per_day
        found = file.table.find_many(keys[part.start : part.stop]) if limit_bytes else [None] * len(part)
        for at, n_bytes, there in zip(part, lengths[part.start : part.stop].tolist(), found, strict=True):
            if n_bytes > file.geometry.slot_bytes:
                self._counts["too_large"] += 1
            elif self._door is not None and not self._door.admits(keys[at]):
                self._counts["not_admitted"] += 1
            elif limit_bytes and there is None and not file.spend(n_bytes, limit_bytes):
                self._counts["over_daily_limit"] += 1
            else:
                wanted.append(at)
        return wanted

    async def _found(self) -> _Store | None:
        """Another process may have made it meanwhile."""
        if self._closed:
            raise BackendError(f"{self.url}: closed", retryable=False)
        if self._store is None:
            async with self._making:
                if self._store is None:
                    with self._errors("open"):
                        found = await self._workers.run(
                            lambda: self._opened(store_file.find(self.options, map_slots=self._maps))
                        )
                    self._store = None if self._closed else found
        return self._store

    async def _made(self, object_bytes: int) -> _Store:
        store = await self._found()
        if store is None:
            async with self._making:
                if self._store is None:
                    options, maps = self.options, self._maps
                    with self._errors("make the store"):
                        self._store = await self._workers.run(
                            lambda: self._opened(store_file.make(options, object_bytes, map_slots=maps))
                        )
                store = self._store
        assert store is not None
        return store

    def _opened(self, file: StoreFile | None) -> _Store | None:
        if file is None:
            return None
        return _Store(file, Mapped(file) if self._maps else File(file, self.options))

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """One thread raises for all that worked at a batch, when they have ended."""
        try:
            yield
        except OSError as error:
            self._counts["failed"] += 1
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise BackendError(f"{self.url}: {what}: {reason}") from error


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
