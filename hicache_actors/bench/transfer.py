"""What copies between device and host cost: the cache's own, a plain memcpy of the same runs, and torch."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Final, get_args

import numpy as np
import torch

from hicache_actors.bench.figures import Figures, ratio
from hicache_actors.bench.progress import Progress
from hicache_actors.bench.rig import BenchError
from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext.device import Work
from hicache_actors.cuda_ext.native.copies import Copies, plans
from hicache_actors.cuda_ext.native.library import library, why_not
from hicache_actors.cuda_ext.native_cpu import NativeCpuDevice
from hicache_actors.errors import ConfigError
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.layout import Order, SlotLayout
from hicache_actors.memory.shapes import KVShape
from hicache_actors.transfer.plan import CopyPlan, CopyWork

ROUNDS: Final = 5
PAIRS: Final = 5  # of the cache's copy and memcpy, in a round: only torch is slow
MOVED_BYTES: Final = 64 << 20
WAIT_S: Final = 60.0

SHAPES: Final[Mapping[str, KVShape]] = {
    "gqa_8x128_page64": KVShape(layers=32, kv=2, heads=8, head_dim=128, dtype="bfloat16", page_size=64),
    "gqa_2x128_page16": KVShape(layers=32, kv=2, heads=2, head_dim=128, dtype="bfloat16", page_size=16),
    "mla_576_page64": KVShape(layers=61, kv=1, heads=1, head_dim=576, dtype="bfloat16", page_size=64),
}


class _Call:
    """Work that calls a function."""

    def __init__(self, function: Callable[[], None], nbytes: int) -> None:
        self.run, self.nbytes = function, nbytes


def run(options: Namespace, *, quiet: bool) -> Figures:
    """Raises `BenchError` where the native library is not in use, `ConfigError` for no threads."""
    scale = 8 if options.quick else 1
    return measure(SHAPES, MOVED_BYTES // scale, 3 if options.quick else ROUNDS, options.threads, quiet=quiet)


def measure(
    shapes: Mapping[str, KVShape], moved_bytes: int, rounds: int, threads: int, *, quiet: bool
) -> dict[str, Figures | str]:
    """Shape -> layout -> direction -> figures.  About ``moved_bytes`` in each copy, to and from every other page."""
    native = library()
    if native is None:
        raise BenchError(f"the native library is not in use: {why_not()}")
    device = NativeCpuDevice("bench", copy_threads=threads)
    found: dict[str, Figures | str] = {"device": device.implementation, "threads": str(threads)}
    progress = Progress(sum(len(_layouts(shape)) for shape in shapes.values()), quiet=quiet)
    try:
        for name, shape in shapes.items():
            layouts: dict[str, Figures] = {}
            for layout in _layouts(shape):
                progress.step(f"{name} {layout.order}")
                layouts[layout.order] = _measure(layout, moved_bytes, rounds, threads, Copies(native), device)
            found[name] = layouts
    finally:
        progress.close()
        device.close(WAIT_S)
    return found


def _layouts(shape: KVShape) -> list[SlotLayout]:
    """Those that the shape can have."""
    layouts = []
    order: Order
    for order in get_args(Order):
        try:
            layouts.append(SlotLayout(shape, order))
        except ConfigError:  # MLA has no heads
            continue
    return layouts


def _measure(
    layout: SlotLayout, moved_bytes: int, rounds: int, threads: int, copies: Copies, device: NativeCpuDevice
) -> Figures:
    shape = layout.shape
    pages = max(2, moved_bytes // shape.page_bytes)
    kv, host = KVTensors.make(shape, 2 * pages), HostMemory(layout, 2 * pages)
    chance = random.Random(5)
    on_device, on_host = (pack_slots(chance.sample(range(2 * pages), pages)) for _ in range(2))
    for layer in range(shape.layers):
        for tensor in (*kv.layer(layer), *host.layer(layer)):
            tensor.view(torch.int16).fill_(layer)  # touches every page of memory
    directions = {
        "load": CopyPlan(host, on_host, kv, on_device).work(),
        "write_back": CopyPlan(kv, on_device, host, on_host).work(),
    }
    figures = {}
    for direction, work in directions.items():
        by_torch = _by_torch(kv, on_device, host, on_host, to_host=direction == "write_back")
        figures[direction] = _time(work, by_torch, rounds, threads, copies, device)
    host.close()
    return figures


def _time(
    work: CopyWork,
    by_torch: Callable[[], None],
    rounds: int,
    threads: int,
    copies: Copies,
    device: NativeCpuDevice,
) -> Figures:
    """Medians of ``rounds`` rounds, in which the cache's copy and memcpy take turns; what is done first in all is not counted.

    All go through the same stream: a thread that has just been woken waits longer on a busy machine than one that runs.
    """
    copy = work.affine()
    lists = [copies.merged(plan, by_target=copy.to_host) for plan in plans(copy)]
    flat = np.zeros(copy.nbytes, dtype=np.uint8), np.ones(copy.nbytes, dtype=np.uint8)
    line = np.zeros(1, dtype=lists[0].dtype)
    line[0] = flat[0].ctypes.data, flat[1].ctypes.data, copy.nbytes
    stream = device.stream("bench")

    def by_memcpy() -> None:
        for runs in lists:
            copies.run_list(runs, threads)

    def time_s(way: Work) -> float:
        started = perf_counter()
        ticket = stream.submit(way)
        if not ticket.wait(WAIT_S) or ticket.error is not None:
            raise BenchError(f"a copy of {copy.nbytes:,} bytes did not end well: {ticket.error}")
        return perf_counter() - started

    memcpy, torch_way = _Call(by_memcpy, copy.nbytes), _Call(by_torch, copy.nbytes)
    flat_memcpy = _Call(lambda: copies.run_list(line, threads), copy.nbytes)
    for way in (work, memcpy, flat_memcpy, torch_way):
        time_s(way)
    against_memcpy, against_torch, flats_s = [], [], []
    for _ in range(rounds):
        for pair in range(PAIRS):
            first, second = (memcpy, work) if pair % 2 else (work, memcpy)
            took_s = {first: time_s(first), second: time_s(second)}
            against_memcpy.append((took_s[memcpy], took_s[work]))
        flats_s.append(time_s(flat_memcpy))
        against_torch.append((time_s(torch_way), against_memcpy[-1][1]))
    figures: dict[str, float] = {"run_bytes": copy.run_bytes, "moved_mb": round(copy.nbytes / 1e6, 1)}
    for name, seconds in (
        ("gb_s", [ours_s for _, ours_s in against_memcpy]),
        ("memcpy_gb_s", [memcpy_s for memcpy_s, _ in against_memcpy]),
        ("memcpy_flat_gb_s", flats_s),
        ("torch_gb_s", [torch_s for torch_s, _ in against_torch]),
    ):
        figures[name] = round(copy.nbytes / median(seconds) / 1e9, 2)
    return figures | {"ratio_memcpy": ratio(against_memcpy), "ratio_torch": ratio(against_torch)}


def _by_torch(
    kv: KVTensors, on_device: bytes, host: HostMemory, on_host: bytes, *, to_host: bool
) -> Callable[[], None]:
    """A layer at a time, as an engine would write it without a library."""
    device_ids, host_ids = (
        torch.from_numpy(np.frombuffer(slots, dtype=np.uint32).astype(np.int64)) for slots in (on_device, on_host)
    )

    def copy() -> None:
        for layer in range(kv.shape.layers):
            for device, slots in zip(kv.layer(layer), host.layer(layer), strict=True):
                if to_host:
                    slots.index_copy_(0, host_ids, device.index_select(0, device_ids))
                else:
                    device.index_copy_(0, device_ids, slots.index_select(0, host_ids))

    return copy
