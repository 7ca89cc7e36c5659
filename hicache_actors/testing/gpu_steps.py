"""The steps of `gpu_check`.  They run on what a `Gpu` gives: torch.cuda here, a stub of the driver in tests.

A step returns what goes into the JSON; ``problem`` in it says that something is wrong.  No other step hears of it.
"""

from __future__ import annotations

import asyncio
import functools
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, Protocol, get_args

import torch

from hicache_actors.cache.api import HiCache
from hicache_actors.config import Config, HostConfig, HostLayout, ModelFacts
from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext.native.copies import plans
from hicache_actors.cuda_ext.native.driver import How, Notice
from hicache_actors.cuda_ext.native_cuda import NativeCudaDevice
from hicache_actors.cuda_ext.registration import pieces
from hicache_actors.errors import UsageError
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors, integers
from hicache_actors.memory.layout import Order, SlotLayout
from hicache_actors.memory.shapes import KVShape
from hicache_actors.testing.engines import StepEngine
from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.small import prompt
from hicache_actors.testing.toy_model import ToyModel
from hicache_actors.transfer.completions import fired
from hicache_actors.transfer.engines import Engine, Engines, whole_pages
from hicache_actors.transfer.plan import CopyPlan
from hicache_actors.transfer.waits import LayerWaits

WAIT_S: Final = 30.0
LAYOUTS: Final[tuple[Order, ...]] = get_args(HostLayout)


class EngineStream(Protocol):
    """A stream of the engine, and kernels of its own."""

    def hold(self) -> None:
        """What is submitted later runs after a while, or after `let_go`."""

    def let_go(self) -> None: ...
    def fill(self, tensor: torch.Tensor, value: int) -> None: ...
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...
    def event(self) -> Any: ...
    def capturing(self) -> Any:
        """A context in which the stream is being captured in a graph."""

    def synchronize(self) -> None: ...

    @property
    def cuda_stream(self) -> int: ...


class Gpu(Protocol):
    quick: bool
    """Small sizes: the numbers mean nothing."""

    def device(self, notice: Notice = "host_function") -> NativeCudaDevice: ...
    def kv(self, shape: KVShape, pages: int) -> KVTensors: ...
    def stream(self) -> EngineStream: ...
    def compute(self, seconds: float) -> int | None:
        """Matrix products for so long -> how many; None where nothing computes."""

    def facts(self) -> dict[str, Any]: ...


class TorchGpu:
    """The real one."""

    quick = False

    def __init__(self, index: int) -> None:
        self.index = index
        torch.cuda.set_device(index)

    def device(self, notice: Notice = "host_function") -> NativeCudaDevice:
        return NativeCudaDevice(self.index, notice=notice)

    def kv(self, shape: KVShape, pages: int) -> KVTensors:
        return KVTensors.make(shape, pages, device=f"cuda:{self.index}")

    def stream(self) -> TorchStream:
        return TorchStream()

    def compute(self, seconds: float) -> int | None:
        if not hasattr(self, "_factors"):
            self._factors = [torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        end_s, count = time.monotonic() + seconds, 0
        while time.monotonic() < end_s:
            for _ in range(8):
                torch.mm(*self._factors)
                count += 1
            torch.cuda.current_stream().synchronize()
        return count

    def facts(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.index)
        return {"torch": torch.__version__, "memory_bytes": properties.total_memory, "torch_cuda": torch.version.cuda}


class TorchStream:
    def __init__(self) -> None:
        self._cuda: Any = torch.cuda  # parts of it have no types
        self._stream = self._cuda.Stream()
        self.cuda_stream = int(self._stream.cuda_stream)

    def hold(self) -> None:
        with torch.cuda.stream(self._stream):
            self._cuda._sleep(400_000_000)  # cycles: some 0.2 s

    def let_go(self) -> None:
        """It goes on by itself."""

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        with torch.cuda.stream(self._stream):
            tensor.fill_(value)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source)

    def event(self) -> Any:
        event = self._cuda.Event()
        event.record(self._stream)
        return event

    def capturing(self) -> Any:
        return torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local")

    def synchronize(self) -> None:
        self._stream.synchronize()


# -- the steps -------------------------------------------------------------------------------------------------------------------


def environment(gpu: Gpu) -> dict[str, Any]:
    """Driver, GPU, link, memory node, and where the kernel's machine code comes from."""
    device = gpu.device()
    facts = device.raw.facts()
    node = Path("/sys/bus/pci/devices") / facts.pci.decode().lower() / "numa_node"
    device.close(WAIT_S)
    return {
        "gpu": facts.name.decode(),
        "pci": facts.pci.decode(),
        "numa_node": int(node.read_text()) if node.exists() else None,
        "driver_version": facts.driver_version,
        "capability": [facts.major, facts.minor],
        "batch_version": facts.batch_version,
        "kernel": device.kernel,
        "python": platform.python_version(),
        **gpu.facts(),
        **({} if device.has_kernel else {"problem": f"no kernel: {device.kernel}"}),
    }


def correctness(gpu: Gpu) -> dict[str, Any]:
    """Every layout, MHA and MLA, both directions, every engine: bytes as torch has them."""
    cases, wrong = 0, []
    for layout in LAYOUTS:
        for mla in (False, True):
            if mla and layout == "page_head":
                continue  # no heads to keep together
            shape = KVShape(4, 1 if mla else 2, 1 if mla else 4, 64, "bfloat16", 16)
            for engine in get_args(Engine):
                ok = _there_and_back(gpu, shape, layout, engine)
                if ok is not None:
                    cases += 1
                if ok is False:
                    wrong.append(f"{layout} {'mla' if mla else 'mha'} {engine}")
    return {"cases": cases, "wrong": wrong, **({"problem": f"wrong bytes: {wrong}"} if wrong else {})}


def _there_and_back(gpu: Gpu, shape: KVShape, layout: Order, engine: Engine) -> bool | None:
    """Write pages back, load them to other pages, and compare; None if the engine cannot do it."""
    pages = 300
    host = HostMemory(SlotLayout(shape, layout), pages)
    kv = gpu.kv(shape, pages).by_head_groups(host.layout.head_groups)
    for layer in range(shape.layers):
        for tensor in kv.layer(layer):
            integers(tensor).random_(-30_000, 30_000)
    with _attached(gpu, host) as device:
        device.engines = Engines(load="kernel" if engine == "staged" else engine, write_back=engine)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
        there = CopyPlan(kv, pack_slots(order[:100]), host, pack_slots(order[100:200]))
        if engine == "staged" and not whole_pages(there.work().affine()):
            return None
        back = CopyPlan(host, pack_slots(order[100:200]), kv, pack_slots(order[200:]))
        ticket = device.stream("write_back").submit(there.work())
        device.stream("load").wait_event(ticket)
        for layer in back.layers:
            last = device.stream("load").submit(back.work(range(layer, layer + 1)))
        if not last.wait(WAIT_S) or last.error or ticket.error:
            raise RuntimeError(f"{layout} {engine}: {last.error or ticket.error or 'no end'}")
        return all(
            torch.equal(integers(tensor)[order[200:]], integers(tensor)[order[:100]])
            for layer in range(shape.layers)
            for tensor in kv.layer(layer)
        )


def bandwidth(gpu: Gpu) -> dict[str, Any]:
    """GB/s by direction, engine and length of runs, and of the kernel by its blocks: the table behind "auto"."""
    rows: list[dict[str, Any]] = []
    total = 1 << 20 if gpu.quick else 128 << 20
    for run_bytes in (256, 2048, 8192, 32768, 131072, 1 << 20):
        shape = KVShape(1, 1, 1, run_bytes // 16, "uint8", 16)
        pages = max(2, total // run_bytes)
        kv, host = gpu.kv(shape, pages), HostMemory(SlotLayout(shape, header_bytes=0), pages)
        slots = pack_slots(torch.randperm(pages, generator=torch.Generator().manual_seed(2)).tolist())
        with _attached(gpu, host) as device:
            stream = device.raw.stream(urgent=True)
            for to_host in (False, True):
                plan = CopyPlan(kv, slots, host, slots) if to_host else CopyPlan(host, slots, kv, slots)
                copy = plan.work().affine()
                for how in _ways(to_host):
                    if how.engine == "direct" and run_bytes < 2048:
                        continue  # half a million descriptors: minutes
                    took_s = []
                    for _ in range(2 if gpu.quick else 5):
                        end, start_s = device.make_end(), time.perf_counter()
                        mark = stream.submit(plans(copy), how, end.event)
                        if not end.wait(WAIT_S):
                            return {"rows": rows, "problem": f"{how} with runs of {run_bytes} bytes never ended"}
                        took_s.append(time.perf_counter() - start_s)
                        mark.free()
                    gb_s = round(copy.nbytes / statistics.median(took_s[1:]) / 1e9, 2)
                    row = {"run_bytes": run_bytes, "to_host": to_host, "engine": how.engine}
                    rows.append({**row, "blocks": how.blocks, "gb_s": gb_s})
            stream.close()
    return {"rows": rows}


def _ways(to_host: bool) -> Iterator[How]:
    for blocks in (1, 2, 4, 8, 16, 32):
        yield How("kernel", to_host, "poll", blocks=blocks)
    yield How("direct", to_host, "poll")
    if to_host:
        yield How("staged", to_host, "poll")


def overlap(gpu: Gpu) -> dict[str, Any]:
    """How much slower matrix products are while loads run, by engine."""
    seconds = 0.1 if gpu.quick else 3.0
    shape = KVShape(8, 2, 8, 128, "bfloat16", 64)
    pages = 4 if gpu.quick else 128
    kv, host = gpu.kv(shape, pages), HostMemory(SlotLayout(shape), pages)
    slots = pack_slots(range(pages))
    alone = gpu.compute(seconds)
    beside = {}
    with _attached(gpu, host) as device:
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


def latency(gpu: Gpu) -> dict[str, Any]:
    """Microseconds from the submission of an empty operation to the coroutine that waits for it, by who tells."""
    results = {}
    for notice in get_args(Notice):
        device = gpu.device(notice)
        for name in ("asyncio", "uvloop"):
            results[f"{notice} {name}"] = _on_loop(name, functools.partial(_round_trips, device, gpu.quick))
        device.close(WAIT_S)
    return {"us": results}


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


def hazards(gpu: Gpu) -> dict[str, Any]:
    """Fences on the GPU: right bytes with them.  Without, wrong bytes are expected, and no failure where they do not come."""
    shape = KVShape(4, 1, 1, 4096, "uint8", 16)
    kv, host = gpu.kv(shape, 8), HostMemory(SlotLayout(shape), 8)
    seen: dict[str, Any] = {}
    with _attached(gpu, host) as device:
        for fence in (True, False):
            for layer in range(shape.layers):
                kv.layer(layer)[0][3].fill_(0)
            step = gpu.stream()
            step.hold()
            for layer in range(shape.layers):
                step.fill(kv.layer(layer)[0][3], 7)
            if fence:
                device.stream("write_back").wait_event(step.event())
            ticket = device.stream("write_back").submit(CopyPlan(kv, pack_slots([3]), host, pack_slots([5])).work())
            if not fence:
                ticket.wait(WAIT_S)
            step.let_go()
            ticket.wait(WAIT_S)
            step.synchronize()
            right = all(bool((host.layer(layer)[0][5] == 7).all()) for layer in range(shape.layers))
            seen["write_back_behind_event" if fence else "write_back_without"] = right
        seen["layers_behind_stream_wait"], seen["capture_refused"] = _layers(gpu, device, kv, host)
    problem = [name for name, right in seen.items() if not right and name != "write_back_without"]
    return {"right": seen, **({"problem": f"not so: {problem}"} if problem else {})}


def _layers(gpu: Gpu, device: NativeCudaDevice, kv: KVTensors, host: HostMemory) -> tuple[bool, bool]:
    shape = kv.shape
    for layer in range(shape.layers):
        host.layer(layer)[0][6].fill_(layer + 1)
    before, forward = gpu.stream(), gpu.stream()
    before.hold()
    before.fill(kv.layer(0)[0][0], 0)
    device.stream("load").wait_event(before.event())
    plan, waits = CopyPlan(host, pack_slots([6]), kv, pack_slots([2])), LayerWaits(shape.layers, device.make_end)
    device.stream("load").submit_layers(
        [plan.work(range(layer, layer + 1)) for layer in plan.layers], waits, lambda ticket: None
    )
    read = [torch.zeros_like(kv.layer(layer)[0][2]) for layer in range(shape.layers)]
    for layer in range(shape.layers):
        waits.stream_wait(layer, forward.cuda_stream)
        forward.copy(read[layer], kv.layer(layer)[0][2])
    before.let_go()
    forward.synchronize()
    right = all(bool((each == layer + 1).all()) for layer, each in enumerate(read))
    try:
        with forward.capturing():
            waits.stream_wait(0, forward.cuda_stream)
    except UsageError:
        return right, True
    return right, False


def registration(gpu: Gpu) -> dict[str, Any]:
    """Seconds to map, touch and register host memory, and to let it go."""
    device = gpu.device()
    nbytes = 64 << 20 if gpu.quick else 8 << 30
    shape = KVShape(1, 1, 1, 4096, "uint8", 256)
    start_s = time.perf_counter()
    host = HostMemory(SlotLayout(shape, header_bytes=0), nbytes // shape.page_bytes)
    torch.frombuffer(memoryview(host.object(0)), dtype=torch.uint8)
    for slot in range(0, host.slots):
        host.object(slot)[0] = 0
    touched_s = time.perf_counter()
    device.register(*host.extent(), step_bytes=host.layout.slot_bytes)
    registered_s = time.perf_counter()
    known = device.raw.facts().registered_bytes
    device.close(WAIT_S)
    return {
        "gib": nbytes / 2**30,
        "pieces": len(pieces(nbytes, host.layout.slot_bytes)),
        "touch_s": round(touched_s - start_s, 3),
        "register_s": round(registered_s - touched_s, 3),
        "unregister_s": round(time.perf_counter() - registered_s, 3),
        **({} if known == host.nbytes else {"problem": f"{known} of {host.nbytes} bytes are registered"}),
    }


def end_to_end(gpu: Gpu) -> dict[str, Any]:
    """A cache over the GPU serves prompts for a while; a page that comes back with other bytes raises."""
    return {"answers": _on_loop("asyncio", functools.partial(_serve, gpu))}


async def _serve(gpu: Gpu) -> int:
    import anyio.to_thread

    kv = gpu.kv(KVShape(4, 2, 2, 64, "float32", 4), 7)
    config = Config(page_size=4, model=ModelFacts(model_id="toy", weights="v1"), host=HostConfig(pages=16))
    answers = 0
    async with HiCache.open(config, kv, device=gpu.device(), driver="step") as cache:
        engine = StepEngine(cache, ToyModel(kv), batch=1)
        end_s = time.monotonic() + (1.0 if gpu.quick else 20.0)
        while time.monotonic() < end_s:
            prompts = [(f"{answers + at}", prompt(5, family=(answers + at) % 5)) for at in range(4)]
            await anyio.to_thread.run_sync(engine.run, prompts)
            answers += len(prompts)
        engine.close()
        check_conservation(cache.core)
    return answers


# -- inside ----------------------------------------------------------------------------------------------------------------------


class _attached:
    """A device that knows the host memory, closed at the end."""

    def __init__(self, gpu: Gpu, host: HostMemory) -> None:
        self._device = gpu.device()
        self._device.register(*host.extent(), step_bytes=host.layout.slot_bytes)

    def __enter__(self) -> NativeCudaDevice:
        return self._device

    def __exit__(self, *exc: object) -> Literal[False]:
        self._device.close(WAIT_S)
        return False


def _on_loop(name: str, main: Callable[[], Any]) -> Any:
    if name == "asyncio":
        return asyncio.run(main())
    try:
        import uvloop
    except ImportError:
        return "uvloop is not installed"
    return uvloop.run(main())


STEP_FUNCTIONS: Final[dict[str, Callable[[Gpu], dict[str, Any]]]] = {
    "environment": environment,
    "correctness": correctness,
    "bandwidth": bandwidth,
    "overlap": overlap,
    "latency": latency,
    "hazards": hazards,
    "registration": registration,
    "end_to_end": end_to_end,
}
