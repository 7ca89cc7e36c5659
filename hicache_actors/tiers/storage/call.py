"""A call to a store: who waits for it, and when it has really ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Literal, TypeAlias, TypeVar

from hicache_actors.core.words import Slots
from hicache_actors.tiers.storage.words import CallKind

T = TypeVar("T")
CallState: TypeAlias = Literal["new", "waiting", "running", "hung", "left"]


class Call(Generic[T]):
    """Answers once: with its result, or with ``otherwise`` when the store fails, the deadline passes or the call is refused.

    Ends once, later perhaps: until then it may touch the memory that it was given.  Nobody cancels it.  Loop thread only.
    """

    def __init__(
        self,
        kind: CallKind,
        otherwise: T,
        *,
        nbytes: int = 0,
        pages: int = 0,
        priority: int = 0,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.kind, self.otherwise, self.wanted = kind, otherwise, wanted
        self.nbytes, self.pages, self.priority = nbytes, pages, priority
        self.staged: Slots = b""  #: its staging slots, from its turn until it has ended
        self.state: CallState = "new"  #: with its lane
        self.overdue = False  #: it has missed its deadline
        self.ended = False
        self.turn: asyncio.Future[bool] = loop.create_future()  #: whether it may begin
        self.answered = False
        self._loop, self._value = loop, otherwise
        self._waiters: list[asyncio.Future[None]] = []
        self._answer_callbacks: list[Callable[[T], None]] = []
        self._callbacks: list[Callable[[], None]] = []
        self._withdraw: Callable[[], None] = lambda: None

    async def answer(self) -> T:
        """Cancelling this wait does not touch a call that runs; one that has not begun is withdrawn."""
        if not self.answered:
            waiter = self._loop.create_future()  # one each: cancelling it harms nobody else
            self._waiters.append(waiter)
            try:
                await waiter
            except BaseException:
                self.withdraw()
                raise
        return self._value

    @property
    def waiting(self) -> bool:
        """Others go first."""
        return self.state == "waiting"

    def withdraw(self) -> None:
        """Nobody wants it any more: it ends now if it has not begun, else it goes on."""
        self._withdraw()

    def add_callback(self, callback: Callable[[], None]) -> None:
        """When it has ended; at once, if it has."""
        if self.ended:
            callback()
        else:
            self._callbacks.append(callback)

    def when_answered(self, callback: Callable[[T], None]) -> None:
        """Call it with the answer, before any waiter runs; at once, if it is there."""
        if self.answered:
            callback(self._value)
        else:
            self._answer_callbacks.append(callback)

    # -- for the store -------------------------------------------------------------------------------------------------

    def on_withdraw(self, withdraw: Callable[[], None]) -> None:
        self._withdraw = withdraw

    def settle(self, value: T) -> None:
        """Only the first answer counts."""
        if self.answered:
            return
        self.answered, self._value = True, value
        callbacks, self._answer_callbacks = self._answer_callbacks, []
        for callback in callbacks:
            callback(value)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def give_up(self) -> None:
        self.settle(self.otherwise)

    def end(self) -> None:
        self.give_up()
        self.ended = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
