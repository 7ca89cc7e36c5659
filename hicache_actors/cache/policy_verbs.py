"""Changing policies while the cache is open."""

from __future__ import annotations

from typing import Protocol

from hicache_actors.cache.asking import Asking
from hicache_actors.cache.handles import Inside
from hicache_actors.checks import choice
from hicache_actors.core import PolicyRefused
from hicache_actors.policy_config import EVICTIONS, WRITE_POLICIES, Eviction, WritePolicy
from hicache_actors.ranks.intents import SetEviction, SetStoreOn, SetWritePolicy
from hicache_actors.storage_config import STORE_ON, StoreOn


class OpenCache(Inside, Protocol):
    """What these verbs need of the cache."""

    _asking: Asking

    def _check_open(self) -> None: ...


class PolicyVerbs:
    """On the loop; with ranks: the leader's, agreed on all of them."""

    async def set_write_policy(self: OpenCache, policy: WritePolicy) -> PolicyRefused | None:
        """Save by another policy from now on -> None, or why not now; then nothing has changed.

        write_back is left only when nothing would be lost by it: refused while pages are dirty ("dirty_pages": `drain` first), or
        while host pages lack their prefix on the host ("host_gaps": `drain`, or `reset`).

        :raises ConfigError: no such policy.
        """
        self._check_open()
        choice("write_policy", policy, WRITE_POLICIES)
        return await self._asking.decided(lambda core: core.set_write_policy(policy), SetWritePolicy(policy))

    async def set_eviction(self: OpenCache, eviction: Eviction) -> PolicyRefused | None:
        """Evict in another order from now on -> None, or why not now ("changing": the last change is not through).

        The nodes are listed anew, a few thousand in each decision; until then those that wait go first, in the old order.  Times
        of last use count as times of arrival, and the other way round.

        :raises ConfigError: no such order.
        """
        self._check_open()
        choice("eviction", eviction, EVICTIONS)
        return await self._asking.decided(lambda core: core.set_eviction(eviction), SetEviction(eviction))

    async def set_store_on(self: OpenCache, store_on: StoreOn) -> PolicyRefused | None:
        """Store pages at another time from now on, as ``storage.store_on`` says it -> None, or why not now.

        With "publish" what the host holds and is not stored is backed up in the background, roots first, a job at a time.  With
        "host_evict" nothing more is stored before its turn comes; backups that run go on, and so do those that somebody waits for.
        No page is stored less surely for it, so this is refused in degraded mode only.

        :raises ConfigError: no such time.
        """
        self._check_open()
        choice("store_on", store_on, STORE_ON)
        return await self._asking.decided(lambda core: core.set_store_on(store_on), SetStoreOn(store_on))

    @property
    def _dirty(self: Inside) -> bool:
        """Pages would be lost with this cache that it owes to the storage, as they were to be saved or stored later."""
        state = self.core.state
        if not state.policies.stores_on_publish:
            return state.storage and self.core.unsaved_pages > 0
        return state.policies.protects_dirty and state.storage and state.residents.dirty_pages > 0
