"""Actors: a mailbox, a table of synchronous handlers, and state that nobody else writes.

A handler is a ``def``: it cannot await, so it is atomic against every other task, re-entrant for nobody, and has nothing to
shield.  What must wait (a copy, I/O, a collective) is a pipeline started with `Actor.spawn`; its end comes back as a message.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, TypeVarTuple

import msgspec

from hicache_actors.errors import StoppedError, UsageError
from hicache_actors.runtime.mailbox import Mailbox
from hicache_actors.runtime.messages import Ask, Declined, Envelope, Message, Stop
from hicache_actors.runtime.observation import RING_MESSAGES, ActorSnapshot, ActorState, bind_log

if TYPE_CHECKING:
    from hicache_actors.runtime.system import Job, System

M = TypeVar("M", bound=Message | Ask[Any])
R = TypeVar("R")
A = TypeVar("A", bound="Actor")
F = TypeVar("F")
Ts = TypeVarTuple("Ts")

MESSAGES_PER_TURN = 64  # about 0.1 ms of short handlers; then the loop gets a turn


def handles(kind: type[M]) -> Callable[[Callable[[A, M], F]], Callable[[A, M], F]]:
    """Mark a method as the handler of one message type: ``@handles(Completed) def completed(self, message: Completed)``."""

    def mark(method: Callable[[A, M], F]) -> Callable[[A, M], F]:
        method.__handles__ = kind  # type: ignore[attr-defined]
        return method

    return mark


class Actor:
    """Subclass it, mark handlers with `handles`, and give it to `System.start`.

    `tell` may be called from any thread, the rest on the loop of the system.  Raises TypeError at class creation for a handler
    that is a coroutine function, for two handlers of one type, and for a message type that is not a frozen, tagged struct.
    """

    mailbox_limit: ClassVar[int] = 4096
    _names: ClassVar[dict[type, str]] = {}  #: message type -> method name, so that a subclass may override the method
    _table: ClassVar[dict[type, Callable[[Any, Any], Any]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names = dict(cls._names)
        own: dict[type, str] = {}
        for name, method in vars(cls).items():
            kind = getattr(method, "__handles__", None)
            if kind is None:
                continue
            if kind in own:
                raise TypeError(f"{cls.__name__}: {own[kind]} and {name} both handle {kind.__name__}")
            _check_message_type(cls, kind)
            own[kind] = name
        names.update(own)
        table = {kind: getattr(cls, name) for kind, name in names.items()}
        for kind, method in table.items():
            if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
                raise TypeError(
                    f"{cls.__name__}.{names[kind]}: a handler is a plain def; start what must wait with self.spawn(...)"
                )
        cls._names, cls._table = names, table

    def __init__(self, name: str | None = None) -> None:
        self.name = name or type(self).__name__
        self.log = bind_log(actor=self.name)
        self.failure: BaseException | None = None
        self._state: ActorState = "new"
        self._system: System | None = None
        self._box: Mailbox[Envelope] = Mailbox(self.mailbox_limit, name=self.name)
        self._recent: deque[Message | Ask[Any]] = deque(maxlen=RING_MESSAGES)
        self._handled = 0
        self._declined = 0
        self._errors = 0
        self._discarded = 0
        self._busy_s = 0.0

    # -- hooks of subclasses ---------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Before the first message.  What it raises is raised by `System.start`, within the deadline of that stage."""

    async def on_stop(self) -> None:
        """After the last message, once, also after a failure or cancellation: shielded, but only up to the stop deadline."""

    def on_failure(self, error: BaseException) -> None:
        """A handler of this actor has failed the system; comes before `on_stop`."""

    # -- for callers -----------------------------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        """Queue and return; any thread.  Raises MailboxFull, StoppedError, or UsageError if there is no handler."""
        if type(message) not in self._table:
            self._no_handler(message)
        if message._control:
            self._box.put_control((message, None))
        else:
            self._box.put((message, None))

    async def ask(self, message: Ask[R]) -> R:
        """Queue and wait for the answer; what the handler raises is raised here.  Loop thread only.

        A caller that is cancelled while waiting loses the answer, not the work: what a handler grants must be recorded by the
        actor under a job id, never live in the reply alone.  Raises StoppedError when the actor ends first.
        """
        if type(message) not in self._table:
            self._no_handler(message)
        box = self._box
        reply = box.loop.create_future()
        if not box.owned_here:
            raise UsageError(f"ask {self.name} on the loop of its system; other threads may tell")
        box.put((message, reply))
        answer: R = await reply
        return answer

    def call(self, message: Ask[R]) -> R:
        """Run the handler now, ahead of everything queued: same table, same counts.  Loop thread only.

        Legal because handlers cannot suspend; where order after told messages matters, `ask` instead.
        """
        handler = self._table.get(type(message))
        if handler is None:
            self._no_handler(message)
        if self._state != "running":
            raise StoppedError(f"{self.name} is {self._state}")
        if not self._box.owned_here:
            raise UsageError(f"call {self.name} on the loop of its system; other threads may tell")
        self._recent.append(message)
        self._handled += 1
        try:
            result: R = handler(self, message)
        except Exception:
            self._errors += 1
            raise
        if isinstance(result, Declined):
            self._declined += 1
        return result

    @property
    def state(self) -> ActorState:
        return self._state

    def recent(self) -> tuple[Message | Ask[Any], ...]:
        """The last 256 messages handled, oldest first."""
        return tuple(self._recent)

    def snapshot(self) -> ActorSnapshot:
        box = self._box
        return ActorSnapshot(
            name=self.name,
            state=self._state,
            handled=self._handled,
            declined=self._declined,
            errors=self._errors,
            refused=box.refused,
            discarded=self._discarded,
            control_depth=box.control_depth,
            data_depth=box.data_depth,
            control_high_water=box.control_high_water,
            data_high_water=box.data_high_water,
            busy_s=self._busy_s,
        )

    # -- for the actor itself --------------------------------------------------------------------------------------------

    @property
    def system(self) -> System:
        """The system that runs this actor.  Raises UsageError before its start."""
        if self._system is None:
            raise UsageError(f"{self.name} has not been started")
        return self._system

    def spawn(self, name: str, pipeline: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> Job:
        """Start a pipeline in the system's task group: see `System.spawn`."""
        return self.system.spawn(name, pipeline, *args)

    # -- for the system --------------------------------------------------------------------------------------------------

    def _bind(self, system: System) -> None:
        self._box.bind()
        self._system = system

    async def _serve(self) -> None:
        """Handle messages until Stop.  Raises what a told message's handler raised."""
        self._state = "running"
        box = self._box
        try:
            while True:
                await box.wait()
                started = perf_counter()
                try:
                    taken = self._drain()
                finally:
                    self._busy_s += perf_counter() - started
                if taken < 0:
                    break
                if taken == MESSAGES_PER_TURN:
                    await asyncio.sleep(0)
        except Exception as error:
            self.failure = error
            raise
        finally:
            self._end()

    def _drain(self) -> int:
        """Handle at most one turn's messages; -> how many, or -1 after Stop."""
        get, table, remember = self._box.get, self._table, self._recent.append
        for taken in range(MESSAGES_PER_TURN):
            envelope = get()
            if envelope is None:
                return taken
            message, reply = envelope
            kind = type(message)
            if kind is Stop:
                return -1
            remember(message)
            self._handled += 1
            try:
                result = table[kind](self, message)
            except Exception as error:
                self._errors += 1
                if reply is None:
                    raise  # nobody hears it: a bug
                self._answer_error(message, reply, error)
            else:
                if reply is not None:
                    if isinstance(result, Declined):
                        self._declined += 1
                    if not reply.done():  # done: the asker was cancelled; the work stands
                        reply.set_result(result)
        return MESSAGES_PER_TURN

    def _answer_error(self, message: Message | Ask[Any], reply: asyncio.Future[Any], error: Exception) -> None:
        if reply.done():
            self.log.warning("asker_gone", message=type(message).__name__, exc_info=error)
            return
        if isinstance(error, StopIteration):  # a future refuses to carry one
            wrapped = RuntimeError(f"handler of {type(message).__name__} raised StopIteration")
            wrapped.__cause__ = error
            error = wrapped
        reply.set_exception(error)

    def _end(self) -> None:
        self._state = "stopped" if self.failure is None else "failed"
        for message, reply in self._box.close():
            if reply is None:
                self._discarded += type(message) is not Stop
            elif not reply.done():
                reply.set_exception(StoppedError(f"{self.name} has {self._state} before it answered"))

    def _stop(self) -> None:
        if self._state == "running":
            self._box.put_control((Stop(), None))

    def _no_handler(self, message: object) -> NoReturn:
        raise UsageError(f"{self.name} has no handler for {type(message).__name__}")


def _check_message_type(actor: type, kind: type) -> None:
    config = getattr(kind, "__struct_config__", None)
    if not (issubclass(kind, Message | Ask) and isinstance(config, msgspec.structs.StructConfig)):
        raise TypeError(f"{actor.__name__}: {kind.__name__} is neither a Message nor an Ask")
    if not config.frozen or config.tag is None:
        raise TypeError(f"{actor.__name__}: {kind.__name__} must be a frozen, tagged struct")
