"""Room for a request that does not fit: waiting for it, and the reservation that comes of it."""

from __future__ import annotations

from types import TracebackType

from hicache_actors.cache.asking import LAST_STEP_S, Asking
from hicache_actors.cache.handles import Inside
from hicache_actors.core import Core
from hicache_actors.core.reservation import CoreRoom
from hicache_actors.core.words import Shortfall
from hicache_actors.ranks.intents import AskRoom, LeaveRoom


class Room:
    """Device pages that are kept for leases acquired with ``acquire(room=...)``, until the block of `HiCache.room` ends."""

    def __init__(self, inside: Inside, room: CoreRoom, number: int) -> None:
        self._inside, self._room, self._number = inside, room, number

    def __repr__(self) -> str:
        return f"<Room of {self.pages} pages>"

    @property
    def waiter(self) -> int:
        """Names the reservation inside Core."""
        return self._room.waiter

    @property
    def pages(self) -> int:
        """Pages that no lease has taken yet."""
        return self._room.pages

    def leave(self) -> None:
        """Give back what is left.  Any thread, idempotent, never raises; pages that a lease has taken are the lease's."""
        waiter, driver = self._room.waiter, self._inside.driver

        def leave(core: Core) -> None:
            core.leave_room(waiter)

        if driver.owned_here and not driver.has_ranks:
            driver.defer(leave)
        else:
            driver.post(leave, LeaveRoom(self._number))


class WaitForRoom:
    """`HiCache.room`: one intent in Core, and no way to leave it that keeps a page."""

    def __init__(self, inside: Inside, asking: Asking, n_tokens: int, deadline_s: float) -> None:
        self._inside, self._asking, self._n_tokens, self._deadline_s = inside, asking, n_tokens, deadline_s
        self._number = 0
        self._room: Room | Shortfall | None = None

    async def __aenter__(self) -> Room | Shortfall:
        unheard_s = self._deadline_s + LAST_STEP_S  # Core's clock keeps the deadline, if the engine makes steps
        room: Room | Shortfall = await self._asking.ask(
            lambda core: core.room(self._n_tokens, self._deadline_s),
            self._answer,
            Core.leave_room,
            unheard_s,
            give_back=_leave,
            told=self._told,
        )
        self._room = room
        return room

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._room is not None:
            _leave(self._room)

    def _told(self, number: int) -> AskRoom:
        self._number = number
        return AskRoom(number, self._n_tokens, self._deadline_s)

    def _answer(self, value: CoreRoom | Shortfall | None) -> Room | Shortfall:
        if isinstance(value, CoreRoom):
            return Room(self._inside, value, self._number)
        return value or Shortfall("device_capacity")


def _leave(room: Room | Shortfall) -> None:
    if isinstance(room, Room):
        room.leave()
