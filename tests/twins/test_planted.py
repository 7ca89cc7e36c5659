"""Rule breaks that were tried and are wrong: the same random scenario must catch each of them.

They are the negative controls of `test_random`: a kit that does not see these would not see a real one either.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from hicache_actors.ranks import Agreed, Board, Round, RoundVector, WireMap
from hicache_actors.testing.twins import TwinFailure, TwinOptions, TwinRank, run_twins

SEEDS = 12


def caught(
    kinds: set[str],
    *,
    lag: int = 1,
    make_vector: Callable[[TwinRank], RoundVector] | None = None,
    attach: Callable[[TwinRank], None] | None = None,
) -> None:
    """The break is found within `SEEDS` seeds, and as what it is."""
    found: list[str] = []
    for seed in range(SEEDS):
        options = TwinOptions(seed=seed, lag=lag, check_every=10**9)
        try:
            run_twins(options, make_vector=make_vector, attach=attach)
        except TwinFailure as failure:
            found.append(failure.kind)
            if failure.kind in kinds:
                return
        except (AssertionError, KeyError, IndexError, ValueError) as exc:
            found.append(repr(exc))
    raise AssertionError(f"not caught as {kinds} in {SEEDS} seeds: {found}")


class PackedRows(RoundVector):
    """Released jobs as the bits of one element."""

    def encode(self, wire: WireMap, board: Board, now_ms: int, digest: int, *, alive: bool = True) -> Round:
        sent = super().encode(wire, board, now_ms, digest, alive=alive)
        first = self.HEADER + self.slots
        vector = array("q", sent.vector)
        vector[first] = sum(ended << row for row, ended in enumerate(sent.vector[first : first + 62]))
        for at in range(first + 1, len(vector)):
            vector[at] = 0
        return sent._replace(vector=vector)

    def decode(self, sent: Round, reduced: Sequence[int], *, check_digest: bool = True) -> Agreed:
        first = self.HEADER + self.slots
        bits = reduced[first]
        unpacked = [*reduced[:first], *(bits >> row & 1 for row in range(self.rows))]
        return super().decode(sent, unpacked, check_digest=check_digest)


class MapOfToday(RoundVector):
    """A value is taken for whatever phase its job is in when the round comes back."""

    def __init__(self, rank: TwinRank) -> None:
        super().__init__()
        self.rank = rank

    def decode(self, sent: Round, reduced: Sequence[int], *, check_digest: bool = True) -> Agreed:
        agreed = super().decode(sent, reduced, check_digest=check_digest)
        today = dict(self.rank.core.wire().slots)
        values = [(job, today.get(job, phase), value) for job, phase, value in agreed.values]
        return agreed._replace(values=values)


def test_released_bits_packed_into_a_mask() -> None:
    caught({"wrong bytes"}, make_vector=lambda rank: PackedRows())


def test_a_stale_hit_taken_as_a_result_at_lag_two() -> None:
    caught({"wrong bytes"}, lag=2, make_vector=MapOfToday)
