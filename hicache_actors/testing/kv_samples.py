"""Small KV tensors and host slots with known bytes, in every form that an engine may bring, for tests of copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, get_args

import torch

from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.layout import Order, SlotLayout

LAYERS, PAGE_SIZE, HEADS, HEAD_DIM, PAGES, SLOTS = 3, 4, 2, 8, 12, 9

ORDERS: tuple[Order, ...] = get_args(Order)
ORDERS_AND_MLA = tuple((order, mla) for order in ORDERS for mla in (False, True) if not (mla and order == "page_head"))
"""MLA has no heads to put first."""

STRIDES = ("contiguous", "page_major", "head_major", "padded")
"""One tensor a layer; all layers of a page together (views of one tensor); heads before tokens; every other element."""

_AXES: Final[dict[Order, tuple[int, ...]]] = {
    "page_first_direct": (1, 0, 2, 3, 4),
    "page_first": (1, 2, 0, 3, 4),
    "page_head": (1, 3, 2, 0, 4),
    "layer_first": (0, 1, 2, 3, 4),
    "page_unified": (0, 1, 2, 3, 4),
}
"""Of a page stacked as layer, k, token, head, dim: which axis comes where."""

PLACES = {
    "scattered": ([7, 2, 11, 3, 0], [8, 1, 4, 0, 6]),
    "runs": ([4, 5, 6], [1, 2, 3]),
    "run_to_rising": ([4, 5, 6], [1, 3, 8]),
    "single": ([11], [0]),
}
"""Device pages and host slots of a copy."""


class Call:
    """Work that calls ``function``."""

    def __init__(self, function: Callable[[], object], nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self._function = function

    def run(self) -> None:
        self._function()


class Asked:
    """An event that can only be asked, like ``torch.cuda.Event``."""

    def __init__(self) -> None:
        self.over = False
        self.error: Exception | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.over


def engine_tensors(
    strides: str, *, mla: bool = False, dtype: torch.dtype = torch.bfloat16, place: str = "cpu"
) -> KVTensors:
    """An engine's KV tensors [PAGES, PAGE_SIZE, HEADS, HEAD_DIM] a layer (MLA: without heads), all values different.

    ``place``: torch's name of the device that they are on.
    """
    kv, heads = (1, 1) if mla else (2, HEADS)
    size = {"page": PAGES, "layer": LAYERS, "kv": kv, "token": PAGE_SIZE, "head": heads, "dim": HEAD_DIM}
    order = {
        "contiguous": "kv layer page token head dim",
        "page_major": "page layer kv token head dim",
        "head_major": "kv layer page head token dim",
        "padded": "kv layer page token head dim",
    }[strides].split()
    if strides == "padded":
        size["dim"] *= 2
    whole = torch.empty([size[axis] for axis in order], dtype=dtype, device=place)
    fill(whole, seed=1)
    if strides == "padded":
        whole = whole[..., ::2]
    whole = whole.permute([order.index(axis) for axis in ("kv", "layer", "page", "token", "head", "dim")])
    if mla:
        return KVTensors.from_mla([whole[0, layer, :, :, 0] for layer in range(LAYERS)])
    return KVTensors.from_tensors(list(whole[0]), list(whole[1]))


def fill(tensor: torch.Tensor, seed: int) -> None:
    """Random bytes, NaNs included."""
    flat = tensor.view(torch.uint8)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


def page_bytes(kv: KVTensors, page: int, order: Order) -> bytes:
    """What a slot that holds ``page`` must hold: the payload, or under layer_first one layer after the other."""
    stacked = torch.stack([torch.stack([tensor[page] for tensor in kv.layer(layer)]) for layer in range(LAYERS)])
    return as_bytes(stacked.permute(_AXES[order]))


def slot_bytes(host: HostMemory, slot: int) -> bytes:
    """What a slot does hold, its header included."""
    if host.layout.in_place:
        return bytes(host.object(slot))
    return b"".join(as_bytes(tensor[slot]) for layer in range(LAYERS) for tensor in host.layer(layer))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def host_memory(kv: KVTensors, order: Order, header_bytes: int = 4096, slots: int = SLOTS) -> HostMemory:
    """Host slots for pages of ``kv``, filled with random bytes, headers too."""
    host = HostMemory(SlotLayout(kv.shape, order, header_bytes), slots)
    for slot in range(slots):
        if host.layout.in_place:
            noise = torch.empty(host.layout.object_bytes, dtype=torch.uint8)
            fill(noise, seed=slot)
            host.object(slot)[:] = noise.numpy().tobytes()
        else:
            for layer in range(LAYERS):
                for kind, tensor in enumerate(host.layer(layer)):
                    fill(tensor[slot], seed=(slot * LAYERS + layer) * 2 + kind)
    return host
