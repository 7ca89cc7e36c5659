"""One store, attached for a time: its backend, the calls to it, and the jobs that are about it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any

import anyio
import msgspec

from hicache_actors.backends.backend import Backend, Stored, keys_before
from hicache_actors.backends.objects import Expected, Verdict, seal_many, verify_many
from hicache_actors.config import StorageConfig
from hicache_actors.core.words import Slots, pack_slots, unpack_slots
from hicache_actors.errors import BackendError, HiCacheError
from hicache_actors.keys.scheme import KeyScheme
from hicache_actors.masking import masked
from hicache_actors.runtime import Workers
from hicache_actors.tiers.host import HostTier
from hicache_actors.tiers.storage.call import Call
from hicache_actors.tiers.storage.calls import Calls
from hicache_actors.tiers.storage.chains import Chains
from hicache_actors.tiers.storage.flights import Flights
from hicache_actors.tiers.storage.neighbours import HitWatch, listed, lists_names, look_at
from hicache_actors.tiers.storage.pages import of_pages, sampling
from hicache_actors.tiers.storage.staging import StagedPages, Staging
from hicache_actors.tiers.storage.threads import StoreThreads
from hicache_actors.tiers.storage.words import CallBegun, Counted, Direction, Note


class Source(msgspec.Struct, frozen=True):
    """A store that has been found fit, and not been opened yet.  ``threads``: those lent to a backend that was made from a URL."""

    url: str
    backend: Backend
    keys: KeyScheme
    threads: StoreThreads


class OpenedLate(BackendError):
    """It has not opened by its deadline."""


class Store:
    """Written by its tier alone: in the tier's methods, and when calls begin and end.  Loop thread only.

    ``workers`` verify and seal objects, and copy pages to staging slots and back where ``staging`` is needed.  A job is bound to
    the store that was attached when Core opened it.
    """

    def __init__(
        self,
        source: Source,
        config: StorageConfig,
        host: HostTier,
        staging: Staging | None,
        workers: Workers,
        note: Note,
        log: Any,
    ) -> None:
        self.url = masked(source.url)  #: for those who look
        self.backend, self.keys, self.threads = source.backend, source.keys, source.threads
        self.read_concurrency, self.batch_pages = config.read_concurrency, self.backend.batch_pages
        self.closed = False
        self._host, self._staging, self._workers, self._note = host, staging, workers, note
        self._page_bytes = host.memory.layout.object_bytes
        self._has_headers = host.memory.layout.header_bytes > 0
        spans = host.memory.layout.object_layout.chunk_spans if self._has_headers else ()
        self.chunk_bytes = tuple(
            end - start for start, end in spans
        )  #: of a page's objects; empty if they are not verified
        self._checksums = sampling(config)
        self._log = log.bind(url=self.url)
        self._quiet = asyncio.Event()
        self._jobs = 0
        self.calls = Calls(config, staging, note, self._log, self._look_quiet)
        self._flights = Flights()
        self._putting_away: set[str] = set()
        self.hits = HitWatch(self._log)

    # -- for pipelines -------------------------------------------------------------------------------------------------

    def chains(self, paths: Sequence[Sequence[bytes]]) -> Chains:
        """For the calls of a job about pages of these ``paths``: the hashes of each from the first page of its prompt on."""
        return Chains(self.keys.keys, paths)

    def query(self, hashes: Sequence[bytes], *, chains: Chains | None = None, priority: int = 0) -> Call[int]:
        """Length of the leading run that is stored; 0 if the store fails."""
        keys = self.keys.keys(hashes)

        async def ask() -> int:
            _tell(chains)
            return max(0, min(index(await self.backend.exists(keys)), len(keys))) // len(self.keys.chunks)

        async def count(found: int) -> int:
            self.hits.note(found)
            self._note(Counted("lookups", 1))
            if found:
                self._note(Counted("lookup_hits", 1))
            return found

        return self.calls.start(Call("query", 0, priority=priority), "query", ask, count)

    def read(
        self,
        hashes: Sequence[bytes],
        slots: Slots,
        wanted: Callable[[], bool],
        *,
        chains: Chains | None = None,
        priority: int = 0,
    ) -> Call[int]:
        """Read and verify a batch -> its leading pages that are right.  Skipped if not ``wanted`` when its turn comes."""
        keys, objects_a_page = self.keys.keys(hashes), len(self.keys.chunks)
        nbytes = len(hashes) * self._page_bytes
        call = Call("read", 0, nbytes=nbytes, pages=len(hashes), priority=priority, wanted=wanted)
        staged, objects = self._place("read", call, slots)

        async def read() -> list[bool]:
            _tell(chains)
            return list(await self.backend.read(keys, objects()))[: len(keys)]

        async def verify(found: list[bool]) -> int:
            pages = next((at for at, here in enumerate(found) if not here), len(found)) // objects_a_page
            return await count(await self._verify(hashes[:pages], objects()[: pages * objects_a_page]))

        async def read_checked() -> list[Verdict | None]:
            _tell(chains)
            return list(await self.backend.read_checked(keys, objects(), self._expected(hashes)))[: len(keys)]

        async def count(verdicts: Sequence[Verdict | None]) -> int:
            good = self._judge(keys, verdicts)
            if staged is not None and good:
                await self._workers.run(staged.scatter, good)
            self._note(Counted("read_pages", good))
            return good

        if self._has_headers and self.backend.checks:
            return self.calls.start(call, "read", read_checked, count)
        return self.calls.start(call, "read", read, verify)

    def seal(self, hashes: Sequence[bytes], slots: Slots) -> Call[bool]:
        """Write checksum and header of each page into its slot, off the loop.

        Pages that are staged are sealed when they are, and those of a backend that seals when they are written.
        """
        call = Call("seal", False)
        if not self._has_headers or self._staging is not None or self.backend.checks:
            call.settle(True)
            call.end()
            return call

        async def seal() -> bool:
            await self._seal(hashes, self._host.objects(slots))
            return True

        return self.calls.compute(call, seal)

    def write(
        self, hashes: Sequence[bytes], slots: Slots, wanted: Callable[[], bool], *, chains: Chains | None = None
    ) -> Call[Sequence[Stored]]:
        """Store pages that have been sealed -> what became of each, or () if the store fails.

        What another call writes now is left to it.
        """
        keys, objects_a_page = self.keys.keys(hashes), len(self.keys.chunks)
        names = keys[::objects_a_page]  # of the pages: the first of its objects stands for each
        flight = self._flights.start(names)
        own_slots, own_hashes = _pick(slots, flight.mine), [hashes[at] for at in flight.mine]
        own_keys = [key for at in flight.mine for key in keys[at * objects_a_page : (at + 1) * objects_a_page]]
        nothing: Sequence[Stored] = ()
        nbytes = len(flight.mine) * self._page_bytes
        call = Call("write", nothing, nbytes=nbytes, pages=len(flight.mine), wanted=wanted)
        call.when_answered(lambda _: flight.land({}))  # who hangs, or is refused, does not keep others from trying
        staged, objects = self._place("write", call, own_slots)

        async def stage(staged: StagedPages) -> None:
            await self._workers.run(staged.gather)
            if self._has_headers and not self.backend.checks:
                await self._seal(own_hashes, objects())

        async def store() -> Sequence[Stored]:
            _tell(chains)
            if self._has_headers and self.backend.checks:
                return await self.backend.write_sealed(own_keys, objects(), self._expected(own_hashes))
            return await self.backend.write(own_keys, objects())

        async def write() -> dict[int, Stored]:
            answers = of_pages([Stored(answer) for answer in await store()], objects_a_page)
            outcomes = dict(zip(flight.mine, answers, strict=False))
            flight.land({names[at]: outcome for at, outcome in outcomes.items()})
            self._note(Counted("written_pages", answers.count(Stored.WRITTEN)))
            self._note(Counted("present_pages", answers.count(Stored.PRESENT)))
            return outcomes

        async def join(outcomes: dict[int, Stored]) -> Sequence[Stored]:
            if flight.theirs:
                await asyncio.wait({other.landed for other in flight.theirs.values()})  # each lands by its own deadline
                joined = {
                    at: other.landed.result().get(names[at], Stored.FAILED) for at, other in flight.theirs.items()
                }
                self._note(Counted("joined_pages", sum(outcome is not Stored.FAILED for outcome in joined.values())))
                outcomes |= joined
            return [outcomes.get(at, Stored.FAILED) for at in range(len(names))]

        if not own_keys:
            return self.calls.compute(call, lambda: join({}))
        return self.calls.start(call, "write", write, join, None if staged is None else partial(stage, staged))

    def named(self) -> Store:
        """This store for one job: it goes on by the names of now, whatever weights the model gets meanwhile."""
        return copy.copy(self)

    def enter(self) -> None:
        """A job is about this store."""
        self._jobs += 1

    def leave(self) -> None:
        self._jobs -= 1
        self._look_quiet()

    # -- for the tier --------------------------------------------------------------------------------------------------

    async def open(self, deadline_s: float) -> None:
        """Raises `BackendError` or `ConfigError`, whatever the backend raises, also if it has not opened by the deadline."""
        with anyio.move_on_after(deadline_s) as limit:
            try:
                await self.backend.open()
                for memory in self._object_memories():
                    await self.backend.register_memory(memory)
            except HiCacheError:
                raise
            except Exception as error:
                raise BackendError(f"open: {type(error).__name__}: {error}", retryable=False) from error
        if limit.cancelled_caught:
            raise OpenedLate(f"open {self.url}: no answer within {deadline_s} s")

    def _object_memories(self) -> list[memoryview]:
        """Where the objects lie that calls are about."""
        pools = [self._host.memory] if self._staging is None else [pool.memory for pool in self._staging.pools.values()]
        return [pool.objects_memory for pool in pools if pool.objects_memory is not None]

    def look_around(self, most: int) -> Call[bool]:
        """List up to ``most`` names, and warn of pages of the same model that cannot be shared."""

        async def names() -> list[str]:
            return await listed(self.backend, most)

        async def tell(found: list[str]) -> bool:
            if found or lists_names(self.backend):
                self.hits.found(await self._workers.run(look_at, found, self.keys))
            return True

        return self.calls.start(Call("list", False), "query", names, tell)

    async def run_down(self, timeout_s: float) -> None:
        """Let the jobs that are about it end, then cut it off: no call is made any more, and nobody waits for one."""
        with anyio.move_on_after(timeout_s):
            while self._jobs or self.calls.open:
                self._quiet.clear()
                await self._quiet.wait()
        self.calls.cut_off()

    async def close(self, timeout_s: float) -> list[str]:
        """Close the backend and its threads -> what has not ended.  Idempotent; calls that hang hang on."""
        if self.closed:
            return []
        self.closed = True
        self.calls.cut_off()
        left: list[str] = []
        with anyio.move_on_after(timeout_s) as limit:
            try:
                await self.backend.close()
            except Exception as error:
                self._log.warning("backend_close_failed", exc_info=error)
        if limit.cancelled_caught:
            left.append("the backend's close")
        left += await self.threads.aclose(timeout_s)
        return left

    def stats(self) -> Mapping[str, int | float | str]:
        try:
            return self.backend.stats()
        except Exception as error:
            return {"stats_failed": f"{type(error).__name__}: {error}"}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _place(
        self, direction: Direction, call: Call[Any], slots: Slots
    ) -> tuple[StagedPages | None, Callable[[], Sequence[memoryview]]]:
        """Where the pages of a call are objects: in staging slots, which it has from its turn on, or in their own."""
        if self._staging is not None:
            staged = StagedPages(call, self._staging.pools[direction], self._host.memory, slots)
            return staged, staged.objects
        objects = self._host.objects(slots)
        return None, lambda: objects

    async def _seal(self, hashes: Sequence[bytes], objects: Sequence[memoryview]) -> None:
        self._note(CallBegun("seal"))
        await self._workers.run(seal_many, objects, self.keys.namespace_digest, hashes, self.keys.chunks)

    def _expected(self, hashes: Sequence[bytes]) -> Expected:
        return Expected(self.keys.namespace_digest, hashes, self.keys.chunks, self._checksums)

    async def _verify(self, hashes: Sequence[bytes], objects: Sequence[memoryview]) -> Sequence[Verdict]:
        if not self._has_headers:
            return [Verdict.OK] * len(objects)
        return await self._workers.run(verify_many, objects, *self._expected(hashes))

    def _judge(self, keys: Sequence[str], verdicts: Sequence[Verdict | None]) -> int:
        """Put away what is bad -> the leading pages whose objects all are what they should be."""
        if verdicts.count(Verdict.OK) == len(verdicts):
            return len(verdicts) // len(self.keys.chunks)
        good = next(at for at, verdict in enumerate(verdicts) if verdict is not Verdict.OK)
        for key, verdict in zip(keys, verdicts, strict=False):
            if verdict in (Verdict.CORRUPT, Verdict.EMPTY):
                self.quarantine(key)
            elif verdict is Verdict.FOREIGN:
                self._note(Counted("foreign_pages", 1))
        return good // len(self.keys.chunks)

    def quarantine(self, key: str) -> None:
        """Take a bad object out of sight, if the backend can.  One that is being put away just now has been counted."""
        if key in self._putting_away:
            return
        self._putting_away.add(key)
        self._log.warning("object_quarantined", key=key)
        self._note(Counted("corrupt_pages", 1))

        async def quarantine() -> bool:
            return await self.backend.quarantine(key)

        call = self.calls.start(Call("quarantine", False), "query", quarantine, _as_is)
        call.add_callback(lambda: self._putting_away.discard(key))

    def _look_quiet(self) -> None:
        if not self._jobs and not self.calls.open:
            self._quiet.set()


def _tell(chains: Chains | None) -> None:
    """In the task of a call: what its backend may ask for."""
    keys_before.set(None if chains is None else chains.before)


async def _as_is(value: Any) -> Any:
    return value


def _pick(slots: Slots, positions: Sequence[int]) -> Slots:
    every = unpack_slots(slots)
    return slots if len(positions) == len(every) else pack_slots(every[at] for at in positions)
