"""Ranks in simulation: `run_ranks` runs one seed, `RankHarness` lets a test change it.

``python -m hicache_actors.testing.ranks --seed 17`` replays a seed.
"""

from __future__ import annotations

from hicache_actors.testing.ranks.engine import ScriptedEngine
from hicache_actors.testing.ranks.harness import RankHarness, run_ranks
from hicache_actors.testing.ranks.network import SimNetwork, SimTransport
from hicache_actors.testing.ranks.options import FailureKind, RankFailure, RankOptions, Trouble
from hicache_actors.testing.ranks.rank import SimRank

__all__ = [
    "FailureKind",
    "RankFailure",
    "RankHarness",
    "RankOptions",
    "ScriptedEngine",
    "SimNetwork",
    "SimRank",
    "SimTransport",
    "Trouble",
    "run_ranks",
]
