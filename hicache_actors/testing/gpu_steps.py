"""The steps of `gpu_check` that know right from wrong, and the list of all steps.

A step returns what goes into the JSON; ``problem`` in it says that something is wrong.  No other step hears of it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_args

import torch

from hicache_actors.cache.api import HiCache
from hicache_actors.config import Config, HostConfig, HostLayout, ModelFacts
from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext.cuda_end import CudaEnd
from hicache_actors.cuda_ext.native.driver import Notice
from hicache_actors.cuda_ext.native_cuda import NativeCudaDevice
from hicache_actors.errors import UsageError
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors, integers
from hicache_actors.memory.layout import Order, SlotLayout
from hicache_actors.memory.shapes import KVShape
from hicache_actors.testing.engines import StepEngine
from hicache_actors.testing.gpu_faces import WAIT_S, Gpu, attached, on_loop
from hicache_actors.testing.gpu_speeds import bandwidth, latency, locality, overlap, registration
from hicache_actors.testing.pools import check_conservation
from hicache_actors.testing.small import prompt
from hicache_actors.testing.toy_model import ToyModel
from hicache_actors.transfer.completions import End
from hicache_actors.transfer.engines import Engine, Engines, whole_pages
from hicache_actors.transfer.plan import CopyPlan
from hicache_actors.transfer.waits import LayerWaits

LAYOUTS: Final[tuple[Order, ...]] = get_args(HostLayout)
PCI: Final = Path("/sys/bus/pci/devices")
HOLD_US: Final = 200_000


def environment(gpu: Gpu) -> dict[str, Any]:
    """Driver, GPU, link, memory node, and where the kernel's machine code comes from."""
    device = gpu.device()
    facts = device.raw.facts()
    device.close(WAIT_S)
    files = ("numa_node", "current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    return {
        "gpu": facts.name.decode(),
        "pci": facts.pci.decode(),
        **{name: _line(PCI / facts.pci.decode().lower() / name) for name in files},
        "huge_pages": _line(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "cores": len(os.sched_getaffinity(0)),
        "driver_version": facts.driver_version,
        "capability": [facts.major, facts.minor],
        "batch_version": facts.batch_version,
        "kernel": device.kernel,
        "python": platform.python_version(),
        **gpu.facts(),
        **({} if device.has_kernel else {"problem": f"no kernel: {device.kernel}"}),
    }


def _line(file: Path) -> str | None:
    return file.read_text().strip() if file.exists() else None


# -- bytes ---------------------------------------------------------------------------------------------------------------


def correctness(gpu: Gpu) -> dict[str, Any]:
    """Every layout, MHA and MLA, both directions, every engine: bytes as torch has them, and no other byte touched."""
    return _bytes(gpu, LAYOUTS, pages=300)


def memcheck(gpu: Gpu) -> dict[str, Any]:
    """The same on a few cases, for compute-sanitizer, which looks at each access and is slow."""
    return _bytes(gpu, ("page_first", "page_first_direct"), pages=12)


def _bytes(gpu: Gpu, layouts: tuple[Order, ...], *, pages: int) -> dict[str, Any]:
    cases, wrong = 0, []
    for layout in layouts:
        for mla in (False, True):
            if mla and layout == "page_head":
                continue  # no heads to keep together
            shape = KVShape(4, 1 if mla else 2, 1 if mla else 4, 64, "bfloat16", 16)
            for engine in get_args(Engine):
                problem = _there_and_back(gpu, shape, layout, engine, pages)
                if problem is None:
                    continue
                cases += 1
                if problem:
                    wrong.append(f"{layout} {'mla' if mla else 'mha'} {engine}: {problem}")
    return {"cases": cases, "wrong": wrong, **({"problem": f"wrong bytes: {wrong}"} if wrong else {})}


def _there_and_back(gpu: Gpu, shape: KVShape, layout: Order, engine: Engine, pages: int) -> str | None:
    """Write a third of the pages back, load them to another third -> what is wrong, or ""; None if the engine cannot do it."""
    host = HostMemory(SlotLayout(shape, layout), pages)
    kv = gpu.kv(shape, pages).by_head_groups(host.layout.head_groups)
    for layer in range(shape.layers):
        for tensor in (*kv.layer(layer), *host.layer(layer)):
            integers(tensor).random_(-30_000, 30_000)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
    first, second, third = order[: pages // 3], order[pages // 3 : 2 * pages // 3], order[2 * pages // 3 :]
    with attached(gpu, host) as device:
        device.engines = Engines(load="kernel" if engine == "staged" else engine, write_back=engine)
        there = CopyPlan(kv, pack_slots(first), host, pack_slots(second))
        if engine == "staged" and not whole_pages(there.work().affine()):
            return None
        back = CopyPlan(host, pack_slots(second), kv, pack_slots(third))
        wanted = [_wanted(kv, host, layer, first, second, third) for layer in range(shape.layers)]
        ticket = device.stream("write_back").submit(there.work())
        device.stream("load").wait_event(ticket)
        for layer in back.layers:
            last = device.stream("load").submit(back.work(range(layer, layer + 1)))
        if not last.wait(WAIT_S) or last.error or ticket.error:
            raise RuntimeError(f"{layout} {engine}: {last.error or ticket.error or 'no end'}")
        for layer, (on_gpu, on_host) in enumerate(wanted):
            for place, found, right in (("GPU", kv.layer(layer), on_gpu), ("host", host.layer(layer), on_host)):
                if not all(torch.equal(integers(is_), be) for is_, be in zip(found, right, strict=True)):
                    return f"layer {layer} on the {place}"
        if host.layout.slot_header_bytes and any(any(host.header(slot)) for slot in range(pages)):
            return "a header"
    return ""


_Tensors = list[torch.Tensor]


def _wanted(
    kv: KVTensors, host: HostMemory, layer: int, first: list[int], second: list[int], third: list[int]
) -> tuple[_Tensors, _Tensors]:
    """What a layer shall hold in the end, on the GPU and on the host."""
    on_gpu = [integers(tensor).clone() for tensor in kv.layer(layer)]
    on_host = [integers(tensor).clone() for tensor in host.layer(layer)]
    for gpu_side, host_side in zip(on_gpu, on_host, strict=True):
        moved = gpu_side[first]
        host_side[second] = moved.to(host_side.device)
        gpu_side[third] = moved
    return on_gpu, on_host


# -- order ---------------------------------------------------------------------------------------------------------------


def hazards(gpu: Gpu) -> dict[str, Any]:
    """Fences on the GPU: right bytes with them.  Without, wrong bytes are expected, and no failure where they do not come."""
    shape = KVShape(4, 1, 1, 4096, "uint8", 16)
    kv, host = gpu.kv(shape, 8), HostMemory(SlotLayout(shape), 8)
    seen: dict[str, Any] = {}
    with attached(gpu, host) as device:
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
        seen["one_graph_behind_the_last_layer"] = _graphs(gpu, device, kv, host, in_one=True)
        seen["a_graph_a_layer_behind_each"] = _graphs(gpu, device, kv, host, in_one=False)
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


def _graphs(gpu: Gpu, device: NativeCudaDevice, kv: KVTensors, host: HostMemory, *, in_one: bool) -> bool:
    """The two ways of docs/gpu.md: graphs that are captured once read what several loads have brought."""
    shape, forward = kv.shape, gpu.stream()
    read = [torch.zeros_like(kv.layer(layer)[0][4]) for layer in range(shape.layers)]

    def pass_over(layers: range) -> None:
        for layer in layers:
            forward.copy(read[layer], kv.layer(layer)[0][4])

    whole = range(shape.layers)
    parts = [whole] if in_one else [range(layer, layer + 1) for layer in whole]
    graphs = [forward.captured(functools.partial(pass_over, part)) for part in parts]
    for value in (11, 12):
        for layer in whole:
            host.layer(layer)[0][7].fill_(value + layer)
        waits = _load(gpu, device, kv, host)
        for part, replay in zip(parts, graphs, strict=True):
            waits.stream_wait(part[-1], forward.cuda_stream)
            replay()
        forward.synchronize()
        if not all(bool((each == value + layer).all()) for layer, each in enumerate(read)):
            return False
    return True


def _load(gpu: Gpu, device: NativeCudaDevice, kv: KVTensors, host: HostMemory) -> LayerWaits:
    """Slot 7 to page 4, behind work that takes a while."""
    before = gpu.stream()
    before.hold()
    device.stream("load").wait_event(before.event())
    plan, waits = CopyPlan(host, pack_slots([7]), kv, pack_slots([4])), LayerWaits(kv.shape.layers, device.make_end)
    works = [plan.work(range(layer, layer + 1)) for layer in plan.layers]
    device.stream("load").submit_layers(works, waits, lambda ticket: None)
    before.let_go()
    return waits


def gil(gpu: Gpu) -> dict[str, Any]:
    """Copies end, and are seen to have ended, while a thread holds the GIL; and calls that take locks of the driver, beside ends
    and a thread that computes in Python, all come back."""
    shape = KVShape(4, 1, 1, 4096, "uint8", 16)
    kv, host = gpu.kv(shape, 8), HostMemory(SlotLayout(shape), 8)
    hold_gil = ctypes.PyDLL(None).usleep
    problems, rounds = [], 0
    for notice in get_args(Notice):
        with attached(gpu, host, notice) as device:
            stream = device.stream("load")
            ended = stream.submit(CopyPlan(host, pack_slots([1]), kv, pack_slots([2])).work())
            assert isinstance(ended, CudaEnd)
            assert ended.submitted.wait(WAIT_S)
            hold_gil(HOLD_US)
            if not ended.query():
                problems.append(f"{notice}: a copy had not ended after the GIL was held for {HOLD_US / 1e6} s")
            rounds += _locks_beside_ends(gpu, device, kv, host)
    return {"rounds": rounds, **({"problem": problems} if problems else {})}


def _locks_beside_ends(gpu: Gpu, device: NativeCudaDevice, kv: KVTensors, host: HostMemory) -> int:
    """-> how often memory was registered and taken back meanwhile.  A deadlock ends this step by its time limit."""
    stop, other, rounds = threading.Event(), HostMemory(SlotLayout(kv.shape), 256), 0

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    end_s, ends = time.monotonic() + (0.2 if gpu.quick else 3.0), list[End]()
    while time.monotonic() < end_s:
        for slot in range(4):
            work = CopyPlan(host, pack_slots([slot]), kv, pack_slots([slot])).work()
            ends.append(device.stream("load").submit(work))
        device.register(*other.extent(), step_bytes=other.layout.slot_bytes)
        device.registrations.remove(other.extent()[0])
        rounds += 1
    stop.set()
    thread.join()
    for end in ends:
        if not end.wait(WAIT_S) or end.error:
            raise RuntimeError(f"a copy did not end well: {end.error}")
    return rounds


# -- the whole -----------------------------------------------------------------------------------------------------------


def end_to_end(gpu: Gpu) -> dict[str, Any]:
    """A cache over the GPU serves prompts for a while; a page that comes back with other bytes raises."""
    return {"answers": on_loop("asyncio", functools.partial(_serve, gpu))}


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


STEP_FUNCTIONS: Final[dict[str, Callable[[Gpu], dict[str, Any]]]] = {
    "environment": environment,
    "correctness": correctness,
    "memcheck": memcheck,
    "bandwidth": bandwidth,
    "overlap": overlap,
    "latency": latency,
    "hazards": hazards,
    "gil": gil,
    "registration": registration,
    "locality": locality,
    "end_to_end": end_to_end,
}
