"""The step driver: ranks agree once per engine step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hicache_actors.core.words import Effect
from hicache_actors.errors import PeerError, UsageError
from hicache_actors.ranks.board import Board
from hicache_actors.ranks.driver import Driver, Intent, Replica
from hicache_actors.ranks.round import Agreed, Diverged, Exchange, Pending, Round, RoundVector, exchange_alone

if TYPE_CHECKING:
    from hicache_actors.ranks.intake import Intake
    from hicache_actors.ranks.intents import AnyTold

T = TypeVar("T")

PACE_S: Final = 0.005  #: an empty step waits at most this long for local news


class StepDriver(Driver):
    """Sections that stay open from `begin_step` to `end_step`; ranks agree once per step.

    The owner is the thread that calls `begin_step`.  Outside the section it may `defer` a release or a stop; every
    other change raises UsageError.  Nothing here waits for the event loop.

    ``execute(effects)`` is called once per section that has any, on the owner thread.  ``exchange`` issues a round and
    returns at once; at most ``lag`` rounds are under way, in order.  ``on_failure`` hears once of the failure that
    ended agreement.  ``intake``: with ranks, how intents reach all of them.  ``explain`` says, once all ranks have found that
    they have diverged, where; it may block for a moment.
    """

    def __init__(
        self,
        core: Replica,
        board: Board,
        clock_ms: Callable[[], int],
        execute: Callable[[list[Effect]], None],
        exchange: Exchange = exchange_alone,
        *,
        lag: int = 1,
        vector: RoundVector | None = None,
        wait_news: Callable[[float], object] | None = None,
        intake: Intake | None = None,
        explain: Callable[[], str] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__(core, board, clock_ms, execute, on_failure)
        self.lag = lag
        self.steps = self.rounds = 0
        self._vector = vector or RoundVector()
        self._exchange = exchange
        self._wait_news = wait_news or board.wait_news
        self._under_way: deque[tuple[Round, Pending] | None] = deque()
        self._queued: list[Intent] = []
        self._admitted: list[Intent] = []
        self._intake, self._explain = intake, explain
        self._idle = False  # the last section changed nothing
        self._peers_lost = False
        self.closing = False  #: the engine has stopped; the steps from here on are the cache's own

    @property
    def needs_step(self) -> bool:
        """While it is true an engine makes (empty) steps.

        Replicated, also where releases or an intake wait for a step; but on a single rank whatever waits counts, else an idle
        engine would never hear of it.
        """
        alone = self._intake is None
        return self._needs_round or bool(self._admitted or self._queued or (alone and self._inbox))

    @property
    def _needs_round(self) -> bool:
        return self.core.needs_step and not self._peers_lost

    @property
    def has_ranks(self) -> bool:
        return self._intake is not None and not self._peers_lost

    @property
    def step_open(self) -> bool:
        return self._open

    @property
    def pace_s(self) -> float:
        """How long the next `begin_step` would wait for local news; only time depends on it."""
        if not self._idle or not self._needs_round or self._queued or self._inbox or self._admitted:
            return 0.0
        if any(entry is not None and entry[0].has_news for entry in self._under_way):
            return 0.0
        return PACE_S

    def begin_step(self, timeout_s: float = 5.0, *, pace: bool = True) -> None:
        """Open the section of a step: wait for the round of step s - lag, then apply it, queued releases, and intents.

        A peer that does not answer within ``timeout_s``, speaks another version or has diverged degrades this rank: the
        PeerError is kept in ``failure`` and told to ``on_failure``, the engine lives.  Pass ``pace=False`` if the
        caller has waited `pace_s` for news itself.  Raises UsageError if a step is open.
        """
        if self._open:
            raise UsageError("begin_step: the previous step is still open; call end_step first")
        if pace and self._idle and (pace_s := self.pace_s):
            self._wait_news(pace_s)
        agreed = self._agreed(timeout_s)
        self._owner = threading.get_ident()
        self._open = True
        self.steps += 1
        queued: list[Intent] = []
        if self._queued or self._admitted:
            queued = self._queued + self._admitted
            self._queued, self._admitted = [], []
        self._idle = not queued and not self._inbox
        self._apply(agreed, queued)

    def end_step(self) -> None:
        """Close the section: issue the round, if one is due, and hand the effects over.

        Raises UsageError without an open step.
        """
        self.check_owner()
        if not self._open:
            raise UsageError("end_step without begin_step")
        effects = self._take_effects()
        self._open = False
        self._under_way.append(self._issue() if self._needs_round else None)
        if effects:
            self._execute(effects)

    def together(self) -> AbstractContextManager[None]:
        """See `Driver.together`: between `begin_step` and `end_step` all calls are one section."""
        self.check_owner()
        return nullcontext()

    def defer(self, release: Intent) -> None:
        """Owner thread: run a release or a stop now if the section is open, else in the next `begin_step`."""
        self.check_owner()
        if self._open:
            self.decide(release)
        else:
            self._queued.append(release)

    def catch_up(self) -> None:
        """Nothing is applied between steps."""
        self.check_owner()

    def poll(self, verb: Callable[[Any], T]) -> T:
        """`decide`; a step in which nothing but None came of it is an empty one, and the next `begin_step` paces it."""
        idle = self._idle
        answer = self.decide(verb)
        if answer is None:
            self._idle = idle
        return answer

    def post(self, intent: Intent, told: AnyTold | None = None) -> None:
        """Any thread: the next `begin_step` runs it, after the queued releases; with ranks, once its intake has been applied.

        Raises `UsageError` on a rank that does not lead, if the intent is not one that only reads.
        """
        if self._intake is None or told is None or self._peers_lost:
            self._inbox.append(intent)
        else:
            self._intake.post(intent, told)
            if self._peers_lost:  # meanwhile
                self._inbox.extend(self._intake.give_up())
        self.board.tell()

    def intake_bytes(self) -> bytes:
        """The leader's intents since the last call, for `apply_intake` on all ranks.  Owner thread."""
        return self._with_ranks().take_bytes()

    def apply_intake(self, data: bytes) -> None:
        """On all ranks, between two steps: the next `begin_step` runs what ``data`` says."""
        if self._open:
            raise UsageError("apply_intake belongs between end_step and begin_step")
        if not self._peers_lost:
            self._admitted += self._with_ranks().admit(data)

    @property
    def next_round(self) -> Pending | None:
        """The round that the next `begin_step` waits for; None if there is none."""
        entry = self._under_way[0] if len(self._under_way) >= self.lag else None
        return None if entry is None or self._peers_lost else entry[1]

    def fail(self, exc: BaseException) -> None:
        """Any thread: this rank's movers are dead.  Its next round says so; all ranks degrade in the apply of it."""
        self._fail(exc)

    def close(self) -> None:
        """Rounds under way end by themselves; their results are not applied."""
        self._under_way.clear()

    def _enter(self) -> None:
        self.check_owner()
        if not self._open:
            raise UsageError("this call changes the cache: it belongs between begin_step and end_step")
        self._idle = False

    def _leave(self, broken: Exception | None) -> None:
        if broken is not None:
            self._break(broken)

    def _agreed(self, timeout_s: float) -> Agreed:
        """The oldest round, once ``lag`` steps old; without one the clock stands still.

        Without its peers a rank is degraded, and decides alone what has been released: its engine needs the pages back.
        """
        if self._peers_lost:
            return Agreed(0, False, (), self.board.answers(self.core.wire())[1])
        entry = self._under_way.popleft() if len(self._under_way) >= self.lag else None
        if entry is None:
            return Agreed(0)
        sent, pending = entry
        try:
            reduced = pending.result(timeout_s)
            # After a forward pass each line of code costs a cache miss, and most rounds bring nothing.
            if sent.quiet is not None and reduced[1:] == sent.quiet:
                return Agreed(reduced[0])
            return self._vector.decode(sent, reduced, check_digest=not self.core.degraded)
        except Diverged as exc:
            where = "" if self._explain is None else f"; first differing: {self._explain()}"
            return self._lose_peers(Diverged(f"{exc}{where}"))
        except (PeerError, TimeoutError) as exc:
            return self._lose_peers(exc)

    def lose_peers(self, exc: Exception) -> None:
        """Owner thread, between two steps: the channel to the other ranks has broken; the next `begin_step` degrades."""
        if not self._peers_lost:
            self._lose_peers(exc)

    def _with_ranks(self) -> Intake:
        if self._intake is None:
            raise UsageError("one rank has no intake: what its frontends want is in the next step by itself")
        return self._intake

    def _lose_peers(self, exc: Exception) -> Agreed:
        self._peers_lost = True
        self._under_way.clear()
        if self._intake is not None:
            self._admitted += self._intake.give_up()
        self._fail(exc)
        return Agreed(0, False)

    def _issue(self) -> tuple[Round, Pending] | None:
        self.board.read_news()
        now_ms = self._clock_ms()
        wire, digest = self.core.wire(), self.core.log_digest
        sent = self._vector.encode(wire, self.board, now_ms, digest, alive=self.alive, closing=self.closing)
        self.rounds += 1
        try:
            return sent, self._exchange(sent)
        except PeerError as exc:
            # Core is in no section now: the next begin_step applies alive = 0.
            self._lose_peers(exc)
            return None
