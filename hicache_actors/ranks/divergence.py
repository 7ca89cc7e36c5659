"""Which decision the ranks took differently first.

Each rank keeps its last decisions with the rolling digest after each.  All ranks find a divergence in the same round, so all of
them come here, and compare: the first digest that differs names the decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hicache_actors.core.state import KEPT_DECISIONS, Decision, Note
from hicache_actors.errors import PeerError
from hicache_actors.ranks.sync import RankSync

_NONE: Final = -1
_LARGE: Final = (1 << 63) - 1
_FIELDS: Final = 4


def explain(sync: RankSync, decisions: Sequence[Decision], decided: int, timeout_s: float) -> str:
    """``decided``: how many there were in all, of which ``decisions`` are the last.  -> a sentence; never raises.  Blocks."""
    try:
        return _explain(sync, decisions, decided, timeout_s)
    except PeerError as error:
        return f"and did not live to compare their decisions ({error})"


def _explain(sync: RankSync, decisions: Sequence[Decision], decided: int, timeout_s: float) -> str:
    oldest = decided - len(decisions)
    start = -sync.reduce([-oldest], timeout_s)[0]
    digests = [decisions[at - oldest].digest if at < decided else _NONE for at in range(start, start + KEPT_DECISIONS)]
    reduced = sync.reduce([*digests, *(-digest for digest in digests)], timeout_s)
    pairs = zip(reduced[:KEPT_DECISIONS], reduced[KEPT_DECISIONS:], strict=True)
    differing = next((at for at, (least, minus_most) in enumerate(pairs, start) if least != -minus_most), None)
    if differing is None:
        return "in none of the decisions that are still known"
    mine = decisions[differing - oldest] if differing < decided else None
    table = [_LARGE] * (sync.size * _FIELDS)
    at = sync.rank * _FIELDS
    table[at : at + _FIELDS] = (_NONE, 0, 0, 0) if mine is None else (mine.code, mine.a, mine.b, mine.c)
    table = list(sync.reduce(table, timeout_s))
    said = [f"rank {rank} {_name(*table[rank * _FIELDS : (rank + 1) * _FIELDS])}" for rank in range(sync.size)]
    word = "at or before" if differing == start and start else "in"
    return f"{word} decision {differing}: {', '.join(said)}"


def _name(code: int, a: int, b: int, c: int) -> str:
    return "none" if code == _NONE else f"{Note(code).name}({a}, {b}, {c})"
