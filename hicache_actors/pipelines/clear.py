"""Clear: this rank's objects are removed from the store, while requests run.

    list a few names -> those of this rank -> remove them -> ... -> RESULT (removed, or why not)

RESULT comes by the deadline, whatever hangs in the store.  What other ranks, models or deployments keep there stays.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import anyio

from hicache_actors.backends.backend import Backend
from hicache_actors.core.words import OPENED, NotOpened, StartClear, not_opened
from hicache_actors.pipelines.job import OpenJob
from hicache_actors.pipelines.movers import Movers
from hicache_actors.runtime import bind_log
from hicache_actors.tiers.storage import Store
from hicache_actors.tiers.storage.call import Call
from hicache_actors.tiers.storage.neighbours import lists_names
from hicache_actors.tiers.storage.scrub import Names, listing

_REMOVED_AT_ONCE: Final = 64


async def clear(movers: Movers, store: Store, start: StartClear, job: OpenJob) -> None:
    """``job.arrived_pages`` counts the objects that have been removed here."""
    why: NotOpened | None = "stopped"
    async with anyio.create_task_group() as group:
        group.start_soon(_stop, job, group.cancel_scope)
        with anyio.move_on_after(start.deadline_s) as limit:
            why = await _remove_all(store, job)
        if limit.cancelled_caught:
            why = "late"
        group.cancel_scope.cancel()
    log = bind_log(part="storage", url=store.url)
    if why is None:
        log.info("storage_cleared", objects=job.arrived_pages)
    else:
        log.warning("storage_not_cleared", why=why, objects=job.arrived_pages)
    job.result(OPENED if why is None else not_opened(movers.rank, why))


def can_be_cleared(backend: Backend) -> bool:
    """Whether it lists its objects, and so can be told to remove those of a rank."""
    return lists_names(backend)


async def _remove_all(store: Store, job: OpenJob) -> NotOpened | None:
    if not store.keys.writes:
        return None  # another rank does
    if not can_be_cleared(store.backend):
        return "refused"
    names = Names(store.keys)
    async for some in listing(store):
        if some is None:
            return "failed"
        own = [name for name in some if names.find(name) is not None]
        for at in range(0, len(own), _REMOVED_AT_ONCE):
            remove = partial(store.backend.delete, own[at : at + _REMOVED_AT_ONCE])
            nothing: int | None = None
            removed = await store.calls.start(Call("delete", nothing), "query", remove, _as_is).answer()
            if removed is None:
                return "failed"
            job.arrived_pages += removed
    return None


async def _stop(job: OpenJob, removing: anyio.CancelScope) -> None:
    await job.stopped()
    removing.cancel()


async def _as_is(value: Any) -> Any:
    return value
