"""Load: host to device, layer by layer.

    events -> submit one copy a layer -> (each layer wakes its waiters, from the copy thread) -> RESULT

A load succeeds as a whole or not at all: half a layer set is of no use to attention.
"""

from __future__ import annotations

import anyio

from hicache_actors.core.words import SLOT_BYTES, StartLoad
from hicache_actors.errors import TransferError
from hicache_actors.pipelines.job import OpenJob
from hicache_actors.pipelines.movers import Movers
from hicache_actors.pipelines.observer import BatchEnd
from hicache_actors.tiers.device import CopyEnded, SubmitLoad
from hicache_actors.transfer.completions import all_fired, fired


async def load(movers: Movers, start: StartLoad, job: OpenJob) -> None:
    error = await all_fired(start.events)
    if error is not None:
        job.waits.fail(error)
        return job.result(0)
    begun_s = anyio.current_time()
    plan = movers.device.load_plan(start.source, start.target)
    last = movers.device.call(SubmitLoad(plan, job.waits, job.hold))
    with anyio.CancelScope(deadline=movers.at(movers.load_limit_s)) as limit:
        await fired(last)  # streams keep their order: the last layer ends last
    if limit.cancelled_caught:
        job.waits.fail(TransferError(f"load job {job.job} missed its deadline of {movers.load_limit_s} s"))
    failed = job.waits.error is not None
    movers.device.tell(CopyEnded("load", plan.nbytes, failed))
    if not failed:
        for batch in movers.batches(start.target):
            movers.tell(BatchEnd(job.job, "load", source=batch.of(start.source), target=batch.slots))
    pages = 0 if failed else len(start.target) // SLOT_BYTES
    movers.flows["load"].ended(pages, movers.nbytes(pages), begun_s)
    job.result(pages)
