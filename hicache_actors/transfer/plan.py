"""Plans: which page goes where, cut into pieces of work that a device runs."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hicache_actors.core.words import SLOT_BYTES, Slots
from hicache_actors.errors import UsageError
from hicache_actors.memory.kv import Raw
from hicache_actors.memory.shapes import KVShape, batch_pages

_Index: TypeAlias = slice | NDArray[np.intp]


class Paged(Protocol):
    """One side of a copy: `KVTensors` or `HostMemory`."""

    @property
    def shape(self) -> KVShape: ...

    def raw(self, layer: int) -> tuple[Raw, ...]: ...


def batches(slots: Slots, page_bytes: int) -> tuple[range, ...]:
    """Positions in ``slots``, cut into batches of at most 64 pages and 32 MiB (one page at least)."""
    pages = len(slots) // SLOT_BYTES
    step = batch_pages(page_bytes)
    return tuple(range(start, min(start + step, pages)) for start in range(0, pages, step))


class CopyPlan:
    """Copy ``source_slots`` of ``source`` to ``target_slots`` of ``target``, page by page in order, in either direction.

    Made anywhere, changed never.  The plan keeps both sides alive; it owns no slots.  Making it builds the index arrays, once;
    after that no Python runs per page.  Raises `UsageError` if the sides do not fit or a slot does not exist.
    """

    def __init__(self, source: Paged, source_slots: Slots, target: Paged, target_slots: Slots) -> None:
        if source.shape != target.shape:
            raise UsageError(f"cannot copy pages of {source.shape} to {target.shape}")
        if len(source_slots) != len(target_slots):
            raise UsageError(
                f"{len(source_slots) // SLOT_BYTES} source pages for {len(target_slots) // SLOT_BYTES} target pages"
            )
        self.shape = source.shape
        self.pages = len(source_slots) // SLOT_BYTES
        self.layers = range(source.shape.layers)
        self.batches = batches(source_slots, source.shape.page_bytes)
        self._source = source
        self._target = target
        self._moves = tuple(
            zip(
                _indices(source, source_slots, self.batches, "source"),
                _indices(target, target_slots, self.batches, "target"),
                strict=True,
            )
        )

    @property
    def nbytes(self) -> int:
        return self.pages * self.shape.page_bytes

    def work(self, layers: range | None = None, batch: int | None = None) -> CopyWork:
        """The work of some layers (default: all) and one batch (an index of ``batches``; default: all of them)."""
        moves = self._moves if batch is None else self._moves[batch : batch + 1]
        pages = self.pages if batch is None else len(self.batches[batch])
        chosen = self.layers if layers is None else layers
        return CopyWork(self._source, self._target, chosen, moves, pages * len(chosen) * self.shape.layer_page_bytes)


class CopyWork:
    """`Work` of a device: run it on any thread, once or again; it moves bytes and touches nothing else."""

    __slots__ = ("_layers", "_moves", "_source", "_target", "nbytes")

    def __init__(
        self, source: Paged, target: Paged, layers: range, moves: tuple[tuple[_Index, _Index], ...], nbytes: int
    ) -> None:
        self._source, self._target, self._layers, self._moves = source, target, layers, moves
        self.nbytes = nbytes

    def run(self) -> None:
        """Move the bytes.  Raises `StoppedError` if the host memory was closed before it began."""
        for layer in self._layers:
            for source, target in zip(self._source.raw(layer), self._target.raw(layer), strict=True):
                for source_index, target_index in self._moves:
                    target[target_index] = source[source_index]


def _indices(side: Paged, slots: Slots, cuts: tuple[range, ...], name: str) -> list[_Index]:
    wide = np.frombuffer(slots, dtype=np.uint32).astype(np.intp)
    limit = side.raw(0)[0].shape[0]
    if wide.size and int(wide.max()) >= limit:
        raise UsageError(f"{name} slot {int(wide.max())} of a pool of {limit}")
    return [_index(wide[cut.start : cut.stop]) for cut in cuts]


def _index(slots: NDArray[np.intp]) -> _Index:
    """A slice where slots follow each other: then a copy needs no staging and runs at memcpy speed."""
    if bool((np.diff(slots) == 1).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots
