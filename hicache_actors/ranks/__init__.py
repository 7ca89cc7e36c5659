"""Agreement between ranks, and the drivers that open Core's sections.

Local answers (what a copy, a read or a store reported on this rank) are filed on the `Board`, by any thread.  They
reach Core only as agreed values: the `StepDriver` sends them in one fixed int64 vector per step, reduced with MIN over
the ranks, and applies the round of step s at step s + lag.  One rank is the same code with the identity as exchange.
The `AutoDriver` serves one rank on an event loop: each call is a section of its own, and apply runs at most once per
loop turn when something waits.

Nothing here imports an event loop or a device; how effects are executed, how a callback is scheduled and what the clock
says are given by the caller.
"""

from __future__ import annotations

from hicache_actors.ranks.auto import AutoDriver
from hicache_actors.ranks.board import RELEASED, Board, Value, WireMap
from hicache_actors.ranks.driver import Driver, Intent, Replica
from hicache_actors.ranks.round import (
    Agreed,
    Exchange,
    Pending,
    Reduced,
    Round,
    RoundVector,
    exchange_alone,
)
from hicache_actors.ranks.step import StepDriver

__all__ = [
    "RELEASED",
    "Agreed",
    "AutoDriver",
    "Board",
    "Driver",
    "Exchange",
    "Intent",
    "Pending",
    "Reduced",
    "Replica",
    "Round",
    "RoundVector",
    "StepDriver",
    "Value",
    "WireMap",
    "exchange_alone",
]
