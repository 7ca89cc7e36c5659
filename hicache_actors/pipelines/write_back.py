"""Write-back: device to host.

    events (the forwards that compute the pages) -> [submit a batch] -> channel -> [await it, count] -> RESULT

A copy is never submitted before the engine's events say that the pages have been computed; from then on the deadline runs.
If an event ends with an error nothing is copied, and RESULT says so: then the pages are of no use on the device either.

Most jobs wait for no event and are one batch.  They need no pipeline: a task costs the loop more than it has to do for such a copy,
and passes that are being computed by Python wait for the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio

from hicache_actors.core.words import StartWriteBack
from hicache_actors.cuda_ext.device import Ticket
from hicache_actors.pipelines.job import OpenJob
from hicache_actors.pipelines.movers import Movers
from hicache_actors.pipelines.observer import BatchEnd
from hicache_actors.runtime import Receiver, Sender, channel, hand_on
from hicache_actors.tiers.device import CopyEnded, SubmitWriteBack
from hicache_actors.tiers.host import Reserved
from hicache_actors.transfer.batch import Batch
from hicache_actors.transfer.completions import all_fired, end_of, fired

BATCHES_IN_FLIGHT = 2  # the stream has the next one before this one ends; more would only delay a stop


async def write_back(movers: Movers, start: StartWriteBack, job: OpenJob) -> None:
    if await all_fired(start.events) is not None:
        return job.result(0, sound=False)  # a forward has failed: what it should have computed is not there
    begun_s = anyio.current_time()
    movers.host.call(Reserved(start.target))
    copy = _Copy(movers, start, job)
    with anyio.CancelScope(deadline=movers.at(movers.deadlines.write_back_s)):
        await copy.run()
    copy.report(begun_s)


def copy_at_once(
    movers: Movers, start: StartWriteBack, batch: Batch, job: OpenJob, over: Callable[[Exception | None], None]
) -> None:
    """The whole job of one ``batch`` whose pages have been computed, without a task.  Loop thread only.

    ``over`` is called once, on the loop, when all has been answered: with None, or with the bug that a pipeline would have raised;
    then nothing need have been answered.  What the copy still touches is held by ``job``.  What goes wrong before the copy is
    submitted is raised here.
    """
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    movers.host.call(Reserved(start.target))
    copy = _Copy(movers, start, job)
    ticket = copy.begin(batch)
    ended = end_of(ticket)
    timer = loop.call_at(movers.at(movers.deadlines.write_back_s), ended.cancel)

    def answer(_: asyncio.Future[None]) -> None:
        timer.cancel()
        bug: Exception | None = None
        try:
            # Cancelled: it is late.  Failed: the cache has closed, and nobody hears of the copy any more.
            if not ended.cancelled() and ended.exception() is None:
                copy.count(batch, ticket.error)
            copy.report(begun_s)
        except Exception as error:
            bug = error
        over(bug)

    ended.add_done_callback(answer)


class _Copy:
    def __init__(self, movers: Movers, start: StartWriteBack, job: OpenJob) -> None:
        self.done_pages = 0
        self._movers, self._start, self._job = movers, start, job
        self._plan = movers.device.write_back_plan(start.source, start.target)

    async def run(self) -> None:
        batches = self._movers.batches(self._start.target)
        if len(batches) == 1:  # as with most jobs: stages would only cost turns of the loop
            await self._end(batches[0], self.begin(batches[0]))
            return
        async with anyio.create_task_group() as stages:
            sender, receiver = channel(BATCHES_IN_FLIGHT, tuple[Batch, Ticket])
            stages.start_soon(self._submit, batches, sender)
            stages.start_soon(self._collect, receiver, stages.cancel_scope)

    async def _submit(self, batches: list[Batch], sender: Sender[tuple[Batch, Ticket]]) -> None:
        async with sender:
            for batch in batches:
                if not await hand_on(sender, (batch, self.begin(batch))):
                    return

    async def _collect(self, receiver: Receiver[tuple[Batch, Ticket]], stages: anyio.CancelScope) -> None:
        async with receiver:
            async for batch, ticket in receiver:
                if not await self._end(batch, ticket):
                    stages.cancel()
                    return

    def begin(self, batch: Batch) -> Ticket:
        ticket = self._movers.device.call(SubmitWriteBack(self._plan, batch.number))
        self._job.hold(ticket)
        return ticket

    async def _end(self, batch: Batch, ticket: Ticket) -> bool:
        """Wait for a copy and count it -> whether it went well."""
        return self.count(batch, await fired(ticket))

    def count(self, batch: Batch, error: BaseException | None) -> bool:
        """A copy has ended -> whether it went well."""
        self._movers.device.tell(CopyEnded("write_back", self._movers.nbytes(batch.pages), error is not None))
        if error is not None:
            return False
        self.done_pages += batch.pages
        source = batch.of(self._start.source)
        self._movers.tell(BatchEnd(self._job.job, "write_back", source=source, target=batch.slots))
        return True

    def report(self, begun_s: float) -> None:
        self._movers.flows["write_back"].ended(self.done_pages, self._movers.nbytes(self.done_pages), begun_s)
        self._job.result(self.done_pages)
