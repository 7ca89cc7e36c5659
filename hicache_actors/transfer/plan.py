"""Plans: which page goes where, cut into pieces of work that a device runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hicache_actors.core.pool import FEW
from hicache_actors.core.words import SLOT_BYTES, Slots
from hicache_actors.errors import UsageError
from hicache_actors.memory.geometry import Geometry
from hicache_actors.memory.kv import Raw
from hicache_actors.memory.shapes import BATCH_PAGES, KVShape, batch_pages
from hicache_actors.transfer.affine import AffineCopy

_Index: TypeAlias = slice | NDArray[np.intp]


class Paged(Protocol):
    """One side of a copy: `KVTensors` or `HostMemory`."""

    @property
    def shape(self) -> KVShape: ...

    @property
    def geometry(self) -> Geometry: ...

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]: ...

    def raw(self, layer: int) -> tuple[Raw, ...]: ...


def batches(slots: Slots, page_bytes: int, most_pages: int = BATCH_PAGES) -> tuple[range, ...]:
    """Positions in ``slots``, cut into batches of at most 256 pages and 32 MiB (one page at least)."""
    pages = len(slots) // SLOT_BYTES
    step = min(most_pages, batch_pages(page_bytes))
    return tuple(range(start, min(start + step, pages)) for start in range(0, pages, step))


class CopyPlan:
    """Copy ``source_slots`` of ``source`` to ``target_slots`` of ``target``, page by page in order, in either direction.

    Made anywhere, changed never.  The plan keeps both sides alive; it owns no slots.  No Python runs per page.  Raises
    `UsageError` if the sides do not fit, a slot does not exist, or one slot is the target of two pages: runs are copied in any
    order and by many threads, so what it would hold afterwards is anybody's guess.
    """

    def __init__(self, source: Paged, source_slots: Slots, target: Paged, target_slots: Slots) -> None:
        if source.shape != target.shape:
            raise UsageError(f"cannot copy pages of {source.shape} to {target.shape}")
        if len(source_slots) != len(target_slots):
            raise UsageError(
                f"{len(source_slots) // SLOT_BYTES} source pages for {len(target_slots) // SLOT_BYTES} target pages"
            )
        _check_slots(source_slots, source.geometry.pages, "source")
        _check_slots(target_slots, target.geometry.pages, "target")
        _check_once(target_slots)
        self.shape = source.shape
        self.pages = len(source_slots) // SLOT_BYTES
        self.layers = range(source.shape.layers)
        self.batches = batches(source_slots, source.shape.page_bytes)
        self._source, self._source_slots = source, source_slots
        self._target, self._target_slots = target, target_slots

    @property
    def nbytes(self) -> int:
        return self.pages * self.shape.page_bytes

    def work(self, layers: range | None = None, batch: int | None = None) -> CopyWork:
        """The work of some layers (default: all) and one batch (an index of ``batches``; default: all of them)."""
        cuts = self.batches if batch is None else self.batches[batch : batch + 1]
        return CopyWork(
            self._source,
            self._source_slots,
            self._target,
            self._target_slots,
            self.layers if layers is None else layers,
            cuts,
        )


class CopyWork:
    """`Work` of a device: executed on any thread, once or again; it moves bytes and touches nothing else.

    A device with native code of its own executes `affine`, one that computes with torch copies `pages` of `tensors`; any other
    calls `run`.
    """

    __slots__ = ("_cuts", "_layers", "_source", "_source_slots", "_target", "_target_slots", "nbytes")

    def __init__(
        self,
        source: Paged,
        source_slots: Slots,
        target: Paged,
        target_slots: Slots,
        layers: range,
        cuts: Sequence[range],
    ) -> None:
        """For `CopyPlan.work`.  ``cuts``: positions in both runs of slots that follow each other."""
        self._source, self._source_slots = source, source_slots
        self._target, self._target_slots = target, target_slots
        self._layers, self._cuts = layers, cuts
        self.nbytes = sum(map(len, cuts)) * len(layers) * source.shape.layer_page_bytes

    def run(self) -> None:
        """Move the bytes, here and now.  Raises `StoppedError` if the host memory was closed before it began."""
        moves = [(_index(self._source_slots, cut), _index(self._target_slots, cut)) for cut in self._cuts]
        for layer in self._layers:
            for source, target in zip(self._source.raw(layer), self._target.raw(layer), strict=True):
                for source_index, target_index in moves:
                    target[target_index] = source[source_index]

    @property
    def to_host(self) -> bool:
        """A write-back; else a load."""
        return self._target.geometry.place == "host"

    def tensors(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(source, target) [pages, page_size, heads, head_dim] of every part of every layer, in layer order."""
        for layer in self._layers:
            yield from zip(self._source.layer(layer), self._target.layer(layer), strict=True)

    def pages(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Page ids in the source's tensors, and in the target's, in the order of the copy."""
        start, stop = (self._cuts[0].start, self._cuts[-1].stop) if self._cuts else (0, 0)
        ids = (np.frombuffer(slots, dtype=np.uint32)[start:stop] for slots in (self._source_slots, self._target_slots))
        source, target = (each.astype(np.int64) for each in ids)
        return source, target

    def affine(self) -> AffineCopy:
        """The same as loops over addresses.  It keeps the memory of both sides mapped, also after they have been closed.

        Raises `StoppedError` if the host memory is closed already, `UsageError` for more than one plan can say.
        """
        start, stop = (self._cuts[0].start, self._cuts[-1].stop) if self._cuts else (0, 0)
        pages = slice(start * SLOT_BYTES, stop * SLOT_BYTES)
        return AffineCopy(
            self._source.geometry,
            self._source_slots[pages],
            self._target.geometry,
            self._target_slots[pages],
            self._layers,
            keeps=(self._source, self._source.layer(0), self._target, self._target.layer(0)),
        )


def _check_slots(slots: Slots, limit: int, name: str) -> None:
    if slots:
        ids = memoryview(slots).cast("I")
        highest = max(ids) if len(ids) <= FEW else int(np.frombuffer(slots, dtype=np.uint32).max())
        if highest >= limit:
            raise UsageError(f"{name} slot {highest} of a pool of {limit}")


def _check_once(slots: Slots) -> None:
    """2 us for 64 slots, 14 us for 4,096; numpy alone would take ten times as long for a few after a forward pass (see `FEW`)."""
    ids = memoryview(slots).cast("I")
    if len(ids) <= FEW and len(set(ids)) == len(ids):
        return
    ordered = np.sort(np.frombuffer(slots, dtype=np.uint32))
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise UsageError(f"target slot {twice[0]} is given to two pages of one copy")


def _index(slots: Slots, cut: range) -> _Index:
    """A slice where slots follow each other: then a copy needs no staging and runs at memcpy speed."""
    wide = np.frombuffer(slots, dtype=np.uint32)[cut.start : cut.stop].astype(np.intp)
    if bool((np.diff(wide) == 1).all()):
        return slice(int(wide[0]), int(wide[-1]) + 1)
    return wide
