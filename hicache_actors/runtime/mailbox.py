"""A mailbox: two FIFO lanes, control before data, one owner.

Nothing is ever handed over to a waiting task: an item stays in its lane until the owner takes it with `get`.  So neither level
cancellation nor a native ``task.cancel()`` between wake-up and resumption can lose one, which a channel that passes items to
its waiters cannot promise.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from threading import get_ident
from typing import Generic, TypeVar

from hicache_actors.errors import MailboxFull, StoppedError, UsageError

M = TypeVar("M")


class Mailbox(Generic[M]):
    """``limit`` bounds the data lane (a fuse: admission and bounded channels should keep it from blowing).

    `put` and `put_control` may be called from any thread and never suspend; everything else belongs to the owner, the thread
    and event loop that called `bind`.  What is put before `bind` waits for it.  With puts from several threads at the same
    instant the data lane may pass its limit by one item.
    """

    __slots__ = (
        "_closed",
        "_control",
        "_data",
        "_foreign_lock",
        "_limit",
        "_loop",
        "_owner",
        "_waiter",
        "_wake_scheduled",
        "control_high_water",
        "data_high_water",
        "name",
        "refused",
    )

    def __init__(self, limit: int, *, name: str = "mailbox") -> None:
        if limit < 1:
            raise ValueError(f"limit = {limit}: a mailbox holds at least one item")
        self.name = name
        self.refused = 0  #: puts that met a full data lane
        self.control_high_water = 0  #: longest lanes as seen at wake-ups
        self.data_high_water = 0
        self._limit = limit
        self._control: deque[M] = deque()
        self._data: deque[M] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: int | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._foreign_lock = threading.Lock()
        self._wake_scheduled = False

    @property
    def control_depth(self) -> int:
        return len(self._control)

    @property
    def data_depth(self) -> int:
        return len(self._data)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The owner's loop.  Raises UsageError before `bind`."""
        if self._loop is None:
            raise UsageError(f"{self.name} has not been started")
        return self._loop

    @property
    def owned_here(self) -> bool:
        """Whether the calling thread is the owner's."""
        return get_ident() == self._owner

    def bind(self) -> None:
        """Make the running loop and its thread the owner.  Raises UsageError if there is one already."""
        if self._loop is not None:
            raise UsageError(f"{self.name} already has an owner")
        self._loop = asyncio.get_running_loop()
        self._owner = get_ident()

    def put(self, item: M) -> None:
        """Any thread; never suspends.  Raises MailboxFull (the item is not queued) or StoppedError after `close`."""
        if get_ident() != self._owner:
            self._put_foreign(item, control=False)
            return
        if self._closed:
            raise StoppedError(f"{self.name} has stopped")
        data = self._data
        if len(data) >= self._limit:
            self._refuse()
        data.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def put_control(self, item: M) -> None:
        """Any thread; never suspends, never full.  Raises StoppedError after `close`."""
        if get_ident() != self._owner:
            self._put_foreign(item, control=True)
            return
        if self._closed:
            raise StoppedError(f"{self.name} has stopped")
        self._control.append(item)
        self._wake()

    def get(self) -> M | None:
        """The next item, control first, or None.  Owner only."""
        if self._control:
            return self._control.popleft()
        if self._data:
            return self._data.popleft()
        return None

    async def wait(self) -> None:
        """Return at once if anything is queued, else when something is.  Owner only, one task at a time."""
        while not (self._control or self._data):
            self._waiter = waiter = self.loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        if len(self._control) > self.control_high_water:
            self.control_high_water = len(self._control)
        if len(self._data) > self.data_high_water:
            self.data_high_water = len(self._data)

    def close(self) -> list[M]:
        """Refuse puts from now on; returns what nobody will take any more, control first.  Owner only, idempotent."""
        with self._foreign_lock:  # a foreign put is either in what we return or refused
            self._closed = True
            left = [*self._control, *self._data]
            self._control.clear()
            self._data.clear()
        return left

    def _refuse(self) -> None:
        self.refused += 1
        raise MailboxFull(f"{self.name} holds {len(self._data)} messages, its limit")

    def _put_foreign(self, item: M, *, control: bool) -> None:
        with self._foreign_lock:
            if self._closed:
                raise StoppedError(f"{self.name} has stopped")
            if control:
                self._control.append(item)
            else:
                if len(self._data) >= self._limit:
                    self._refuse()
                self._data.append(item)
            if self._loop is None or self._wake_scheduled:
                return
            self._wake_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._wake_from_foreign)
        except RuntimeError as error:  # the loop has been closed without stopping us: nobody will ever take the item
            raise StoppedError(f"the loop of {self.name} is closed") from error

    def _wake_from_foreign(self) -> None:
        self._wake_scheduled = False  # before the wake: a put that still saw True is already in its lane
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
