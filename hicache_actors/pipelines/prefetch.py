"""Prefetch: storage to host.

    hash path -> query -> HIT -> (Core grants slots) -> [read + verify] x k -> count in prefix order -> RESULT

Batches are read several at once and counted in prefix order.  The fetch ends between batches: when nobody wants it any more,
at its deadline, at the first page that is missing, torn or foreign, or when all has arrived.  What has arrived in one run from
the front counts.  A read that hangs goes on in its task; its slots stay in limbo until it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import anyio
from anyio.lowlevel import checkpoint

from hicache_actors.core.words import StartPrefetch
from hicache_actors.pipelines.job import OpenJob
from hicache_actors.pipelines.movers import Movers
from hicache_actors.pipelines.observer import BatchEnd
from hicache_actors.tiers.host import Reserved
from hicache_actors.tiers.storage import Call, Chains, Store
from hicache_actors.transfer.batch import Batch


class Found(NamedTuple):
    """What a lookup has found: the first ``pages`` of ``hashes``.  ``deadline``: of the whole fetch, on the loop's clock."""

    hashes: tuple[bytes, ...]
    chains: Chains
    pages: int
    deadline: float


def look_up(
    movers: Movers, store: Store, start: StartPrefetch, job: OpenJob, found: Callable[[Found | None], None]
) -> None:
    """Ask the store at once, without a task: who finds nothing, as most new prompts do, waits for its answer alone.

    ``found`` is called once, on the loop: with None if the path takes long to hash, and nothing has been asked yet.
    """
    deadline = movers.at(movers.prefetch_limit_s(start.path.pages, start.deadline_s))
    hashed = movers.hash_here(start.path)
    if hashed is None:
        found(None)
        return
    hashes, chains, query = _ask(store, start, job, hashed)
    if query is None:
        found(Found(hashes, chains, 0, deadline))
        return

    def give_up() -> None:
        query.withdraw()
        query.give_up()

    timer = asyncio.get_running_loop().call_at(deadline, give_up)

    def answered(pages: int) -> None:
        timer.cancel()
        found(Found(hashes, chains, pages, deadline))

    query.when_answered(answered)


async def prefetch(movers: Movers, start: StartPrefetch, job: OpenJob, *, store: Store, found: Found | None) -> None:
    """``found``: by a lookup that has been answered; None: it is made here."""
    if found is None:
        found = await _hash_and_look_up(movers, store, start, job)
    job.hit(found.pages)
    slots = await job.granted()
    if slots is None:
        return
    begun_s = anyio.current_time()
    movers.host.call(Reserved(slots))
    fetch = _Fetch(movers, store, start.priority, job, found, movers.batches(slots, store.batch_pages))
    with anyio.CancelScope(deadline=found.deadline):
        await fetch.run()
    fetch.report(begun_s)


async def _hash_and_look_up(movers: Movers, store: Store, start: StartPrefetch, job: OpenJob) -> Found:
    deadline = movers.at(movers.prefetch_limit_s(start.path.pages, start.deadline_s))
    hashes: tuple[bytes, ...] = ()
    chains, pages = store.chains(()), 0
    with anyio.CancelScope(deadline=deadline):
        hashes, chains, query = _ask(store, start, job, await movers.hash_path(start.path))
        if query is not None:
            pages = await query.answer()
    return Found(hashes, chains, pages, deadline)


def _ask(
    store: Store, start: StartPrefetch, job: OpenJob, hashed: tuple[bytes, ...]
) -> tuple[tuple[bytes, ...], Chains, Call[int] | None]:
    hashes, chains = hashed[start.path.first_page :], store.chains((hashed,))
    if not hashes:
        return hashes, chains, None
    query = store.query(hashes, chains=chains, priority=start.priority)
    query.when_answered(job.hit)  # Core need not wait until a pipeline has its turn
    return hashes, chains, query


class _Fetch:
    """The reading half, after the grant.

    A call to the store runs by itself, so the reads need no tasks: whatever the last answer leaves to do is done in it.
    """

    def __init__(
        self, movers: Movers, store: Store, priority: int, job: OpenJob, found: Found, batches: list[Batch]
    ) -> None:
        self._movers, self._store, self._priority, self._job = movers, store, priority, job
        self._hashes, self._chains, self._batches = found.hashes, found.chains, batches
        self._good: dict[int, int] = {}  # batch -> leading pages that are right
        self._waiting = iter(range(len(batches)))  # in prefix order
        self._end = len(batches)  # batches from here on are of no use
        self._under_way: set[Call[int]] = set()
        self._over = asyncio.Event()
        self._bug: Exception | None = None

    async def run(self) -> None:
        """Until all has been read, or nobody wants the rest."""
        self._job.when_stopped(self._over.set)
        try:
            for _ in range(min(self._store.read_concurrency, len(self._batches))):
                self._read_next()
                # The call has been made before the next is prepared: its thread need not wait for that.
                await checkpoint()
            await self._over.wait()
        finally:
            self._over.set()
            for reading in self._under_way:
                reading.withdraw()
        if self._bug is not None:
            raise self._bug

    def _read_next(self) -> None:
        number = next(self._waiting, self._end)
        if number < self._end and not self._over.is_set():
            batch = self._batches[number]
            hashes = self._hashes[batch.first_page : batch.first_page + batch.pages]
            reading = self._store.read(hashes, batch.slots, self._wanted, chains=self._chains, priority=self._priority)
            self._job.hold(reading)
            self._under_way.add(reading)
            reading.when_answered(partial(self._answered, number, reading))
        elif not self._under_way:
            self._over.set()

    def _answered(self, number: int, reading: Call[int], good: int) -> None:
        self._under_way.discard(reading)
        if self._over.is_set():
            return
        self._good[number] = good
        if good < self._batches[number].pages:
            self._end = min(self._end, number + 1)
        self._job.arrived_pages = self._leading()
        try:
            self._read_next()
        except Exception as error:  # a bug: the pipeline's, not the store's whose answer this is
            self._bug = error
            self._over.set()

    def _wanted(self) -> bool:
        return not self._job.stopping and not self._job.answered

    def _leading(self) -> int:
        pages = 0
        for number, batch in enumerate(self._batches):
            good = self._good.get(number, 0)
            pages += good
            if good < batch.pages:
                break
        return pages

    def report(self, begun_s: float) -> None:
        pages = self._leading()
        for batch in self._batches:
            part = batch.head(pages - batch.first_page)
            if part.pages:
                hashes = self._hashes[part.first_page : part.first_page + part.pages]
                self._movers.tell(BatchEnd(self._job.job, "prefetch", target=part.slots, hashes=hashes))
        self._movers.flows["prefetch"].ended(pages, self._movers.nbytes(pages), begun_s)
        self._job.result(pages)
