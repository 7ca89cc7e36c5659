"""What actors say to each other: frozen, tagged structs, so a message can be logged, kept in a ring, encoded and replayed.

A message carries its own job id and request id: context variables do not cross a mailbox.  The reply slot is no part of the
message; it lies beside it in the `Envelope`.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import msgspec

R = TypeVar("R")


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything that is told: no reply, and an exception in its handler is a bug that fails the system."""

    _control: ClassVar[bool] = False


class Control(Message, frozen=True):
    """Base of messages that overtake data and are never refused: completions, aborts, pressure; they free resources."""

    _control: ClassVar[bool] = True


class Ask(msgspec.Struct, Generic[R], frozen=True, tag=True):
    """Base of questions: ``class Free(Ask[int], frozen=True)`` is answered with an int; an exception goes to the asker."""


class Declined(msgspec.Struct, frozen=True, tag=True):
    """An expected refusal, returned as a value (and counted), never raised.  Subclass it to say more."""

    reason: str


class Stop(Control, frozen=True):
    """Ends an actor once the control messages before it are handled.  Sent by the system only."""


Envelope: TypeAlias = tuple[Message | Ask[Any], "asyncio.Future[Any] | None"]
"""A message and its reply slot (None for a tell)."""
