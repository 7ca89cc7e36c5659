"""Verbs of `Core` that only some engines need: those that own their blocks, and those whose requests wait for room."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_actors.core.blocks import Blocks
from hicache_actors.core.room import Rooms
from hicache_actors.core.state import State
from hicache_actors.core.waiting import Waiting
from hicache_actors.core.words import Shortfall, Tokens


class BlockCalls:
    """``slots="engine"``."""

    _blocks: Blocks

    def lookup(self, tokens: Tokens, rid: str, computed_tokens: int = 0) -> int | None:
        """Tokens of the prompt beyond ``computed_tokens`` that the host holds, pinned until `finish`; may be asked again.

        None: a fetch is under way, ask again.  One token is always left to compute.

        :raises UsageError: ``computed_tokens`` is not a multiple of the page size within the prompt.
        """
        return self._blocks.lookup(tokens, rid, computed_tokens)

    def load_into(
        self, rid: str, pages: Sequence[int], first_token: int, after: object | None = None
    ) -> tuple[str, int] | Shortfall:
        """Copy what `lookup` has found, from ``first_token`` on, into blocks ``pages`` once ``after`` has fired -> (id, job).

        The blocks are the engine's again when the id has been named ended.  A `Shortfall` ("reset", "load_failed": what was found
        has gone since; "degraded") has taken none of them.

        :raises UsageError: no lookup, beyond what it found, not the start of a page, or no such block.
        """
        return self._blocks.load_into(rid, pages, first_token, after)

    def save_from(
        self, tokens: Tokens, rid: str, pages: Sequence[int], first_token: int, after: object | None = None
    ) -> str:
        """Save what the host lacks of whole pages that blocks ``pages`` hold from ``first_token`` on, once ``after`` has fired.

        -> id; the blocks are the engine's again when it has been named ended, also those that needed no copy.  Give all pages from
        token 0: if the host has lost what is before ``first_token``, nothing is saved ("gap").

        :raises UsageError: not the start of a page, more than the prompt's whole pages, or no such block.
        """
        return self._blocks.save_from(tokens, rid, pages, first_token, after)

    def finish(self, rid: str, after: object | None = None) -> None:
        """End what `lookup` has pinned, at once or when ``after`` has fired.  Idempotent; loads and saves run on."""
        self._blocks.finish(rid, after)


class RoomCalls:
    """``slots="owned"``."""

    state: State
    _rooms: Rooms
    _waiting: Waiting

    def room(self, n_tokens: int, deadline_s: float | None = None) -> int:
        """Wait, in order, for device pages for ``n_tokens`` -> waiter; ``Wake(waiter, CoreRoom)`` when they are reserved.

        ``Wake(waiter, Shortfall)`` after ``deadline_s`` (by the agreed clock), or if that can never be: the pool is smaller, or the
        cache has degraded.  While somebody waits, leases opened later load and allocate nothing beyond their reservation
        ("device_capacity").

        :raises UsageError: not a positive count, or a negative deadline.
        """
        self.state.check_owned()
        return self._waiting.room(n_tokens, deadline_s)

    def leave_room(self, waiter: int) -> None:
        """Stop waiting, or give back what is left of the reservation.  Idempotent."""
        self._rooms.leave(waiter)
