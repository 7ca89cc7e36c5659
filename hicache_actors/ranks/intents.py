"""What the leader's frontends want, as messages: each rank runs the same verb of Core, in list order, in the same apply.

Handles exist on the leader only.  An *ask* puts a waiter into Core; it is named by a number that the leader gives, since what takes
it back may travel in the same list.
"""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

import msgspec

from hicache_actors.core import Core
from hicache_actors.core.config import StoreOn, WritePolicy
from hicache_actors.core.order import Eviction
from hicache_actors.errors import HiCacheError, PeerError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.keys.scope import Scope
from hicache_actors.transfer.completions import Completion

Asked: TypeAlias = dict[int, int]
"""Number of an ask -> its waiter in Core."""


class Told(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages.  ``run`` is called with Core inside a section, on ranks other than the leader."""

    def run(self, core: Core, asked: Asked) -> None:
        raise NotImplementedError


class AskAcquire(Told, frozen=True):
    number: int
    prompt: Prompt
    rid: str
    deadline_s: float | None
    priority: int
    room: int = 0
    used_tokens: int = 0

    def run(self, core: Core, asked: Asked) -> None:
        asked[self.number] = core.acquire(
            self.prompt, self.rid, self.deadline_s, self.priority, self.room, self.used_tokens
        )


class AskStored(Told, frozen=True):
    number: int
    prompt: Prompt

    def run(self, core: Core, asked: Asked) -> None:
        asked[self.number] = core.stored(self.prompt)


class AskDrained(Told, frozen=True):
    number: int

    def run(self, core: Core, asked: Asked) -> None:
        asked[self.number] = core.drained()


class AskRoom(Told, frozen=True):
    number: int
    n_tokens: int
    deadline_s: float

    def run(self, core: Core, asked: Asked) -> None:
        asked[self.number] = core.room(self.n_tokens, self.deadline_s)


class AskAttach(Told, frozen=True):
    number: int
    url: str
    deadline_s: float

    def run(self, core: Core, asked: Asked) -> None:
        asked[self.number] = core.attach(self.number, self.url, self.deadline_s)


class AskClear(Told, frozen=True):
    number: int
    deadline_s: float

    def run(self, core: Core, asked: Asked) -> None:
        asked[self.number] = core.clear_storage(self.deadline_s)


class Detach(Told, frozen=True):
    """What has begun at the store may end for ``deadline_s``, on each rank."""

    deadline_s: float

    def run(self, core: Core, asked: Asked) -> None:
        core.set_storage(False, self.deadline_s)


class LeaveRoom(Told, frozen=True):
    """Who asked for room has gone, or has done with it."""

    number: int

    def run(self, core: Core, asked: Asked) -> None:
        waiter = asked.pop(self.number, None)
        if waiter is not None:
            core.leave_room(waiter)


class TakeBack(Told, frozen=True):
    """Who asked has gone, or has waited long enough."""

    number: int
    acquire: bool

    def run(self, core: Core, asked: Asked) -> None:
        waiter = asked.pop(self.number, None)
        if waiter is not None and self.acquire:
            core.cancel_acquire(waiter)
        elif waiter is not None:
            core.cancel_waiter(waiter)


class Release(Told, frozen=True):
    """``number`` is the lease's: its request id may have been used again.  ``after``: the leader's release has an event."""

    rid: str
    number: int
    after: bool

    def run(self, core: Core, asked: Asked) -> None:
        lease = core.find_lease(self.rid)
        if lease is not None and lease.number == self.number:
            core.release(lease, _fired() if self.after else None)


class Finish(Told, frozen=True):
    rid: str
    after: bool

    def run(self, core: Core, asked: Asked) -> None:
        core.finish(self.rid, _fired() if self.after else None)


class StopPrefetch(Told, frozen=True):
    job: int
    rid: str

    def run(self, core: Core, asked: Asked) -> None:
        core.stop_prefetch(self.job, self.rid)


class Reset(Told, frozen=True):
    def run(self, core: Core, asked: Asked) -> None:
        core.reset()


class AdvanceEpoch(Told, frozen=True):
    weights: str

    def run(self, core: Core, asked: Asked) -> None:
        core.advance_epoch(self.weights)


class SetWritePolicy(Told, frozen=True):
    policy: WritePolicy

    def run(self, core: Core, asked: Asked) -> None:
        core.set_write_policy(self.policy)


class SetEviction(Told, frozen=True):
    eviction: Eviction

    def run(self, core: Core, asked: Asked) -> None:
        core.set_eviction(self.eviction)


class SetStoreOn(Told, frozen=True):
    store_on: StoreOn

    def run(self, core: Core, asked: Asked) -> None:
        core.set_store_on(self.store_on)


AnyTold: TypeAlias = (
    AskAcquire
    | AskStored
    | AskDrained
    | AskRoom
    | AskAttach
    | AskClear
    | Detach
    | LeaveRoom
    | TakeBack
    | Release
    | Finish
    | StopPrefetch
    | Reset
    | AdvanceEpoch
    | SetWritePolicy
    | SetEviction
    | SetStoreOn
)


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One step's intake."""

    number: int
    told: list[AnyTold]


def encode(batch: Batch) -> bytes:
    return msgspec.msgpack.encode(batch, enc_hook=_plain)


def decode(data: bytes) -> Batch:
    """Raises `PeerError` for bytes that are no intake of this version."""
    try:
        return msgspec.msgpack.decode(data, type=Batch, dec_hook=_rich)
    except msgspec.MsgspecError as error:
        raise PeerError(f"not an intake: {error}") from error


def run_quietly(told: Told, core: Core, *, asked: Asked) -> None:
    """What Core refuses here it refuses on the leader too, where somebody hears of it."""
    try:
        told.run(core, asked)
    except HiCacheError:
        return


def _fired() -> Completion:
    """That there is an event is replicated; that of the leader tells nothing of the memory here."""
    event = Completion()
    event.finish()
    return event


def _plain(value: Any) -> Any:
    if isinstance(value, Prompt):
        return (bytes(value.packed), value.scope.lora, value.scope.salt)
    raise TypeError(f"{type(value).__name__} does not travel")


def _rich(kind: type[Any], value: Any) -> Any:
    if kind is Prompt:
        packed, lora, salt = value
        return Prompt(array("q", packed), Scope(lora, salt))
    raise TypeError(f"{kind.__name__} does not travel")
