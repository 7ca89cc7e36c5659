"""The three lanes of a store, made from its settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hicache_actors.config import StorageConfig
from hicache_actors.runtime.breaker import Breaker, BreakerState
from hicache_actors.tiers.storage.lane import Lane
from hicache_actors.tiers.storage.staging import Staging
from hicache_actors.tiers.storage.words import CallRefused, Direction, Note


def make_lanes(config: StorageConfig, staging: Staging | None, note: Note, log: Any) -> dict[Direction, Lane]:
    """Reads go before writes: while reads wait, the lane of writes yields."""

    def lane(direction: Direction, concurrency: int, limit_bytes: int | None, **hooks: Callable[[], Any]) -> Lane:
        return Lane(
            concurrency=concurrency,
            limit_bytes=limit_bytes,
            max_hung=config.max_hung_calls,
            breaker=_breaker(config, direction, log),
            refused=lambda reason: note(CallRefused(direction, reason)),
            staging=None if staging is None else staging.pools.get(direction),
            **hooks,
        )

    def reads_wait() -> bool:
        return reads.waiting

    writes = lane("write", config.write_concurrency, config.write_in_flight_bytes, yields=reads_wait)
    reads = lane("read", config.read_concurrency, config.read_in_flight_bytes, moved=writes.pump)
    return {"query": lane("query", config.query_concurrency, None), "read": reads, "write": writes}


def _breaker(config: StorageConfig, direction: Direction, log: Any) -> Breaker:
    def changed(old: BreakerState, new: BreakerState) -> None:
        say = log.warning if (old, new) == ("closed", "open") else log.info
        say(f"breaker_{new}", direction=direction, before=old, error=breaker.last_error)

    breaker = Breaker(
        failures=config.breaker_failures,
        delay_s=config.breaker_delay_s,
        max_delay_s=config.breaker_max_delay_s,
        now_s=asyncio.get_running_loop().time(),
        changed=changed,
    )
    return breaker
