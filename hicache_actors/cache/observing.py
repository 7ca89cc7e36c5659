"""Looking at a cache, and being told of it, while it works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from hicache_actors.cache import arguments
from hicache_actors.cache.assembly import Parts
from hicache_actors.cache.handles import Inside
from hicache_actors.cache.snapshots import Snapshot, State
from hicache_actors.core.explain import Explanation
from hicache_actors.core.words import Slots
from hicache_actors.errors import UsageError
from hicache_actors.events import Subscription
from hicache_actors.events.stream import QUEUE_BATCHES
from hicache_actors.keys.prompt import Prompt
from hicache_actors.pipelines.observer import Observer


class Observed(Inside, Protocol):
    """What these verbs need of the cache."""

    _parts: Parts
    _closing: bool
    _closed: bool

    @property
    def state(self) -> State: ...

    def _check_open(self) -> None: ...


class ObservationVerbs:
    """They change nothing."""

    def observe(self: Observed, observer: Observer) -> Callable[[], None]:
        """Tell ``observer`` of every batch that has moved and every commit -> a function that ends it."""
        if not callable(observer):
            raise UsageError(f"observer = {observer!r}: something that can be called with a batch")
        return self.movers.observe(observer)

    def host_objects(self: Observed, slots: Slots) -> Sequence[memoryview]:
        """Header and KV of each host slot, as a store gets them: for an observer, while it is being told of these slots.

        Raises `UsageError` under layer_first, where a page is no run of bytes.
        """
        return self._parts.host_tier.objects(slots)

    def events(self: Observed, *, after: int | None = None, queue_batches: int = QUEUE_BATCHES) -> Subscription:
        """Which pages come to which tier, and leave it: an async iterator of `EventBatch`, for whoever keeps an index of its own.

        It begins with a snapshot of all that is there; with ``after``, the id of a batch, it goes on behind that one if what
        followed is still kept (the last 1,024 batches).  A subscriber for which more than ``queue_batches`` wait loses them, and
        gets a snapshot that says how many.  It ends when the cache closes.  The loop; with driver="step" it begins in the
        next step, and with ranks any rank may be asked.

        Raises `UsageError` for a queue without room.
        """
        self._check_open()
        if after is not None:
            after = arguments.batch_number(after)
        if queue_batches < 1:
            raise UsageError(f"queue_batches = {queue_batches}: at least 1")
        return self._parts.events.subscribe(after, queue_batches)

    def explain(self: Observed, prompt: Prompt) -> Explanation:
        """Where each span of ``prompt`` is, or why it is nowhere (evicted when and for whom, another scope, ...); ``str()`` is for
        people.  Changes nothing.  Core's owner thread, as for `match`; costs what the prompt's path costs.
        """
        self.driver.check_owner()
        arguments.check_prompt(prompt)
        explanation = self.core.explain(prompt)
        storage = self._parts.storage_tier.usage()
        if storage is None or explanation.fetch_refused is not None:
            return explanation
        if any(lane.breaker.state == "open" for direction, lane in storage.lanes.items() if direction != "write"):
            return msgspec.structs.replace(explanation, fetch_refused="breaker_open")
        return explanation

    @property
    def state(self: Observed) -> State:
        """One word: "degraded" serves nothing, finally, and the engine lives; "disabled" is what the configuration wants.

        Any thread.
        """
        if self._closed:
            return "closed"
        if self._closing:
            return "closing"
        if self._parts.disabled is not None:
            return "disabled"
        return "degraded" if self.core.degraded or not self.driver.alive else "open"

    def snapshot(self: Observed) -> Snapshot:
        """What all parts of the cache are doing, at this instant.  Core's owner thread; `metrics.Collector` asks from others."""
        parts = self._parts
        failure = self.driver.failure
        return Snapshot(
            state=self.state,
            failure=None if failure is None else f"{type(failure).__name__}: {failure}",
            page_size=self.core.page_size,
            core=self.core.usage(),
            counts=dict(self.core.counts),
            device=parts.device_tier.usage(),
            host=parts.host_tier.usage(),
            storage=parts.storage_tier.usage(),
            flows=parts.movers.flows.snapshot(),
            loop_lag=parts.loop_lag.snapshot(),
            system=parts.system.snapshot(),
            workers=(parts.workers.snapshot(), *parts.storage_tier.threads, parts.forward_workers.snapshot()),
            open_jobs=parts.pipelines.open_jobs,
            shadow=None if parts.shadow is None else parts.shadow.usage(),
            events=parts.events.snapshot(),
        )
