"""Attach: a store is opened beside the one in use.

    open -> RESULT (ready, or which rank is not, and why) -> used, on all ranks in the same step, or closed

RESULT comes by the deadline, whatever hangs in the store.
"""

from __future__ import annotations

import anyio

from hicache_actors.core.words import OPENED, NotOpened, StartAttach, not_opened
from hicache_actors.pipelines.job import OpenJob
from hicache_actors.pipelines.movers import Movers


async def attach(movers: Movers, start: StartAttach, job: OpenJob) -> None:
    storage = movers.storage
    why: NotOpened | None = "stopped"
    async with anyio.create_task_group() as group:
        group.start_soon(_stop, job, group.cancel_scope)
        why = await storage.make_ready(start.number, start.url, start.deadline_s)
        group.cancel_scope.cancel()
    job.result(OPENED if why is None else not_opened(movers.rank, why))
    if not await job.settled():
        storage.drop(start.number)


async def _stop(job: OpenJob, opening: anyio.CancelScope) -> None:
    await job.stopped()
    opening.cancel()
