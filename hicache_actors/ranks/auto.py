"""The auto driver: one rank on an event loop, a section per call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_actors.core.words import Effect
from hicache_actors.errors import UsageError
from hicache_actors.ranks.board import Board
from hicache_actors.ranks.driver import Driver, Intent, Replica
from hicache_actors.ranks.round import Agreed

if TYPE_CHECKING:
    from hicache_actors.ranks.intents import AnyTold


class AutoDriver(Driver):
    """One rank on an event loop: each call is a section, with the clock of the last apply.

    Made on the loop's thread, which is the owner.  Apply runs when a completion, an intent or a due time waits, at most
    once per turn of the loop.  ``schedule`` runs a callback in a later turn and is safe from any thread
    (``loop.call_soon_threadsafe``); ``schedule_later(delay_s, callback)``, called on the loop, returns a function that
    cancels it.  ``execute(effects)`` is called on the loop at the end of each section that has any.
    """

    def __init__(
        self,
        core: Replica,
        board: Board,
        clock_ms: Callable[[], int],
        execute: Callable[[list[Effect]], None],
        schedule: Callable[[Callable[[], None]], object],
        schedule_later: Callable[[float, Callable[[], None]], Callable[[], object]],
        *,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__(core, board, clock_ms, execute, on_failure)
        self.applies = 0
        self._owner = threading.get_ident()
        self._schedule, self._schedule_later = schedule, schedule_later
        self._lock = threading.Lock()
        self._scheduled = self._closed = self._grouped = False
        self._timer: tuple[int, Callable[[], object]] | None = None
        board.on_news = self._wake

    @property
    def needs_step(self) -> bool:
        """Never: apply runs by itself."""
        return False

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Driver.together`.  Nothing may be awaited inside."""
        if self._grouped:
            raise UsageError("a section is already open")
        self._enter()
        self._grouped = True
        try:
            yield
        finally:
            self._grouped = False
            self._leave(None)  # a call that broke Core has said so itself

    def defer(self, release: Intent) -> None:
        """Loop thread: run a release or a stop, in the open section or in one of its own."""
        if self._open:
            release(self.core)
        else:
            self.decide(release)

    def catch_up(self) -> None:
        """Loop thread: apply now what the next turn would apply."""
        self.check_owner()
        if not self._open:
            self._turn()

    def post(self, intent: Intent, told: AnyTold | None = None) -> None:
        """Any thread: the next apply runs it."""
        self._inbox.append(intent)
        self._wake()

    def fail(self, exc: BaseException) -> None:
        """Any thread: this rank's movers are dead; the next apply degrades."""
        self._fail(exc)
        self._wake()

    def close(self) -> None:
        """Loop thread: no apply happens any more."""
        self._closed = True
        if self._timer is not None:
            self._timer[1]()
            self._timer = None

    def _enter(self) -> None:
        self.check_owner()
        if self._grouped:
            return
        if self._open:
            raise UsageError("a section is already open")
        self._open = True

    def _leave(self, broken: Exception | None) -> None:
        if broken is not None:
            self._break(broken)
        if self._grouped:
            return
        effects = self._take_effects()
        self._open = False
        if effects:
            self._execute(effects)
        self._arm()

    def _wake(self) -> None:
        with self._lock:
            if self._scheduled or self._closed:
                return
            self._scheduled = True
        self._schedule(self._scheduled_turn)

    def _scheduled_turn(self) -> None:
        self._scheduled = False
        self._turn()

    def _turn(self) -> None:
        if self._closed:
            return
        now_ms, due_ms = self._clock_ms(), self.core.next_due_ms
        values, released = self.board.answers(self.core.wire())
        degrade = not self.alive and not self.core.degraded
        if values or released or self._inbox or degrade or (due_ms is not None and due_ms <= now_ms):
            self.applies += 1
            self._enter()
            self._apply(Agreed(now_ms, self.alive, values, self._released_by_then()))
            self._leave(None)
            # An answer that had no place in the table: the next turn's work.
            if any(self.board.answers(self.core.wire())):
                self._wake()
        else:
            self._arm()

    def _released_by_then(self) -> Iterator[int]:
        """Asked for when the values have been applied: most jobs bring their RELEASED together with their RESULT."""
        yield from self.board.answers(self.core.wire())[1]

    def _arm(self) -> None:
        """Keep one timer, for the earliest due time."""
        due_ms = self.core.next_due_ms
        if self._timer is not None:
            if self._timer[0] == due_ms:
                return
            self._timer[1]()
            self._timer = None
        if due_ms is not None and not self._closed:
            delay_s = max(0, due_ms - self._clock_ms()) / 1000
            self._timer = (due_ms, self._schedule_later(delay_s, self._due))

    def _due(self) -> None:
        self._timer = None
        self._wake()
