"""Which slots are given out next: those behind a hand that goes round through all of them.

What was used since the hand came by last is spared, once; the rest goes.  So what is unused for long makes room, as with an order
by last use, but neighbours go together: a batch is given a run of slots, in a store that is full as in one that is empty.  The
pages of a prompt are stored together and used together, so what is spared lies together too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hicache_actors.backends.slab.entries import FREE, READY

USED: Final = 1 << 63
"""In the time of the last use: it is later than the hand's last passage."""

_MAX_SPARED: Final = 8  # for one that is taken: where more are in use, the first ones go all the same ...
_MIN_SPARED: Final = 64
_MAX_PART: Final = 4  # ... and where this part of all is: the hand must not meet what has just been stored

Slots = NDArray[np.int64]

_NONE: Final = np.empty(0, np.int64)


class Clock:
    """``hand``: 8 bytes that processes share; the columns are the table's.  For whoever may change the table."""

    def __init__(
        self,
        hand: memoryview,
        states: NDArray[Any],
        owners: NDArray[Any],
        used: NDArray[Any],
        lives: Callable[[int], bool],
    ) -> None:
        self._hand = np.frombuffer(hand, "<u8")
        self._states, self._owners, self._used, self._lives = states, owners, used, lives

    def take(self, n: int) -> Slots:
        """Up to ``n`` slots in the order of the file; fewer only if all others are being written."""
        slots = len(self._states)
        start, seen = int(self._hand[0]) % slots, 0
        limit = min(max(_MAX_SPARED * n, _MIN_SPARED), slots // _MAX_PART)
        taken, spared = _NONE, _NONE  # as distances from the hand
        living: dict[int, bool] = {}
        while len(taken) < n and seen < slots and len(spared) <= limit:
            at = (start + seen) % slots
            look = min(max(limit + 1 - len(spared), n - len(taken)), slots - at, slots - seen)
            states, used = self._states[at : at + look], self._used[at : at + look]
            may_go = (states == FREE) | ((states == READY) & (used < USED))
            for number in np.flatnonzero((states != FREE) & (states != READY)).tolist():
                owner = int(self._owners[at + number])
                if owner not in living:
                    living[owner] = self._lives(owner)
                may_go[number] = not living[owner]
            found = np.flatnonzero(may_go)[: n - len(taken)]
            passed = look if len(taken) + len(found) < n else int(found[-1]) + 1
            taken = np.append(taken, found + seen)
            if passed > len(found):
                hot = np.flatnonzero((states[:passed] == READY) & (used[:passed] >= USED))
                self._used[hot + at] &= ~np.uint64(USED)
                spared = np.append(spared, hot + seen)
            seen += passed
        if len(taken) < n:  # nearly all of them are in use, so order decides
            taken = np.sort(np.append(taken, spared))[:n]
        if len(taken):
            self._hand[0] = (start + int(taken[-1]) + 1) % slots
        return (taken + start) % slots
