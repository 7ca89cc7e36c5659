"""What both drivers share: owner thread, inbox, effects, and the way into degraded mode."""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from hicache_actors.core.words import (
    Effect,
    Forget,
    StartAttach,
    StartBackup,
    StartClear,
    StartDrain,
    StartLoad,
    StartOpen,
    StartPrefetch,
    StartWriteBack,
)
from hicache_actors.errors import HiCacheError, UsageError
from hicache_actors.ranks.board import Board, Value, WireMap
from hicache_actors.ranks.round import Agreed

if TYPE_CHECKING:
    from hicache_actors.ranks.intents import AnyTold

T = TypeVar("T")
Intent: TypeAlias = Callable[[Any], object]
"""Called with Core inside a section; it must not raise."""

_STARTS: Final = (StartPrefetch, StartLoad, StartWriteBack, StartBackup, StartDrain, StartAttach, StartClear, StartOpen)


class Replica(Protocol):
    """What a driver needs of Core."""

    @property
    def needs_step(self) -> bool: ...

    @property
    def now_ms(self) -> int: ...

    @property
    def next_due_ms(self) -> int | None: ...

    @property
    def degraded(self) -> bool: ...

    @property
    def log_digest(self) -> int: ...

    def apply(
        self,
        now_ms: int,
        values: Iterable[Value],
        released: Iterable[int],
        intents: Iterable[Intent] = (),
        alive: bool = True,
    ) -> None: ...

    def take_effects(self) -> list[Effect]: ...

    def wire(self) -> WireMap: ...

    def degrade(self) -> None: ...


class _Section:
    """``with driver.section(): core.verb()``; kept by its driver, so entering makes no object."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        self._driver._enter()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        # An error that names a wrong call has changed nothing; any other exception may have left Core half-way.
        self._driver._leave(exc if isinstance(exc, Exception) and not isinstance(exc, HiCacheError) else None)


def _one_by_one(left: deque[Intent]) -> Iterator[Intent]:
    """Each intent leaves the queue when it has run."""
    while left:
        yield left[0]
        left.popleft()


class Driver(abc.ABC):
    """What both drivers share: owner thread, inbox, effects, and the way into degraded mode."""

    def __init__(
        self,
        core: Replica,
        board: Board,
        clock_ms: Callable[[], int],
        execute: Callable[[list[Effect]], None],
        on_failure: Callable[[BaseException], None] | None,
    ) -> None:
        self.core, self.board = core, board
        self.failure: BaseException | None = None  #: why this rank is no longer alive, or has left its group
        self._clock_ms, self._execute, self._on_failure = clock_ms, execute, on_failure
        self._inbox: deque[Intent] = deque()
        self._section = _Section(self)
        self._open = False
        self._owner: int | None = None

    def section(self) -> _Section:
        """A context in which Core may be changed.

        Raises UsageError on a foreign thread (and, in step mode, outside a step).  An exception of a verb passes
        through; if it is not one of ours, Core may be half-way and is degraded at once.
        """
        return self._section

    def decide(self, verb: Callable[[Any], T]) -> T:
        """Run a verb of Core in a section -> its answer.

        If Core breaks in it, it is degraded at once and the verb runs again on what is left: a bug of the cache shall fail no
        request.  Raises what the verb refuses, and UsageError where no section may be opened.
        """
        with self._section:
            try:
                return verb(self.core)
            except HiCacheError:
                raise
            except Exception as exc:
                self._break(exc)
                return verb(self.core)

    def poll(self, verb: Callable[[Any], T]) -> T:
        """`decide` for a verb that is asked again and again: its None does not count as work of this step."""
        return self.decide(verb)

    @abc.abstractmethod
    def together(self) -> AbstractContextManager[None]:
        """A context whose calls are one section, so that they open one write-back and one backup at most.

        A step is one by itself.  Raises `UsageError` on a foreign thread, and inside another section.
        """

    def check_owner(self) -> None:
        """For reads of Core (`match`, results): raises UsageError on a thread that does not own Core."""
        if not self.owned_here:
            raise UsageError("this call belongs on the thread that owns the cache's decisions")

    @property
    def owned_here(self) -> bool:
        """Whether the calling thread owns Core's decisions (or nobody does yet)."""
        return self._owner is None or threading.get_ident() == self._owner

    @property
    def has_ranks(self) -> bool:
        """Whether what a frontend wants has to travel to other ranks first."""
        return False

    @property
    def alive(self) -> bool:
        return self.failure is None

    @property
    @abc.abstractmethod
    def needs_step(self) -> bool:
        """Whether the engine has to make steps, empty ones too, for open work to end."""

    @abc.abstractmethod
    def defer(self, release: Intent) -> None:
        """Owner thread: run a release or a stop, now if it may be, else in the next section."""

    @abc.abstractmethod
    def catch_up(self) -> None:
        """Owner thread: apply what waits, where this driver may do so between its turns."""

    @abc.abstractmethod
    def post(self, intent: Intent, told: AnyTold | None = None) -> None:
        """Any thread: the next apply runs the intent.

        With ranks ``told`` says the same to the others, and the intent runs when it has reached them; one without may only read.
        """

    @abc.abstractmethod
    def fail(self, exc: BaseException) -> None:
        """Any thread: this rank's movers are dead; its next answer says so and the cache degrades with it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Nothing is applied any more."""

    @abc.abstractmethod
    def _enter(self) -> None: ...

    @abc.abstractmethod
    def _leave(self, broken: Exception | None) -> None: ...

    def _fail(self, exc: BaseException) -> None:
        if self.failure is None:
            self.failure = exc
            if self._on_failure is not None:
                self._on_failure(exc)

    def _break(self, exc: Exception) -> None:
        """Core itself has failed: nothing it holds can be trusted, so it is degraded in this very section."""
        self._fail(exc)
        self.core.degrade()

    def _apply(self, agreed: Agreed, queued: Sequence[Intent] = ()) -> None:
        left: deque[Intent] | tuple[()] = ()
        intents: Iterable[Intent] = ()
        if queued or self._inbox:
            left = deque(queued)
            while self._inbox:
                left.append(self._inbox.popleft())
            intents = _one_by_one(left)
        try:
            self.core.apply(agreed.now_ms, agreed.values, agreed.released, intents, agreed.alive)
        except Exception as exc:
            self._break(exc)
            # Somebody waits for each of them, the one that broke Core included.
            for intent in left:
                try:
                    intent(self.core)
                except Exception as again:
                    self._fail(again)

    def _take_effects(self) -> list[Effect]:
        """-> what is left for the system; the board learns first which jobs may answer."""
        try:
            effects = self.core.take_effects()
        except Exception as exc:
            self._break(exc)
            effects = self.core.take_effects()
        for effect in effects:
            if isinstance(effect, _STARTS):
                self.board.open(effect.job)
            elif isinstance(effect, Forget):
                self.board.forget(effect.job)
        return effects
