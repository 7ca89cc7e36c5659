"""Cases for whoever copies pages: every order of host slots, any strides of an engine, both directions, odd sizes.

The reference is torch, a layer at a time by index_select and index_copy_.  All memory of both sides is compared, so a byte that
was written where none belongs is found as well: what is not the target of a case are canaries.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias, get_args

import msgspec
import torch

from hicache_actors.core.words import pack_slots
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors, torch_dtype
from hicache_actors.memory.layout import Order, SlotLayout
from hicache_actors.memory.shapes import KVShape
from hicache_actors.transfer.plan import CopyPlan, CopyWork

Strides: TypeAlias = Literal["contiguous", "page_major", "head_major", "padded", "mixed"]
"""One tensor a layer; all layers of a page together (views of one tensor); heads before tokens; every other element; K as the
first, V as the third."""

_AXES: Final[dict[str, str]] = {
    "contiguous": "klpthd",
    "page_major": "plkthd",
    "head_major": "klphtd",
    "padded": "klpthd",
}
DEVICE_PAGES: Final = 11
HOST_SLOTS: Final = 13


class Case(msgspec.Struct, frozen=True):
    """``layers``: the part of the layers that is copied.  ``pages`` of them, scattered or in ascending runs."""

    number: int
    shape: KVShape
    order: Order
    header_bytes: int
    strides: Strides
    to_host: bool
    layers: tuple[int, int]
    pages: int
    scattered: bool

    def __str__(self) -> str:
        shape = self.shape
        kind = "mla" if shape.kv == 1 else f"{shape.heads}x"
        way = "write_back" if self.to_host else "load"
        return f"{self.number}-{self.order}-{self.strides}-{way}-{kind}{shape.head_dim}-{shape.dtype}-page{shape.page_size}"


def cases() -> Iterator[Case]:
    """About 1,500, always the same."""
    chance = random.Random(7)
    number = 0
    for order, strides, to_host, kv, page_size, heads in itertools.product(
        get_args(Order), get_args(Strides), (True, False), (1, 2), (1, 4, 16), (1, 2, 8)
    ):
        if kv == 1 and (heads != 1 or order in ("page_head", "page_unified") or strides in ("head_major", "mixed")):
            continue
        for dtype, head_dim in (
            ("bfloat16", 64),
            chance.choice([("bfloat16", 72), ("float8_e4m3fn", 5), ("float32", 3)]),
        ):
            layers = chance.choice([1, 3])
            first = chance.randrange(layers)
            yield Case(
                number,
                KVShape(layers, 2 if kv == 2 else 1, heads, head_dim, dtype, page_size),
                order,
                chance.choice([0, 4096]),
                strides,
                to_host,
                (first, chance.randint(first + 1, layers)) if chance.random() < 0.5 else (0, layers),
                chance.randint(1, 8),
                chance.random() < 0.7,
            )
            number += 1


def large_cases() -> Iterator[Case]:
    """Copies of more than 1 MiB, which native code stores past the caches: runs of 96 bytes to 32 KiB."""
    for number, (order, to_host, head_dim) in enumerate(itertools.product(get_args(Order), (True, False), (48, 128))):
        shape = KVShape(layers=4, kv=2, heads=8, head_dim=head_dim, dtype="bfloat16", page_size=16)
        pages = 8 if head_dim == 128 else 11
        yield Case(10_000 + number, shape, order, 4096, "contiguous", to_host, (0, 4), pages, True)


class Sides:
    """Both sides of a case with random bytes in them, and what must be there after the copy."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        self.case = case
        chance = random.Random(case.number)
        shape = case.shape
        self.tensors, self._device_bytes = _engine_tensors(case, device)
        self.host = HostMemory(SlotLayout(shape, case.order, case.header_bytes), HOST_SLOTS)
        self.kv = self.tensors.by_head_groups(self.host.layout.head_groups)
        self._host_bytes = all_bytes(self.host.layer(0)[0])
        _fill(self._host_bytes, case.number + 1)
        self.pages = _pick(chance, DEVICE_PAGES, case)
        self.slots = _pick(chance, HOST_SLOTS, case)
        self._before = self._device_bytes.clone(), self._host_bytes.clone()
        self._by_torch()
        self._after = self._device_bytes.clone(), self._host_bytes.clone()
        self.reset()

    def work(self) -> CopyWork:
        """The case for a device, or for native code by its ``affine``."""
        device, host = (self.kv, pack_slots(self.pages)), (self.host, pack_slots(self.slots))
        plan = CopyPlan(*device, *host) if self.case.to_host else CopyPlan(*host, *device)
        return plan.work(range(*self.case.layers))

    @property
    def target_bytes(self) -> torch.Tensor:
        """All bytes of the side that is written."""
        return self._host_bytes if self.case.to_host else self._device_bytes

    def reset(self) -> None:
        """As before the copy."""
        self._device_bytes.copy_(self._before[0])
        self._host_bytes.copy_(self._before[1])

    def wrong_bytes(self) -> int:
        """How many bytes, on both sides together, are not what they must be after the copy."""
        found = (self._device_bytes, self._host_bytes)
        return sum(int((now != then).sum()) for now, then in zip(found, self._after, strict=True))

    def changed_bytes(self) -> int:
        """How many the copy must change: a case where it is 0 shows nothing."""
        return sum(int((then != before).sum()) for then, before in zip(self._after, self._before, strict=True))

    def _by_torch(self) -> None:
        for layer in range(*self.case.layers):
            for device, host in zip(self.kv.layer(layer), self.host.layer(layer), strict=True):
                on_device = torch.tensor(self.pages, device=device.device)
                on_host = torch.tensor(self.slots)
                if self.case.to_host:
                    _bits(host).index_copy_(0, on_host, _bits(device).index_select(0, on_device).cpu())
                else:
                    moved = _bits(host).index_select(0, on_host).to(device.device)
                    _bits(device).index_copy_(0, on_device, moved)


def all_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole memory that a tensor is a view of, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _engine_tensors(case: Case, device: str) -> tuple[KVTensors, torch.Tensor]:
    shape = case.shape
    extents = {"k": shape.kv, "l": shape.layers, "p": DEVICE_PAGES, "t": shape.page_size, "h": shape.heads}
    extents["d"] = shape.head_dim * (2 if case.strides == "padded" else 1)
    elements = 1
    for extent in extents.values():
        elements *= extent
    flat = torch.empty(elements, dtype=torch_dtype(shape.dtype), device=device)
    _fill(flat.view(torch.uint8), case.number)
    forms = ("contiguous", "head_major") if case.strides == "mixed" else (case.strides,) * shape.kv
    layers: list[tuple[torch.Tensor, ...]] = []
    for layer in range(shape.layers):
        parts = []
        for kv, form in enumerate(forms):
            axes = _AXES[form]
            whole = flat.view([extents[axis] for axis in axes]).permute([axes.index(axis) for axis in "klpthd"])
            tensor = whole[kv, layer]
            parts.append(tensor[..., ::2] if form == "padded" else tensor)
        layers.append(tuple(parts))
    if shape.kv == 1:
        return KVTensors.from_mla([latent[:, :, 0] for (latent,) in layers]), flat.view(torch.uint8)
    keys, values = zip(*layers, strict=True)
    return KVTensors.from_tensors(keys, values), flat.view(torch.uint8)


def _pick(chance: random.Random, limit: int, case: Case) -> list[int]:
    if case.scattered:
        return chance.sample(range(limit), case.pages)
    first = chance.randint(0, limit - case.pages)
    return list(range(first, first + case.pages))


def _fill(to: torch.Tensor, seed: int) -> None:
    noise = torch.randint(0, 256, to.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    to.copy_(noise)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: index_copy_ knows no float8, and keeps every bit."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(integers[tensor.element_size()])
