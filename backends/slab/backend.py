"""The backend: batches cut up for a few threads, each looking up, moving and looking again."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.objects import Expected, Verdict, seal_many
from hicache_actors.backends.slab import store_file
from hicache_actors.backends.slab.doorkeeper import Doorkeeper
from hicache_actors.backends.slab.medium import Direct, Mapped, Medium, Piece
from hicache_actors.backends.slab.options import SlabOptions
from hicache_actors.backends.slab.store_file import StoreFile
from hicache_actors.backends.slab.table import Claim, Found
from hicache_actors.errors import BackendError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

T = TypeVar("T")

THREADS: Final = 4  #: at one batch: a disk is kept busy by as many requests
_CLAIMED_AT_ONCE: Final = 16  #: slots of one thread that nobody else can use meanwhile
_LISTED_AT_ONCE: Final = 4096


class SlabBackend(Backend):
    """Any number of processes of this host may open one store; each finds at once what another has acknowledged.

    All objects of a store have the length of the first, or less: one folder for each kind of model.  An object in a full set of
    slots makes the one go that was unused for longest, whoever wrote it.  Nothing is synced: after a power failure the checksums of
    objects tell what is left of them.

    A process that is killed at any instant loses what was not acknowledged, and nothing else: see `Table`.
    """

    scope = "host"
    checks = True

    def __init__(self, url: str, workers: Workers) -> None:
        self.url = url
        self.options = SlabOptions.parse(url)
        self._workers = workers
        self._file: StoreFile | None = None
        self._medium: Medium | None = None
        self._making = asyncio.Lock()
        self._door = Doorkeeper() if self.options.admit_second else None
        self._counts: Counter[str] = Counter()
        self._closed = False

    async def open(self) -> None:
        with self._errors("open"):
            self._attach(await self._workers.run(lambda: store_file.find(self.options, map_slots=self._maps)))

    async def close(self) -> None:
        # The descriptors close with their last user: a call that hangs must never find its number given to another file.
        self._closed, self._file, self._medium = True, None, None

    async def exists(self, keys: Sequence[str]) -> int:
        file = await self._found_file()
        if file is None:
            leading = 0
        else:
            find = file.table.find
            leading = next((at for at, key in enumerate(keys) if find(key) is None), len(keys))
        if self._door is not None:
            self._door.ask(keys[leading:])
        return leading

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        return [found for found, _ in await self._read(keys, buffers, None)]

    async def read_checked(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> list[Verdict | None]:
        return [verdict if found else None for found, verdict in await self._read(keys, buffers, expected)]

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        return await self._write(keys, buffers, None)

    async def write_sealed(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> list[Stored]:
        return await self._write(keys, buffers, expected)

    async def _read(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected | None
    ) -> list[tuple[bool, Verdict | None]]:
        """-> whether each was found, and what it is if something is expected."""
        file, medium = await self._found_file(), self._medium
        if file is None or medium is None:
            self._counts["misses"] += len(keys)
            return [(False, None)] * len(keys)

        def read(part: range) -> list[tuple[bool, Verdict | None]]:
            found = [file.table.find(keys[at]) for at in part]
            here = [
                (at, slot)
                for at, slot in zip(part, found, strict=True)
                if slot is not None and slot.length == len(buffers[at])
            ]
            medium.read([Piece(slot.slot, buffers[at]) for at, slot in here])
            verdicts: Sequence[Verdict | None] = [None] * len(part)
            if expected is not None and here:
                verdicts = _of(expected, part).verify(buffers[part.start : part.stop])
            answers = [False] * len(part)
            now_ms = _now_ms()
            for at, slot in here:
                if file.table.unchanged(slot):  # else somebody has written into the slot meanwhile
                    file.table.touch(slot, now_ms)
                    answers[at - part.start] = True
            return list(zip(answers, verdicts, strict=True))

        answers = await self._in_parts("read", len(keys), read, expected)
        hits = sum(found for found, _ in answers)
        self._counts["hits"] += hits
        self._counts["misses"] += len(answers) - hits
        return answers

    async def _write(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected | None
    ) -> list[Stored]:
        if not keys:
            return []
        file = await self._made_file(max(map(len, buffers)))
        medium = self._medium
        assert medium is not None

        def write(part: range) -> list[Stored]:
            outcomes = []
            step = _whole_pages(_CLAIMED_AT_ONCE, expected)
            for start in range(part.start, part.stop, step):
                outcomes += write_some(range(start, min(start + step, part.stop)))
            return outcomes

        def write_some(part: range) -> list[Stored]:
            outcomes = [Stored.FAILED] * len(part)
            claims: list[tuple[int, Claim]] = []
            refusals = {at: self._refusal(file, keys[at], len(buffers[at])) for at in part}
            try:
                with file.table.changing():
                    for at, refusal in refusals.items():
                        claim = None if refusal else file.table.claim(keys[at], len(buffers[at]))
                        if isinstance(claim, Found):
                            outcomes[at - part.start] = Stored.PRESENT
                        elif claim is not None:
                            claims.append((at, claim))
                        else:
                            self._counts[refusal or "set_full"] += 1
                if claims and expected is not None:
                    seal_many(buffers[part.start : part.stop], *_of(expected, part)[:3])
                medium.write([Piece(claim.slot, buffers[at]) for at, claim in claims])
            except BaseException:
                with file.table.changing():
                    for _, claim in claims:
                        file.table.give_up(claim)
                raise
            now_ms = _now_ms()
            with file.table.changing():
                for at, claim in claims:
                    stays = file.table.publish(claim, now_ms)
                    outcomes[at - part.start] = Stored.WRITTEN if stays else Stored.PRESENT
            return outcomes

        outcomes = await self._in_parts("write", len(keys), write, expected)
        self._counts["written"] += outcomes.count(Stored.WRITTEN)
        self._counts["present"] += outcomes.count(Stored.PRESENT)
        return outcomes

    async def delete(self, keys: Sequence[str]) -> int:
        file = await self._found_file()
        if file is None:
            return 0

        def remove() -> int:
            with file.table.changing():
                return sum(map(file.table.remove, keys))

        return await self._workers.run(remove)

    async def quarantine(self, key: str) -> bool:
        removed = await self.delete([key]) > 0
        self._counts["quarantined"] += removed
        return removed

    async def lengths(self, keys: Sequence[str]) -> list[int | None]:
        file = await self._found_file()
        found = [None if file is None else file.table.find(key) for key in keys]
        return [None if slot is None else slot.length for slot in found]

    async def clear(self) -> None:
        file = await self._found_file()
        if file is not None:

            def clear() -> None:
                with file.table.changing():
                    file.table.clear()

            await self._workers.run(clear)

    async def keys(self) -> AsyncIterator[str]:
        file = await self._found_file()
        slots = 0 if file is None else file.table.slots
        for start in range(0, slots, _LISTED_AT_ONCE):
            assert file is not None
            part = range(start, min(start + _LISTED_AT_ONCE, slots))
            for key in await self._workers.run(file.table.keys, part):
                yield key

    def stats(self) -> Mapping[str, int | float | str]:
        file, medium = self._file, self._medium
        if file is None or medium is None:
            return {"slots": 0, **self._counts}
        geometry = file.geometry
        return {
            "io": medium.name, "slots": geometry.slots, "slot_bytes": geometry.slot_bytes, "file_bytes": geometry.file_bytes,
            **self._counts,
        }  # fmt: skip

    @property
    def _maps(self) -> bool:
        return self.options.kind != "slab"

    def _refusal(self, file: StoreFile, key: str, n_bytes: int) -> str:
        limit_bytes = self.options.write_bytes_per_day
        if n_bytes > file.geometry.slot_bytes:
            return "too_large"
        if self._door is not None and not self._door.admits(key):
            return "not_admitted"
        if limit_bytes and file.table.find(key) is None and not file.spend(n_bytes, limit_bytes):
            return "over_daily_limit"
        return ""

    async def _found_file(self) -> StoreFile | None:
        """Another process may have made it meanwhile."""
        if self._closed:
            raise BackendError(f"{self.url}: closed", retryable=False)
        if self._file is None:
            async with self._making:
                if self._file is None:
                    with self._errors("open"):
                        self._attach(
                            await self._workers.run(lambda: store_file.find(self.options, map_slots=self._maps))
                        )
        return self._file

    async def _made_file(self, object_bytes: int) -> StoreFile:
        file = await self._found_file()
        if file is None:
            async with self._making:
                if self._file is None:
                    with self._errors("make the store"):
                        options, maps = self.options, self._maps
                        self._attach(
                            await self._workers.run(lambda: store_file.make(options, object_bytes, map_slots=maps))
                        )
                file = self._file
        assert file is not None
        return file

    def _attach(self, file: StoreFile | None) -> None:
        if file is not None:
            self._file, self._medium = file, Mapped(file) if self._maps else Direct(file)

    async def _in_parts(
        self, what: str, n: int, work: Callable[[range], list[T]], expected: Expected | None
    ) -> list[T]:
        """``work`` on ``n`` objects, in a few threads -> its answers, in order; raises `BackendError` when all have ended."""
        step = _whole_pages(-(-n // THREADS), expected)
        cuts = [range(start, min(start + step, n)) for start in range(0, n, step)]
        answers = await asyncio.gather(*(self._workers.run(work, cut) for cut in cuts), return_exceptions=True)
        flat: list[T] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                with self._errors(what):
                    raise answer
            flat += answer
        return flat

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._counts["failed"] += 1
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise BackendError(f"{self.url}: {what}: {reason}") from error


def _whole_pages(n_objects: int, expected: Expected | None) -> int:
    """So many, or a few more: the objects of a page are judged together."""
    per_page = 1 if expected is None else len(expected.chunks)
    return max(1, -(-n_objects // per_page)) * per_page


def _of(expected: Expected, part: range) -> Expected:
    """What is expected of a part, which has whole pages."""
    per_page = len(expected.chunks)
    return expected._replace(page_hashes=expected.page_hashes[part.start // per_page : -(-part.stop // per_page)])


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
