"""Complaints about other caches (rows P of the field reports), measured on this one.

Every row sets up what the report describes and gives the figure that it asks about; ``*_limit`` beside it is what the report, or
the same run without the library, says that the figure should stay below (``*_floor``: above).
"""

from __future__ import annotations

import asyncio
import tempfile
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from hicache_actors.bench import reports_io, reports_tree
from hicache_actors.bench.figures import Figures
from hicache_actors.bench.progress import Progress

Row = Callable[[str, int], Awaitable[Figures]]
"""(a folder of its own, divisor of the sizes) -> figures."""

ROWS: Final[Mapping[str, Row]] = {
    "P04": reports_tree.ends_of_requests,
    "P05": reports_tree.submits,
    "P06": reports_tree.evictions,
    "P08": reports_io.busy_thread,
    "P09": reports_io.busy_process,
    "P10": reports_io.noticed,
    "P11": reports_io.behind_a_large_one,
    "P12": reports_io.stop_policies,
    "P13": reports_io.asked_again,
    "P26": reports_tree.misses_evict,
}


def run(options: Namespace, *, quiet: bool = False) -> Figures:
    return asyncio.run(measure(8 if options.quick else 1, quiet=quiet))


async def measure(divisor: int, *, quiet: bool, rows: Mapping[str, Row] = ROWS) -> Figures:
    progress = Progress(len(rows), quiet=quiet)
    figures: dict[str, float | str | Figures] = {}
    try:
        for name, row in rows.items():
            progress.step(name)
            with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
                figures[name] = await row(folder, divisor)
    finally:
        progress.close()
    return figures
