"""Subscribers of one cache, and what reaches them.

    Core's records -> one task: mirror, in a worker thread -> a bounded queue for each subscriber

A subscriber that is too slow loses all that waits for it, and gets a snapshot when it comes again; nobody waits for it.  The first
subscriber makes Core write its records; after the last has gone that goes on until the history is full of batches that nobody has
heard, so that a connection that broke can resume.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from hicache_actors.core import Core
from hicache_actors.core.records import Changed, Cleared
from hicache_actors.errors import StoppedError
from hicache_actors.events.batches import Cause, EventBatch
from hicache_actors.events.mirror import Mirror
from hicache_actors.runtime import Workers, bind_log

HISTORY_BATCHES: Final = 1024  #: that can be resumed from
QUEUE_BATCHES: Final = 256  #: that wait for one subscriber, unless it asks for more
MAX_BACKLOG_RECORDS: Final = 1 << 17  #: that wait for the mirror; beyond that everything is told anew
TELL_NODES: Final = 2048  #: of what was there before, per section


class EventsSnapshot(msgspec.Struct, frozen=True):
    """``batches`` made since open, ``lost_batches`` of them not delivered to somebody who was too slow (each subscriber counts),
    ``snapshots`` sent.  ``backlog_records`` wait for the mirror; ``restarts``: how often they were too many.
    """

    subscribers: int
    batches: int
    lost_batches: int
    snapshots: int
    backlog_records: int
    restarts: int


class Subscription:
    """An async iterator over the batches of a cache; ends when the cache closes.  Loop thread only.

    It begins with a snapshot, or goes on after the batch it was asked to.  Drop it, or `close` it, to unsubscribe.
    """

    def __init__(self, stream: EventStream, after: int | None, queue_batches: int) -> None:
        self._stream, self.after, self._limit = stream, after, queue_batches
        self._queue: deque[EventBatch] = deque()
        self._news = asyncio.Event()
        self._ended = self._asking = False
        self._state: Literal["new", "live", "behind"] = "new"
        self.lost = 0  # batches, since the last that was delivered

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> EventBatch:
        while not self._queue:
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            if self._state != "live":
                self._asking = True
                self._stream.poke()
            await self._news.wait()
        return self._queue.popleft()

    async def aclose(self) -> None:
        """`close`, as `contextlib.aclosing` calls it."""
        self.close()

    def close(self) -> None:
        """No more batches come.  Idempotent."""
        self._stream.leave(self)
        self._queue.clear()
        self.end()

    # -- for the stream ------------------------------------------------------------------------------------------------

    @property
    def asks(self) -> bool:
        """Somebody waits for a snapshot, or for what followed ``after``."""
        return self._asking and self._state != "live"

    @property
    def behind(self) -> bool:
        return self._state == "behind"

    def put(self, batch: EventBatch) -> int:
        """-> batches that are lost by it."""
        if self._state == "live":
            if len(self._queue) >= self._limit:
                return self.drop(1)
            self._queue.append(batch)
            self._news.set()
        elif self._state == "behind":
            self.lost += 1
            return 1
        return 0

    def drop(self, more: int) -> int:
        """All that waits is lost, and ``more`` -> batches."""
        if self._state != "live":
            return 0
        lost = len(self._queue) + more
        self.lost += lost
        self._queue.clear()
        self._state, self.after, self._asking = "behind", None, False
        return lost

    def begin(self, batches: list[EventBatch]) -> None:
        """From here on it misses nothing."""
        self._state, self.lost = "live", 0
        self._queue.extend(batches)
        if batches:
            self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()


class EventStream:
    """All subscribers.  Loop thread only; ``post`` brings an intent to Core's next section, from there."""

    def __init__(self, page_size: int, workers: Workers, post: Callable[[Callable[[Core], object]], None]) -> None:
        self._page_size, self._workers, self._post = page_size, workers, post
        self._subscribers: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._mirror: Mirror | None = None  # while Core writes
        self._backlog: list[Changed] = []
        self._backlog_records = 0
        self._stale = False  # what comes is of the time before the last `watch`
        self._history: deque[EventBatch] = deque(maxlen=HISTORY_BATCHES)
        self._unheard = 0
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._batches = self._lost = self._snapshots = self._restarts = 0

    def subscribe(self, after: int | None, queue_batches: int = QUEUE_BATCHES) -> Subscription:
        """:raises StoppedError: the cache is closing."""
        if self._closed:
            raise StoppedError("the cache is closed")
        if self._task is None:  # outside the task group, to tell of its failure too
            self._task = asyncio.get_running_loop().create_task(self._run(), name="events")
            self._task.add_done_callback(self._stopped)
        subscription = Subscription(self, after, queue_batches)
        self._subscribers.add(subscription)
        if self._mirror is None:
            self._watch()
        return subscription

    def leave(self, subscription: Subscription) -> None:
        self._subscribers.discard(subscription)

    def poke(self) -> None:
        self._news.set()

    def take(self, changed: Changed) -> None:
        """The effect of a section."""
        if isinstance(changed.records[0], Cleared) and changed.records[0].why == "begin":
            self._stale = False
        if self._stale or self._mirror is None:
            return
        self._backlog.append(changed)
        self._backlog_records += len(changed.records)
        if self._backlog_records > MAX_BACKLOG_RECORDS:
            self._restarts += 1
            self._watch()
        self._news.set()

    def close(self) -> None:
        """Subscribers get what waits for them, then the end.  Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        for subscription in list(self._subscribers):
            subscription.end()

    def snapshot(self) -> EventsSnapshot:
        return EventsSnapshot(
            len(self._subscribers),
            self._batches,
            self._lost,
            self._snapshots,
            self._backlog_records,
            self._restarts,
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """A bug here costs the events, not the cache."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        bind_log(part="events").error("events_ended", exc_info=error)
        self.close()
        self._unwatch()

    def _watch(self) -> None:
        """Have everything told, from the beginning."""
        self._mirror, self._stale = Mirror(self._page_size), True
        for subscription in list(self._subscribers):
            self._lost += subscription.drop(len(self._backlog))
        self._forget()

        def watch(core: Core) -> None:
            core.watch(True)
            core.tell(TELL_NODES)

        self._post(watch)

    def _unwatch(self) -> None:
        self._mirror = None
        self._forget()
        self._post(lambda core: core.watch(False))

    def _forget(self) -> None:
        self._backlog, self._backlog_records, self._unheard = [], 0, 0
        self._history.clear()

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            mirror = self._mirror
            if mirror is None:
                continue
            backlog, self._backlog, self._backlog_records = self._backlog, [], 0
            if backlog:
                batches = await self._workers.run(_apply, mirror, backlog)
                if mirror is not self._mirror:
                    continue
                self._hand_out(batches)
                if not mirror.complete:
                    self._post(lambda core: core.tell(TELL_NODES))
            if mirror.complete:
                await self._begin(mirror)
            if not self._subscribers and self._unheard >= HISTORY_BATCHES:
                self._unwatch()

    def _hand_out(self, batches: list[EventBatch]) -> None:
        self._batches += len(batches)
        self._history.extend(batches)
        subscribers = list(self._subscribers)
        self._unheard = 0 if subscribers else self._unheard + len(batches)
        for batch in batches:
            for subscription in subscribers:
                self._lost += subscription.put(batch)

    async def _begin(self, mirror: Mirror) -> None:
        """Those who wait for it get what they have missed, or all that is there."""
        for subscription in [subscription for subscription in self._subscribers if subscription.asks]:
            missed = self._since(mirror, subscription.after)
            if missed is not None:
                subscription.begin(missed)
                continue
            cause: Cause = "lost" if subscription.behind else "snapshot"
            batch = await self._workers.run(mirror.snapshot, cause, subscription.lost)
            if mirror is not self._mirror:
                return
            self._snapshots += 1
            subscription.begin([batch])

    def _since(self, mirror: Mirror, after: int | None) -> list[EventBatch] | None:
        """The batches that followed ``after``; None if they are not all kept, or it was none."""
        if after is None:
            return None
        if after == mirror.last:
            return []
        for at, batch in enumerate(self._history):
            if batch.after == after:
                return list(self._history)[at:]
        return None


def _apply(mirror: Mirror, backlog: list[Changed]) -> list[EventBatch]:
    batches = [mirror.apply(changed) for changed in backlog]
    return [batch for batch in batches if batch is not None]
