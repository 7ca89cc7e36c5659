"""Emptying the store while the cache is open."""

from __future__ import annotations

from typing import Final, Protocol

from hicache_actors.backends.backend import Backend
from hicache_actors.cache import arguments
from hicache_actors.cache.assembly import Parts
from hicache_actors.cache.policy_verbs import OpenCache
from hicache_actors.core import Core
from hicache_actors.core.words import Cleared
from hicache_actors.errors import BackendError, UsageError
from hicache_actors.pipelines.clear import can_be_cleared
from hicache_actors.pipelines.job import OpenJob
from hicache_actors.ranks.intents import AskClear

_WHY: Final = {
    "refused": "the store cannot list its objects",
    "failed": "the store has failed",
    "late": "not all is removed in time",
    "stopped": "it was given up",
    "given_up": "the cache of a rank is failing",
    "degraded": "the cache has degraded, and uses no storage any more",
}


class ClearedCache(OpenCache, Protocol):
    """What this verb needs of the cache."""

    _parts: Parts

    @property
    def _agreeing_s(self) -> float: ...

    def _check_switch(self, verb: str, store: str | Backend = "") -> None: ...

    def open_job(self, job: int) -> OpenJob: ...


class ClearVerbs:
    """On the loop; with ranks: the leader's, agreed on all of them."""

    async def clear_storage(self: ClearedCache, deadline_s: float = 60.0) -> int:
        """Remove what this deployment has stored, while requests go on -> the objects that this rank has removed.

        Every object goes that this cache would read: those of its model, weights and keys, whoever has stored them.  What else is
        in the store stays.  With ranks each removes its own.  Device and host keep their pages, which are stored again as they are
        after `attach_storage`; `detach_storage` first, or `reset`, if they shall not.  Requests that are fetching get a
        shorter prefix.  Cancelling this wait ends the removal where it stands.

        :raises UsageError: there is no storage, or one that cannot list its objects: then `advance_epoch` hides them all.
        :raises BackendError: not all has been removed within ``deadline_s``, on this rank or on one that is named.  Nothing counts
            as stored then either, so it can be called again.
        """
        self._check_open()
        limit_s = arguments.seconds("deadline_s", deadline_s)
        self._check_switch("clear_storage")
        store = self._parts.storage_tier.store
        if store is None:
            raise UsageError("clear_storage: no storage is attached")
        if not can_be_cleared(store.backend):
            raise UsageError(
                f"clear_storage: {store.url} cannot list its objects; clear it by its own tools, or hide them by advance_epoch"
            )

        def answer(outcome: Cleared | None) -> tuple[Cleared, int] | None:
            """While the job is open still."""
            if outcome is None:
                return None
            return outcome, self.open_job(outcome.job).arrived_pages if outcome.job else 0

        outcome = await self._asking.ask(
            lambda core: core.clear_storage(limit_s),
            answer,
            Core.cancel_waiter,
            limit_s + self._agreeing_s,
            told=lambda number: AskClear(number, limit_s),
        )
        if outcome is None:
            raise BackendError(f"clear {store.url}: no step within {limit_s} s")
        cleared, objects = outcome
        if cleared.refused == "no_storage":
            raise UsageError("clear_storage: no storage is attached")
        if cleared.refused is not None:
            where = "" if cleared.rank is None else f" on rank {cleared.rank}"
            raise BackendError(
                f"clear {store.url}: {_WHY[cleared.refused]}{where}; {objects} objects of this rank have gone"
            )
        return objects
