"""What an ended copy costs until the coroutine that waits for it runs, and what waiting costs while nothing ends."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from hicache_actors.bench.figures import Figure, Figures, spread
from hicache_actors.bench.progress import Progress
from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext.loop_ring import LoopRing
from hicache_actors.cuda_ext.native.library import library, loaded, why_not
from hicache_actors.cuda_ext.native.streams import CALL
from hicache_actors.cuda_ext.native.structs import Op
from hicache_actors.cuda_ext.native_cpu import NativeCpuDevice, NativeStream
from hicache_actors.cuda_ext.tickets import NativeTicket
from hicache_actors.errors import ConfigError
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.shapes import KVShape
from hicache_actors.transfer.completions import fired
from hicache_actors.transfer.plan import CopyPlan
from hicache_actors.transfer.waits import LayerWaits

NAP_NS: Final = 150_000
"""How long each timed piece of work sleeps, so that the loop has gone to sleep as well when it ends."""

WAKE_UPS: Final = 2_000
TICKETS: Final = 100_000
IDLE_S: Final = 10.0
STREAMS: Final = 4
LAYERS: Final = (16, 32, 64)
LAYER_MS: Final = 2.0
CLOSE_S: Final = 30.0

T = TypeVar("T")


def run(options: Namespace, *, quiet: bool) -> Figures:
    """Raises `ConfigError` where the native library is not in use."""
    return measure(8 if options.quick else 1, quiet=quiet)


def measure(less: int = 1, *, quiet: bool) -> Figures:
    """``less``: divides the work."""
    if library() is None:
        raise ConfigError("native library", None, f"is not in use: {why_not()}", fix="install where g++ is found")
    loops = _loops()
    progress = Progress(len(loops) + 1, quiet=quiet)
    figures: dict[str, Figure] = {}
    for name, start in loops.items():
        progress.step(name)
        figures[name] = start(lambda: _of_a_loop(less))
    progress.step("layers")
    figures["layers"] = asyncio.run(_layers())
    progress.close()
    return figures


def _loops() -> dict[str, Callable[[Callable[[], Awaitable[Any]]], Any]]:
    def on_asyncio(body: Callable[[], Awaitable[T]]) -> T:
        return asyncio.run(_as_coroutine(body))

    loops: dict[str, Callable[[Callable[[], Awaitable[Any]]], Any]] = {"asyncio": on_asyncio}
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        def on_uvloop(body: Callable[[], Awaitable[T]]) -> T:
            return uvloop.run(_as_coroutine(body))

        loops["uvloop"] = on_uvloop
    return loops


async def _as_coroutine(body: Callable[[], Awaitable[T]]) -> T:
    return await body()


async def _of_a_loop(less: int) -> Figures:
    device = NativeCpuDevice("bench", watch_s=1.0 / less)
    by_thread = await _wake_ups(device, clients=1, each=WAKE_UPS // less)
    ring = LoopRing.open()
    figures: dict[str, Figure] = {
        "wake_us_1": await _wake_ups(device, clients=1, each=WAKE_UPS // less),
        "wake_us_64": await _wake_ups(device, clients=64, each=max(1, WAKE_UPS // 64 // less)),
        "wake_us_1_by_thread": by_thread,
        **await _idle(device, IDLE_S / less),
        **await _many(device, ring, TICKETS // less),
    }
    await asyncio.to_thread(device.close, CLOSE_S)
    await ring.close(CLOSE_S)
    return figures


async def _wake_ups(device: NativeCpuDevice, clients: int, each: int) -> dict[str, float]:
    """From the end of native work until the coroutine runs, in microseconds."""
    call = loaded().address
    nap, stamp = call("hic_call_nap"), call("hic_call_stamp")
    delays_us: list[float] = []

    async def client(stream: NativeStream) -> None:
        ended_ns = ctypes.c_int64()
        ops = [
            Op(kind=CALL, call=nap, argument=NAP_NS),
            Op(kind=CALL, call=stamp, argument=ctypes.addressof(ended_ns)),
        ]
        for _ in range(each):
            ticket = NativeTicket(device.teller)
            stream.raw.submit(ops, ticket.event)
            await fired(ticket)
            delays_us.append((time.monotonic_ns() - ended_ns.value) / 1e3)

    await asyncio.gather(*(client(device.stream(f"s{number % STREAMS}")) for number in range(clients)))
    return spread(delays_us, digits=1)


async def _idle(device: NativeCpuDevice, seconds: float) -> dict[str, float]:
    """CPU of this process while 64 coroutines wait for what does not end."""
    ends = [device.make_end() for _ in range(64)]
    waiters = [asyncio.ensure_future(fired(end)) for end in ends]
    await asyncio.sleep(device.watch_s * 2)  # after what ran before, the device is looked after once more
    before_s = time.process_time()
    await asyncio.sleep(seconds)
    used_s = time.process_time() - before_s
    for end in ends:
        end.finish()
    await asyncio.gather(*waiters)
    return {"idle_cpu_percent": round(100 * used_s / seconds, 4)}


async def _many(device: NativeCpuDevice, ring: LoopRing, tickets: int) -> dict[str, float]:
    before = ring.counts()
    ended = 0

    async def client(stream: NativeStream, count: int) -> None:
        nonlocal ended
        for _ in range(count):
            await fired(stream.record())
            ended += 1

    share, rest = divmod(tickets, 64)
    started_s = time.perf_counter()
    await asyncio.gather(
        *(client(device.stream(f"s{number % STREAMS}"), share + (number < rest)) for number in range(64))
    )
    took_s = time.perf_counter() - started_s
    counts = ring.counts()
    return {
        "tickets": tickets,
        "tickets_lost": tickets - ended + counts.refused + counts.pushed - counts.drained,
        "ticket_us": round(took_s / tickets * 1e6, 2),
        "tickets_per_wake_up": round((counts.pushed - before.pushed) / max(1, counts.wakes - before.wakes), 2),
    }


async def _layers() -> Figures:
    """How long a forward waits for its first layer, against the whole load, on a device where each layer takes 2 ms."""
    device = NativeCpuDevice("bench")
    device.throttle(latency_s=LAYER_MS / 1e3)
    ring = LoopRing.open()
    figures: dict[str, Figure] = {}
    for layers in LAYERS:
        shape = KVShape(layers, 2, 2, 64, "bfloat16", 16)
        kv, host = KVTensors.make(shape, 8), HostMemory(SlotLayout(shape), 8)
        plan = CopyPlan(host, pack_slots(range(8)), kv, pack_slots(range(8)))
        for _ in range(2):  # the first one learns where the pools lie
            waits = LayerWaits(layers, device.make_end)
            works = [plan.work(range(layer, layer + 1)) for layer in range(layers)]
            started_s = time.perf_counter()
            whole = device.stream("load").submit_layers(works, waits, lambda _: None)
            submitted_s = time.perf_counter()
            await waits.ready(0)
            first_s = time.perf_counter() - started_s
            await fired(whole)
            whole_s = time.perf_counter() - started_s
        figures[str(layers)] = {
            "submit_us": round((submitted_s - started_s) * 1e6, 1),
            "first_layer_ms": round(first_s * 1e3, 3),
            "whole_load_ms": round(whole_s * 1e3, 3),
            "share": round(first_s / whole_s, 4),
        }
        host.close()
    await asyncio.to_thread(device.close, CLOSE_S)
    await ring.close(CLOSE_S)
    return figures
