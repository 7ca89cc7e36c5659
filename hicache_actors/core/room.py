"""Room: who waits for device pages waits here, in order, and holds nothing.

A room that has been granted is a reservation: it owns slots, which leases that were acquired with it take first.  The rest is free
again when it is left.  While somebody waits, leases older than the first waiter load and allocate as ever; newer ones get nothing
beyond their own reservation, so nobody overtakes and nobody starves.
"""

from __future__ import annotations

from typing import Final

from hicache_actors.core.evictions import Cause
from hicache_actors.core.lease import CoreLease
from hicache_actors.core.reservation import CoreRoom
from hicache_actors.core.state import Note, State
from hicache_actors.core.words import DEVICE, Shortfall, Slots, Wake
from hicache_actors.errors import UsageError

_ROOM: Final = Cause("room")


class _Wait:
    __slots__ = ("deadline_ms", "due_ms", "order", "pages")

    def __init__(self, pages: int, order: int, deadline_ms: int | None) -> None:
        self.pages, self.order, self.deadline_ms = pages, order, deadline_ms
        self.due_ms: int | None = None  # by the clock of the first apply that follows


class Rooms:
    """All who wait for room; reservations, by waiter, are in ``state.reservations``."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.waits: dict[int, _Wait] = {}  #: by waiter, in order

    # -- waiting ------------------------------------------------------------------------------------------------------------

    def ask(self, waiter: int, n_tokens: int, deadline_s: float | None) -> None:
        """Wait for room for ``n_tokens``; ``Wake(waiter, CoreRoom | Shortfall)`` at the end of this section or of a later one."""
        state = self.state
        if n_tokens <= 0 or (deadline_s is not None and deadline_s < 0):
            raise UsageError(
                f"room({n_tokens}, deadline_s={deadline_s}): a positive count of tokens, a time that is not negative"
            )
        pages = -(-n_tokens // state.page)
        deadline_ms = None if deadline_s is None else round(deadline_s * 1000)
        self.waits[waiter] = _Wait(pages, state.next_order(), deadline_ms)
        state.note(Note.ROOM, waiter, pages)

    def on_apply(self) -> None:
        """The clock has moved.  Between applies it stands, so a deadline counts from the first one after the call."""
        for wait in self.waits.values():
            if wait.due_ms is None and wait.deadline_ms is not None:
                wait.due_ms = self.state.now_ms + wait.deadline_ms

    def grant(self) -> None:
        """At the end of a section: reserve for those whose turn it is, answer those who wait in vain or have waited enough."""
        state = self.state
        for waiter, wait in list(self.waits.items()):
            refused = self._refusal(wait)
            state.cause = _ROOM
            if refused is None and self._is_first(waiter) and state.evictor.device_room(wait.pages):
                room = state.reservations[waiter] = CoreRoom(waiter, state.pools[DEVICE].take(wait.pages))
                self._end(waiter, wait, "rooms_granted", room)
            elif refused is not None:
                self._end(waiter, wait, "rooms_refused", refused)
            elif wait.due_ms is not None and wait.due_ms <= state.now_ms:
                late = state.evictor.shortfall(wait.pages, state.evictor.available(DEVICE))
                self._end(waiter, wait, "rooms_late", late)

    def _is_first(self, waiter: int) -> bool:
        return next(iter(self.waits)) == waiter

    def _end(self, waiter: int, wait: _Wait, what: str, answer: CoreRoom | Shortfall) -> None:
        del self.waits[waiter]
        self.state.count(what)
        self.state.note(Note.ROOM, waiter, wait.pages, isinstance(answer, CoreRoom))
        self.state.effects.append(Wake(waiter, answer))

    def leave(self, waiter: int) -> None:
        """Wait no more; what is left of a reservation is free.  Idempotent."""
        state = self.state
        self.waits.pop(waiter, None)
        room = self.state.reservations.pop(waiter, None)
        if room is not None:
            state.note(Note.ROOM, waiter, room.pages, 2)
            state.pools[DEVICE].give(room.draw(room.pages))

    def _refusal(self, wait: _Wait) -> Shortfall | None:
        """Why no room will ever be granted, if so."""
        state = self.state
        if state.degraded:
            return Shortfall("degraded", wait.pages)
        total = state.pools[DEVICE].total
        return None if wait.pages <= total else Shortfall("device_capacity", wait.pages - total)

    # -- leases -------------------------------------------------------------------------------------------------------------

    def within_reach(self, lease: CoreLease) -> int:
        """Pages that this lease may take now."""
        return self._reserved(lease) + (0 if self._must_wait(lease) else self.state.evictor.available(DEVICE))

    def take(self, lease: CoreLease, pages: int) -> Slots | None:
        """Slots for a lease, of its reservation first; None: refused, and nothing has been evicted."""
        state = self.state
        own = min(pages, self._reserved(lease))
        rest = pages - own
        state.cause = Cause("request", lease.rid)
        if rest and (self._must_wait(lease) or not state.evictor.device_room(rest)):
            return None
        slots = state.pools[DEVICE].take(rest)
        return self.state.reservations[lease.room].draw(own) + slots if own else slots

    def _reserved(self, lease: CoreLease) -> int:
        room = self.state.reservations.get(lease.room) if lease.room else None
        return 0 if room is None else room.pages

    def _must_wait(self, lease: CoreLease) -> bool:
        if not self.waits:
            return False
        first = next(iter(self.waits.values()))
        return lease.order > first.order

    # -- figures ------------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self.waits)

    @property
    def needs_clock(self) -> bool:
        """Somebody waits for a deadline, too."""
        return any(wait.deadline_ms is not None for wait in self.waits.values())

    @property
    def has_dues(self) -> bool:
        return bool(self.waits)

    @property
    def next_due_ms(self) -> int | None:
        """When the first deadline is over; now, if its time has not begun."""
        due = [
            self.state.now_ms if wait.due_ms is None else wait.due_ms
            for wait in self.waits.values()
            if wait.deadline_ms is not None
        ]
        return min(due, default=None)

    def facts(self) -> object:
        """For the digest of the whole state."""
        waits = [(waiter, wait.pages, wait.order, wait.due_ms) for waiter, wait in self.waits.items()]
        return waits, [(waiter, room.slots) for waiter, room in self.state.reservations.items()]
