"""A bar on stderr for runs that take a while."""

from __future__ import annotations

import sys
import time
from typing import Final, TextIO

_WIDTH: Final = 24


class Progress:
    """``steps`` of a run, told one by one.  A bar on a terminal; elsewhere a line a stage, or nothing if ``quiet``.

    With None nobody knows how many there are: then it is a clock and the stage, and nothing where there is no terminal.
    """

    def __init__(self, steps: int | None, *, quiet: bool = False, out: TextIO | None = None) -> None:
        self._steps, self._done = steps, 0
        self._out = sys.stderr if out is None else out
        self._bar = self._out.isatty()
        self._quiet = quiet and not self._bar
        self._stage = ""
        self._begun_s = time.monotonic()

    def step(self, stage: str) -> None:
        """``stage`` begins its next step."""
        if self._bar:
            self._draw(stage)
        elif not self._quiet and self._steps is not None and stage != self._stage:
            print(f"{stage} ...", file=self._out, flush=True)
        self._stage = stage
        self._done += 1

    def close(self) -> None:
        if self._bar:
            self._out.write("\r\033[K")
            self._out.flush()

    def _draw(self, stage: str) -> None:
        took_s = time.monotonic() - self._begun_s
        if self._steps is None:
            self._out.write(f"\r\033[K{took_s:4.0f} s  {stage}")
            self._out.flush()
            return
        share = min(1.0, self._done / max(1, self._steps))
        filled = round(share * _WIDTH)
        self._out.write(f"\r\033[K[{'#' * filled}{'.' * (_WIDTH - filled)}] {share:4.0%} {took_s:4.0f} s  {stage}")
        self._out.flush()
