"""The steps of `gpu_check` that measure: copies, waits, and host memory."""

from __future__ import annotations

import asyncio
import functools
import mmap
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import torch

from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext.native.copies import plans
from hicache_actors.cuda_ext.native.driver import How, Notice, RawCudaStream
from hicache_actors.cuda_ext.native.hostmem import Touching, host_memory_calls
from hicache_actors.cuda_ext.native_cuda import NativeCudaDevice
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.shapes import KVShape
from hicache_actors.testing.gpu_faces import WAIT_S, Gpu, attached, on_loop
from hicache_actors.transfer.affine import AffineCopy
from hicache_actors.transfer.completions import fired
from hicache_actors.transfer.engines import Engines
from hicache_actors.transfer.plan import CopyPlan
from hicache_actors.transfer.waits import LayerWaits

NODES: Final = Path("/sys/devices/system/node")


# -- copies --------------------------------------------------------------------------------------------------------------


def bandwidth(gpu: Gpu) -> dict[str, Any]:
    """GB/s by direction, engine and length of runs: the table behind "auto".

    Of the kernel by its blocks, and for short runs by the lanes that share one; by the number of runs where they are of 8 KiB; and
    of one long run, which is what the link can do.
    """
    rows: list[dict[str, Any]] = []
    total = 1 << 20 if gpu.quick else 128 << 20
    for run_bytes in (256, 2048, 8192, 32768, 131072, 1 << 20):
        rows += _rows(gpu, run_bytes, max(2, total // run_bytes), [*_kernels(run_bytes), *_others(run_bytes)])
    rows += _rows(gpu, total, 1, [How("direct", False, "poll")])
    for runs in (8, 32, 128) if gpu.quick else (8, 32, 128, 1024, 8192):
        rows += _rows(gpu, 8192, runs, [How("kernel", False, "poll"), How("direct", False, "poll")])
    return {"rows": rows}


def _kernels(run_bytes: int) -> Iterator[How]:
    for blocks in (1, 2, 4, 8, 16, 32):
        yield How("kernel", False, "poll", blocks=blocks)
    if run_bytes <= 2048:
        for lanes in (8, 16, 32):
            yield How("kernel", False, "poll", lanes=lanes)


def _others(run_bytes: int) -> Iterator[How]:
    if run_bytes >= 2048:  # shorter: half a million descriptors, which takes minutes
        yield How("direct", False, "poll")
    yield How("staged", True, "poll")


def _rows(gpu: Gpu, run_bytes: int, runs: int, ways: Sequence[How]) -> Iterator[dict[str, Any]]:
    """Each of ``ways`` in both directions; staged is a way to the host alone."""
    shape = KVShape(1, 1, 1, run_bytes // 16, "uint8", 16)
    kv, host = gpu.kv(shape, runs), HostMemory(SlotLayout(shape, header_bytes=0), runs)
    slots = pack_slots(torch.randperm(runs, generator=torch.Generator().manual_seed(2)).tolist())
    with attached(gpu, host) as device:
        stream = device.raw.stream(urgent=True)
        for to_host in (False, True):
            copy = (CopyPlan(kv, slots, host, slots) if to_host else CopyPlan(host, slots, kv, slots)).work().affine()
            for way in ways:
                if way.engine == "staged" and not to_host:
                    continue
                how = way._replace(to_host=to_host)
                took_s = [_copy_s(device, stream, copy, how) for _ in range(2 if gpu.quick else 5)]
                yield {
                    "run_bytes": run_bytes,
                    "runs": runs,
                    "to_host": to_host,
                    "engine": how.engine,
                    "blocks": how.blocks,
                    "lanes": how.lanes,
                    "gb_s": round(copy.nbytes / statistics.median(took_s[1:]) / 1e9, 2),
                }
        stream.close()


def _copy_s(device: NativeCudaDevice, stream: RawCudaStream, copy: AffineCopy, how: How) -> float:
    end, start_s = device.make_end(), time.perf_counter()
    mark = stream.submit(plans(copy), how, end.event)
    if not end.wait(WAIT_S):
        raise RuntimeError(f"{how} with runs of {copy.run_bytes} bytes never ended")
    mark.free()
    return time.perf_counter() - start_s


def overlap(gpu: Gpu) -> dict[str, Any]:
    """How much slower matrix products are while loads run, by engine."""
    seconds = 0.1 if gpu.quick else 3.0
    shape = KVShape(8, 2, 8, 128, "bfloat16", 64)
    pages = 4 if gpu.quick else 128
    kv, host = gpu.kv(shape, pages), HostMemory(SlotLayout(shape), pages)
    slots = pack_slots(range(pages))
    alone = gpu.compute(seconds)
    beside = {}
    with attached(gpu, host) as device:
        for engine in ("kernel", "direct"):
            device.engines = Engines(load=engine)
            stream, plan = device.stream("load"), CopyPlan(host, slots, kv, slots)
            tickets = [stream.submit(plan.work()) for _ in range(4 if gpu.quick else 300)]
            count = gpu.compute(seconds)
            moved = sum(ticket.query() for ticket in tickets) * plan.nbytes
            tickets[-1].wait(WAIT_S)
            slower = None if not alone or count is None else round(1 - count / alone, 3)
            beside[engine] = {"slower_by": slower, "gb_s": round(moved / seconds / 1e9, 2)}
    return {"products_alone": alone, "beside": beside}


# -- waits ---------------------------------------------------------------------------------------------------------------


def latency(gpu: Gpu) -> dict[str, Any]:
    """Microseconds from the submission of an empty operation to the coroutine that waits for it, by who tells.

    On an idle GPU, and beside matrix products; and what a layer adds to a load of 80.
    """
    results = {}
    for notice in get_args(Notice):
        device = gpu.device(notice)
        for name in ("asyncio", "uvloop"):
            results[f"{notice} {name}"] = on_loop(name, functools.partial(_round_trips, device, gpu.quick))
        products = threading.Thread(target=gpu.compute, args=(0.1 if gpu.quick else 5.0,))
        products.start()
        results[f"{notice} asyncio beside products"] = on_loop(
            "asyncio", functools.partial(_round_trips, device, gpu.quick)
        )
        products.join()
        device.close(WAIT_S)
    return {"us": results, "us_a_layer": on_loop("asyncio", functools.partial(_layers, gpu))}


async def _round_trips(device: NativeCudaDevice, quick: bool) -> dict[str, float]:
    listener, stream, took = device.listen(), device.stream("load"), []
    for _ in range(20 if quick else 2000):
        start_s = time.perf_counter()
        await fired(stream.record())
        took.append((time.perf_counter() - start_s) * 1e6)
    start_s = time.perf_counter()
    await asyncio.gather(*(fired(stream.record()) for _ in range(64)))
    together = (time.perf_counter() - start_s) * 1e6 / 64
    if listener is not None:
        await listener.close(WAIT_S)
    cuts = statistics.quantiles(took, n=100)
    return {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1), "each_of_64": round(together, 1)}


async def _layers(gpu: Gpu) -> dict[str, float]:
    """A page of 4 KiB a layer: alone, and with an end for each layer."""
    shape, took = KVShape(80, 1, 1, 256, "uint8", 16), dict[str, list[float]]()
    kv, host = gpu.kv(shape, 1), HostMemory(SlotLayout(shape), 1)
    with attached(gpu, host) as device:
        listener, stream = device.listen(), device.stream("load")
        plan = CopyPlan(host, pack_slots([0]), kv, pack_slots([0]))
        for _ in range(3 if gpu.quick else 100):
            start_s = time.perf_counter()
            await fired(stream.submit(plan.work()))
            took.setdefault("in_one", []).append(time.perf_counter() - start_s)
            works = [plan.work(range(layer, layer + 1)) for layer in plan.layers]
            waits = LayerWaits(shape.layers, device.make_end)
            start_s = time.perf_counter()
            await fired(stream.submit_layers(works, waits, lambda ticket: None))
            took.setdefault("by_layers", []).append(time.perf_counter() - start_s)
        if listener is not None:
            await listener.close(WAIT_S)
    return {name: round(statistics.median(each) * 1e6 / shape.layers, 2) for name, each in took.items()}


# -- host memory ---------------------------------------------------------------------------------------------------------


def registration(gpu: Gpu) -> dict[str, Any]:
    """Seconds to touch host memory and to register it, by threads and kind of pages; and torch's pinned memory, for scale."""
    nbytes = 16 << 20 if gpu.quick else 4 << 30
    calls = host_memory_calls()
    assert calls is not None, "a device of the native library needs it"
    device, rows = gpu.device(), []
    for huge in (True, False):
        for threads in (0, 1, 4, 16):
            with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
                mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
                address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
                start_s = time.perf_counter()
                if threads:
                    touching = Touching(calls, address, nbytes, threads)
                    touching.reach(nbytes)
                    touching.stop()
                touched_s = time.perf_counter()
                device.register(address, nbytes, step_bytes=1 << 20)
                registered_s = time.perf_counter()
                known = device.raw.facts().registered_bytes
                device.registrations.remove(address)
                rows.append(
                    {
                        "huge_pages": huge,
                        "touch_threads": threads,  # 0: the registration touches
                        "touch_s": round(touched_s - start_s, 3),
                        "register_s": round(registered_s - touched_s, 3),
                        "unregister_s": round(time.perf_counter() - registered_s, 3),
                    }
                )
                if known != nbytes:
                    return {"rows": rows, "problem": f"{known} of {nbytes} bytes are registered"}
    device.close(WAIT_S)
    return {"gib": nbytes / 2**30, "rows": rows, "torch_pin_s": gpu.pin_s(nbytes)}


def locality(gpu: Gpu) -> dict[str, Any]:
    """GB/s of the copy engines between the GPU and memory of each NUMA node: what `host.numa_node` is worth."""
    shape = KVShape(1, 1, 1, 1 << 16, "uint8", 16)
    runs = 2 if gpu.quick else 512
    rows = []
    for node in sorted(int(folder.name[4:]) for folder in NODES.glob("node[0-9]*")):
        kv, host = gpu.kv(shape, runs), HostMemory(SlotLayout(shape, header_bytes=0), runs)
        try:
            host.bind(node)
        except OSError as error:  # a node without memory, or none of ours
            rows.append({"node": node, "refused": str(error)})
            continue
        host.touch_ahead(4)
        host.wait_touched()
        with attached(gpu, host) as device:
            stream, slots = device.raw.stream(urgent=True), pack_slots(range(runs))
            row: dict[str, Any] = {"node": node}
            for to_host in (False, True):
                plan = CopyPlan(kv, slots, host, slots) if to_host else CopyPlan(host, slots, kv, slots)
                copy, how = plan.work().affine(), How("direct", to_host, "poll")
                took_s = [_copy_s(device, stream, copy, how) for _ in range(2 if gpu.quick else 6)]
                gb_s = copy.nbytes / statistics.median(took_s[1:]) / 1e9
                row["to_host_gb_s" if to_host else "to_gpu_gb_s"] = round(gb_s, 2)
            rows.append(row)
            stream.close()
        host.close()
    return {"rows": rows}
