"""Host memory: one anonymous mapping cut into slots, seen as tensors by copies, and as memoryviews by storage."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hicache_actors.core.words import Slots
from hicache_actors.cuda_ext.native.buffers import Slices
from hicache_actors.cuda_ext.native.hostmem import Touching, host_memory_calls
from hicache_actors.cuda_ext.native.library import why_not
from hicache_actors.errors import ConfigError, HiCacheError, StoppedError, UsageError
from hicache_actors.memory.geometry import Geometry
from hicache_actors.memory.kv import Raw, raw_view, torch_dtype
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.shapes import KVShape

MAGIC_BYTES: Final = 8
"""Length of the magic that opens an object's header (`hicache_actors.backends.objects`)."""

_KEPT: list[mmap.mmap] = []
"""Mappings that were closed while somebody might still touch them: mapped until the process ends."""


class HostMemory:
    """``slots`` page slots of one layout.  Any thread may read and write slots that it owns; `close` belongs to one.

    Views never outlive the memory: each keeps the mapping alive, so a late write of a hung thread hits its old slot, never a
    stranger's memory.
    """

    def __init__(self, layout: SlotLayout, slots: int) -> None:
        if slots < 1:
            raise ConfigError("host.pages", slots, "is not a count", allowed="integers >= 1")
        self.layout = layout
        self.slots = slots
        self._slot_bytes, self._object_bytes = layout.slot_bytes, layout.object_bytes  # asked for every page that moves
        try:
            mapping = mmap.mmap(-1, slots * layout.slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "host.pages",
                slots,
                f"{layout.describe(slots)} could not be mapped: {error}",
                fix="lower host.pages or host.size_gb",
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Advice only: fewer page faults at first touch.  Kernels without huge pages refuse it.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self._mapping: mmap.mmap | None = mapping
        self._touching: Touching | None = None
        self._bytes: memoryview | None = memoryview(mapping) if layout.in_place else None
        self._layers, self._raw = _views(mapping, layout, slots)
        self.geometry: Final = Geometry.of("host", self._layers)
        self._spans = layout.chunk_spans if layout.in_place else ()
        self._magic: tuple[NDArray[np.uint8], ...] = ()
        if layout.slot_header_bytes:
            rows = np.frombuffer(mapping, dtype=np.uint8).reshape(slots, layout.slot_bytes)
            self._magic = tuple(rows[:, start : start + MAGIC_BYTES] for start, _ in self._spans)
        self._used = np.zeros(slots, dtype=np.bool_)

    @property
    def shape(self) -> KVShape:
        return self.layout.shape

    @property
    def nbytes(self) -> int:
        return self.slots * self.layout.slot_bytes

    def extent(self, pages: range | None = None) -> tuple[int, int]:
        """(address, bytes) of the mapping, for devices that must be told of it.  Raises `StoppedError` after `close`.

        ``pages``: of these slots alone, where pages are runs of bytes.
        """
        if self._mapping is None:
            raise StoppedError("the host memory is closed")
        address = np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data
        if pages is None:
            return address, self.nbytes
        return address + pages.start * self._slot_bytes, len(pages) * self._slot_bytes

    @property
    def objects_memory(self) -> memoryview | None:
        """All that `objects` are slices of; None if pages are no runs, and after `close`."""
        return self._bytes

    def bind(self, node: int) -> None:
        """Take the memory from one NUMA node, from its first touch on.  OSError if that cannot be done."""
        calls = host_memory_calls()
        if calls is None:
            raise OSError(f"the native library is not in use: {why_not()}")
        calls.bind(*self.extent(), node)

    def touch_ahead(self, threads: int) -> bool:
        """Begin to touch all of it, in native threads of its own -> whether there are any; the memory can be used meanwhile.

        Without them each page is touched, and cleared by the kernel, when it is first written.
        """
        calls = host_memory_calls()
        if calls is None or self._touching is not None:
            return False
        self._touching = Touching(calls, *self.extent(), threads)
        weakref.finalize(self, self._touching.stop)  # an owner that goes without a word leaves no thread behind
        return True

    def wait_touched(self, pages: range | None = None) -> None:
        """Until `touch_ahead` has come to the end of ``pages`` (default: all), in a worker thread.

        OSError if the kernel has refused memory, `StoppedError` if the memory was closed meanwhile.
        """
        touching = self._touching
        end_bytes = (self.slots if pages is None else pages.stop) * self.layout.slot_bytes
        if touching is not None and not touching.reach(end_bytes):
            raise StoppedError("the host memory was closed before it had been touched")

    def stop_touching(self) -> None:
        """Touch no more: whoever waits for it is told.  Takes milliseconds."""
        if self._touching is not None:
            self._touching.stop()

    @property
    def touched_bytes(self) -> int | None:
        """How far `touch_ahead` is; None: memory is touched when it is needed.  Any thread."""
        return None if self._touching is None else self._touching.done_bytes

    def object(self, slot: int) -> memoryview:
        """Header and payload of a slot, writable; of several chunks, one behind the other.

        Raises IndexError, `UsageError` if pages are no runs (layer_first), and `StoppedError` after `close`.
        """
        return self._run(slot, 0)

    def objects(self, slot: int) -> list[memoryview]:
        """Header and payload of each chunk of a slot, writable.  Raises as `object` does."""
        run = self._run(slot, 0)
        return [run] if len(self._spans) == 1 else [run[start:end] for start, end in self._spans]

    def objects_of(self, slots: Slots) -> Sequence[memoryview]:
        """`objects` of each slot, in one sequence."""
        which = np.frombuffer(slots, dtype=np.uint32)
        if len(self._spans) != 1 or self._bytes is None or not len(which):
            return [object for slot in which.tolist() for object in self.objects(slot)]
        self._run(int(which.max()), 0)  # raises what `object` would
        return Slices(self._bytes, which.astype(np.int64) * self._slot_bytes, self._object_bytes)

    def header(self, slot: int) -> memoryview:
        """The header of a slot (of its first chunk), writable; empty for raw objects."""
        return self._run(slot, 0)[: self.layout.header_bytes]

    def payload(self, slot: int) -> memoryview:
        """The payload of a slot, writable."""
        return self._run(slot, self.layout.header_bytes)

    def clear_headers(self, slots: Slots) -> None:
        """Clear the magic of each slot's headers, so that what stands there passes for no object; nothing if slots have none.

        A slot that is cleared for the first time is not touched: it is zero, and the kernel takes up to milliseconds to make it so.
        Whoever fills it pays for that, in a thread.
        """
        if self._mapping is None:
            raise StoppedError("the host memory is closed")
        if self._magic:
            which = np.frombuffer(slots, dtype=np.uint32)
            used = which[self._used[which]]
            for magic in self._magic:
                magic[used] = 0
            self._used[which] = True

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """(K, V), or (latent,): strided views [slots, page_size, heads, head_dim] of all slots.

        With several groups of heads, K of each group, then V of each: [slots, page_size, head_group, head_dim].
        """
        if not self._layers:
            raise StoppedError("the host memory is closed")
        return self._layers[layer]

    def raw(self, layer: int) -> tuple[Raw, ...]:
        """`layer` as integers, for copies."""
        if not self._raw:
            raise StoppedError("the host memory is closed")
        return self._raw[layer]

    def close(self, *, keep_mapped: bool = False) -> bool:
        """Let go of the memory -> whether it is unmapped now.  Idempotent.

        ``keep_mapped``: a device or a store may still touch it by address; it then stays mapped to the end of the process, and
        `mapped` counts it.  Without it, views that somebody still holds keep it mapped until they are gone.
        """
        self.stop_touching()
        mapping, self._mapping = self._mapping, None
        self._bytes, self._magic, self._layers, self._raw = None, (), (), ()
        if mapping is None:
            return True
        if keep_mapped:
            _KEPT.append(mapping)
            return False
        gone = weakref.ref(mapping)
        del mapping
        return gone() is None

    @staticmethod
    def mapped() -> Mapping[str, int]:
        """Mappings of this process that `close` had to leave in place: how many, and their bytes."""
        return {"kept_mappings": len(_KEPT), "kept_bytes": sum(len(mapping) for mapping in _KEPT)}

    def describe(self) -> str:
        return self.layout.describe(self.slots)

    def _run(self, slot: int, skip_bytes: int) -> memoryview:
        if self._bytes is None:
            raise self._no_run()
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        start = slot * self._slot_bytes
        return self._bytes[start + skip_bytes : start + self._object_bytes]

    def _no_run(self) -> HiCacheError:
        if self._mapping is None:
            return StoppedError("the host memory is closed")
        return UsageError(f"a page is no run of bytes under {self.layout.order}: put it together in a staging slot")


def _views(
    mapping: mmap.mmap, layout: SlotLayout, slots: int
) -> tuple[tuple[tuple[torch.Tensor, ...], ...], tuple[tuple[Raw, ...], ...]]:
    shape, strides = layout.shape, layout.strides(slots)
    size = (slots, shape.page_size, shape.heads // layout.head_groups, shape.head_dim)
    steps = (strides["s"], strides["t"], strides["h"], strides["d"])
    parts = [(kv, group) for kv in range(shape.kv) for group in range(layout.head_groups)]
    with torch.inference_mode(False):
        flat = torch.frombuffer(mapping, dtype=torch.uint8).view(torch_dtype(shape.dtype))
        layers = tuple(
            tuple(flat.as_strided(size, steps, layout.first_element(layer, kv, group, strides)) for kv, group in parts)
            for layer in range(shape.layers)
        )
        return layers, tuple(tuple(raw_view(tensor) for tensor in tensors) for tensors in layers)
