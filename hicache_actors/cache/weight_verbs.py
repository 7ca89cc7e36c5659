"""Other weights while the cache is open: for online updates, as reinforcement learning makes them."""

from __future__ import annotations

import secrets
from typing import Protocol

from hicache_actors.cache.assembly import Parts
from hicache_actors.cache.policy_verbs import OpenCache
from hicache_actors.checks import text
from hicache_actors.errors import UsageError
from hicache_actors.ranks.intents import AdvanceEpoch


class WeightsCache(OpenCache, Protocol):
    """What this verb needs of the cache."""

    _parts: Parts


class WeightVerbs:
    """On the loop; with ranks: the leader's, agreed on all of them."""

    async def advance_epoch(self: WeightsCache, weights: str | None = None) -> str:
        """The model has other weights from here on -> their name: the decision is made, on all ranks in the same step.

        Device and host are forgotten as by `reset`, and what was stored of the old weights is not found any more, at whatever
        store; it stays there, for caches that still run with those.  Running leases keep their pages and publish nothing more.
        Call it between the last forward with the old weights and the first with the new ones.

        ``weights`` is what ``model.weights`` must say when the cache is opened again with them, and in all other instances that
        have made the same update and shall share.  Default: a new name, which nobody shares.

        :raises ConfigError: an empty name.
        :raises UsageError: raw objects are stored, whose names do not tell weights apart: detach the store, and clear it.
        """
        self._check_open()
        parts = self._parts
        if weights is None:
            weights = f"{parts.config.model.weights or 'epoch'}+{secrets.token_hex(8)}"
        text("weights", weights, fix="give a fingerprint of the weights, or an epoch such as 'v2'")
        store = parts.storage_tier.store
        if store is not None and not store.keys.tells_weights:
            raise UsageError("names of raw objects do not tell weights apart: detach the store first, and clear it")
        name = weights
        await self._asking.decided(lambda core: core.advance_epoch(name), AdvanceEpoch(name))
        return name
