"""Backup: host to storage.

    hash paths -> seal a batch (checksum and header, off the loop) -> store it -> RESULT

Prefix order, as many batches at once as the store takes writes (`storage.write_concurrency`), and one that waits for its turn, so
that no thread of the store waits for the loop.  The first failure ends the job: no batch begins after it.  RESULT counts the
leading pages that the store has acknowledged, written now or present before.

What was under way beside a batch that failed goes on, and may be stored: an object behind a hole.  A lookup never counts it, for it
counts the leading run only; the next try finds it present, or the store evicts it like any other.

A call to the store runs by itself, so the two stages need no tasks and no channel: each would cost turns of the loop between one
batch and the next, while the disk has nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import anyio

from hicache_actors.backends.backend import Stored
from hicache_actors.core.words import SLOT_BYTES, Path, StartBackup
from hicache_actors.pipelines.job import OpenJob
from hicache_actors.pipelines.movers import Movers
from hicache_actors.pipelines.observer import BatchEnd
from hicache_actors.tiers.storage import Call, Store
from hicache_actors.transfer.batch import Batch


async def backup(movers: Movers, store: Store, start: StartBackup, job: OpenJob) -> None:
    if not store.keys.writes:
        job.result(len(start.source) // SLOT_BYTES)  # MIN takes the answer of the rank that does
        return
    begun_s = anyio.current_time()
    save = _Save(movers, store, job, movers.batches(start.source, store.batch_pages))
    with anyio.CancelScope(deadline=movers.at(movers.deadlines.backup_s)):
        for path in start.paths:
            save.add(path, await movers.hash_path(path))
        if save.named:
            await save.run()
    movers.flows["backup"].ended(save.acknowledged_pages, movers.nbytes(save.acknowledged_pages), begun_s)
    job.result(save.acknowledged_pages)


class _Save:
    def __init__(self, movers: Movers, store: Store, job: OpenJob, batches: list[Batch]) -> None:
        self.hashes: tuple[bytes, ...] = ()
        self.acknowledged_pages = 0
        self._failed = False
        self._paths: list[tuple[bytes, ...]] = []
        self._chains = store.chains(self._paths)
        self._movers, self._store, self._job, self._batches = movers, store, job, batches

    def add(self, path: Path, hashed: tuple[bytes, ...]) -> None:
        """The next pages, with the hashes up to their end."""
        self.hashes += hashed[path.first_page :]
        self._paths.append(hashed)

    @property
    def named(self) -> bool:
        """Whether every page has its hash."""
        return len(self.hashes) == sum(batch.pages for batch in self._batches)

    async def run(self) -> None:
        """Until all is stored, or what stands before the first failure is known."""
        under_way: deque[tuple[Batch, Call[Sequence[Stored]]]] = deque()
        sealing = self._seal(self._batches[0])
        try:
            for number, batch in enumerate(self._batches, start=1):
                if not await sealing.answer():
                    break
                if number < len(self._batches):
                    sealing = self._seal(self._batches[number])
                while under_way and under_way[-1][1].waiting:
                    if not await self._acknowledge(*under_way.popleft()):
                        return
                under_way.append((batch, self._write(batch)))
            while under_way:
                if not await self._acknowledge(*under_way.popleft()):
                    return
        finally:
            for _, writing in under_way:
                writing.withdraw()

    def _seal(self, batch: Batch) -> Call[bool]:
        sealing = self._store.seal(self._names(batch), batch.slots)
        self._job.hold(sealing)  # it writes headers into the slots
        return sealing

    def _write(self, batch: Batch) -> Call[Sequence[Stored]]:
        writing = self._store.write(self._names(batch), batch.slots, self._wanted, chains=self._chains)
        self._job.hold(writing)
        writing.when_answered(partial(self._answered, batch.pages))
        return writing

    def _answered(self, pages: int, outcomes: Sequence[Stored]) -> None:
        """At once, so that none begins behind one that has failed."""
        self._failed |= len(outcomes) < pages or Stored.FAILED in outcomes

    async def _acknowledge(self, batch: Batch, writing: Call[Sequence[Stored]]) -> bool:
        """The next batch in prefix order -> whether all of it is stored now."""
        outcomes = await writing.answer()
        stored = 0
        while stored < len(outcomes) and outcomes[stored] is not Stored.FAILED:
            stored += 1
        self.acknowledged_pages += stored
        part = batch.head(stored)
        if stored:
            self._movers.tell(
                BatchEnd(
                    self._job.job,
                    "backup",
                    source=part.slots,
                    hashes=self._names(part),
                    outcomes=tuple(outcomes[:stored]),
                )
            )
        return stored == batch.pages

    def _wanted(self) -> bool:
        return not self._failed and not self._job.answered

    def _names(self, batch: Batch) -> tuple[bytes, ...]:
        return self.hashes[batch.first_page : batch.first_page + batch.pages]
