"""A debugging aid: pages that become free are overwritten, so that whoever uses them too late sees it."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from hicache_actors.core.words import Slots
from hicache_actors.memory.kv import Raw
from hicache_actors.memory.shapes import KVShape

POISON: Final = 0xA5
"""Every byte of a page that nobody owns."""


class Paged(Protocol):
    """`KVTensors` on the CPU, or `HostMemory`."""

    @property
    def shape(self) -> KVShape: ...

    def raw(self, layer: int) -> tuple[Raw, ...]: ...


def poison(memory: Paged, slots: Slots) -> None:
    """Fill these pages, on this thread.  Nobody may own them, and no copy may touch them: that is what it is there to prove."""
    index = np.frombuffer(slots, np.uint32)
    if not index.size:
        return
    for layer in range(memory.shape.layers):
        for raw in memory.raw(layer):
            raw[index] = np.frombuffer(bytes([POISON]) * raw.itemsize, raw.dtype)[0]
