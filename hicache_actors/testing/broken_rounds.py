"""Rounds that break a rule of agreement: negative controls, which a harness of simulated ranks must catch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import msgspec

from hicache_actors.ranks import RELEASED, Agreed, Board, Round, RoundVector, WireMap


class PackedRows(RoundVector):
    """Released jobs as the bits of one element: MIN of masks is not AND."""

    def encode(
        self, wire: WireMap, board: Board, now_ms: int, digest: int, *, alive: bool = True, closing: bool = False
    ) -> Round:
        sent = super().encode(wire, board, now_ms, digest, alive=alive, closing=closing)
        first = self.HEADER + self.slots
        vector = array("q", sent.vector)
        vector[first] = sum(bool(element) << row for row, element in enumerate(sent.vector[first : first + 62]))
        for at in range(first + 1, len(vector)):
            vector[at] = 0
        return msgspec.structs.replace(sent, vector=vector)

    def decode(self, sent: Round, reduced: Sequence[int], *, check_digest: bool = True) -> Agreed:
        first = self.HEADER + self.slots
        bits = reduced[first]
        unpacked = [*reduced[:first], *((bits >> row & 1) * RELEASED for row in range(self.rows))]
        return super().decode(sent, unpacked, check_digest=check_digest)


class MapOfToday(RoundVector):
    """A value is taken for whatever phase its job is in when the round comes back; ``wire`` is that of the rank's core."""

    def __init__(self, wire: Callable[[], WireMap]) -> None:
        super().__init__()
        self._wire = wire

    def decode(self, sent: Round, reduced: Sequence[int], *, check_digest: bool = True) -> Agreed:
        agreed = super().decode(sent, reduced, check_digest=check_digest)
        today = dict(self._wire().slots)
        values = [(job, today.get(job, phase), value) for job, phase, value in agreed.values]
        return msgspec.structs.replace(agreed, values=values)
