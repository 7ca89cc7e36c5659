"""One round of agreement: a fixed vector, reduced with MIN, and the map it was issued with."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec

from hicache_actors.core.words import Phase, encode_result
from hicache_actors.errors import PeerError
from hicache_actors.ranks.board import Board, Value, WireMap, ended

PROTOCOL_VERSION: Final = 2
NOT_YET: Final = -1

_DEAD, _CLOSING, _RUNNING = 0, 1, 2

_HEADER: Final = Struct("=6q")
_DIGEST_MASK: Final = (1 << 63) - 1  # so that the negative fits into an int64 too


class Round(msgspec.Struct, frozen=True):
    """One round as this rank issued it.  ``wire`` stays here: the map may have moved when the result comes back.

    ``quiet``: what comes back, but for the clock, if no rank has an answer; None if this one sends some.
    """

    wire: WireMap
    vector: array[int]
    quiet: array[int] | None

    @property
    def has_news(self) -> bool:
        """This rank sends an answer in it."""
        return self.quiet is None


class Agreed(msgspec.Struct, frozen=True):
    """A reduced vector, read with the map of the round it answers: what `Core.apply` takes in."""

    now_ms: int
    alive: bool = True
    values: Sequence[Value] = ()
    released: Iterable[int] = ()


class Diverged(PeerError):
    """The ranks have taken different decisions; all of them learn it in the same round."""


class RoundVector:
    """The fixed int64 vector of one round, made to be reduced with MIN, element by element.

    ``now_ms, alive, version, -version, digest, -digest``, then one value per slot (-1: not yet), then one *element* per row
    (0: not yet, `SPOILT` or `RELEASED`).  ``alive`` is 0 for a dead rank, 1 for one that closes its cache, else 2.  Elements
    are never packed into bits: the MIN of two masks is not their AND.  A pair x, -x is the same on all ranks exactly if the
    two minima still cancel.
    """

    HEADER: Final = 6

    def __init__(self, slots: int = 64, rows: int = 64, version: int = PROTOCOL_VERSION) -> None:
        self.slots, self.rows, self.version = slots, rows, version
        self._length = self.HEADER + slots + rows
        self._blank = array("q", [0] * self.HEADER + [NOT_YET] * slots + [0] * rows).tobytes()

    def __len__(self) -> int:
        return self._length

    def encode(
        self, wire: WireMap, board: Board, now_ms: int, digest: int, *, alive: bool = True, closing: bool = False
    ) -> Round:
        """This rank's vector.  A rank that is not alive answers 0 for all open work, so that no peer waits for it."""
        vector = array("q", self._blank)
        digest &= _DIGEST_MASK
        state = _DEAD if not alive else _CLOSING if closing else _RUNNING
        _HEADER.pack_into(vector, 0, now_ms, state, self.version, -self.version, digest, -digest)
        has_news = board.fill(wire, vector, self.HEADER, self.HEADER + self.slots)
        if not alive:
            for at, (_, phase) in enumerate(wire.slots, self.HEADER):
                vector[at] = 0 if phase is Phase.HIT else encode_result(0)
        return Round(wire, vector, None if has_news or state != _RUNNING else vector[1:])

    @staticmethod
    def reduce_min(vectors: Sequence[Sequence[int]]) -> array[int]:
        """The reduction, in memory.  Raises PeerError if the ranks disagree on the shape of a round."""
        if len({len(vector) for vector in vectors}) != 1:
            raise PeerError(f"rounds of different lengths: {[len(vector) for vector in vectors]}")
        return array("q", map(min, zip(*vectors, strict=True)))

    def decode(self, sent: Round, reduced: Sequence[int], *, check_digest: bool = True) -> Agreed:
        """Read the reduced vector of a round that this rank sent.  In one that is `Round.quiet` there is nothing but the clock.

        Raises PeerError if a rank speaks another protocol version or has taken other decisions (a dead rank is told by
        ``alive``, not by this: what it decided no longer matters).
        """
        if len(reduced) != self._length:
            raise PeerError(f"a round of {len(reduced)} elements, not {self._length}")
        now_ms, alive, version, minus_version, digest, minus_digest = reduced[: self.HEADER]
        if version != -minus_version:
            raise PeerError(f"protocol versions {version} and {-minus_version} in one group")
        if alive == _CLOSING and sent.vector[1] == _RUNNING:
            raise PeerError("a peer closes its cache, and this rank's engine goes on")
        if alive and check_digest and digest != -minus_digest:
            raise Diverged(f"the ranks have diverged: decision logs {digest:#x} and {-minus_digest:#x}")
        wire = sent.wire
        values: list[Value] = []
        released: list[int] = []
        for at, (job, phase) in enumerate(wire.slots, self.HEADER):
            if (value := reduced[at]) > NOT_YET:
                values.append((job, phase, value))
        for at, job in enumerate(wire.rows, self.HEADER + self.slots):
            if element := reduced[at]:
                released.append(ended(job, element))
        return Agreed(now_ms, bool(alive), values, released)


class Pending(Protocol):
    """A round under way."""

    def result(self, timeout_s: float) -> Sequence[int]:
        """The reduced vector; blocks the calling thread.  Raises PeerError or TimeoutError if a peer did not answer."""
        ...


Exchange: TypeAlias = Callable[[Round], Pending]


class Reduced(NamedTuple):
    """A round that is complete."""

    vector: Sequence[int]

    def result(self, timeout_s: float) -> Sequence[int]:
        return self.vector


def exchange_alone(sent: Round) -> Pending:
    """The exchange of a group of one."""
    return Reduced(sent.vector)
