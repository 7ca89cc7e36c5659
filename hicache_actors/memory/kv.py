"""The device side of a copy: the engine's KV tensors, or tensors of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import torch
from numpy.typing import NDArray

from hicache_actors.errors import ConfigError
from hicache_actors.memory.geometry import Geometry
from hicache_actors.memory.shapes import ITEM_BYTES, KVShape, format_bytes

Raw: TypeAlias = NDArray[Any]
"""The bytes of a KV tensor as integers of the element's width, without a copy."""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` (any device, any strides) as integers of its elements' width, over the same memory: they keep every bit."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def raw_view(tensor: torch.Tensor) -> Raw:
    """``tensor`` (CPU, any strides) as a numpy array over the same memory.

    Copies go through it: numpy has no bfloat16 or float8, integers keep every bit, and numpy's indexing lets the GIL go and
    starts no OpenMP team in the copy thread, where torch's would compete with the forward pass for cores.
    """
    array: Raw = integers(tensor).numpy()
    return array


class KVTensors:
    """Per layer K and V ``[pages, page_size, heads, head_dim]``, or one MLA tensor ``[pages, page_size, head_dim]``.

    Any strides, any storage (views into one big tensor are fine), as long as no two elements share memory.  The tensors are
    used in place and kept alive; a page id is an index of dimension 0.  Immutable, so any thread may call.
    """

    def __init__(self, layers: Sequence[tuple[torch.Tensor, ...]], shape: KVShape, pages: int) -> None:
        """For `from_tensors`, `from_mla` and `make`; every tensor is [pages, page_size, heads, head_dim]."""
        self.shape = shape
        self.pages = pages
        self.device: torch.device = layers[0][0].device
        self._layers = tuple(layers)
        self.geometry: Final = Geometry.of("device", layers)
        self._raw: tuple[tuple[Raw, ...], ...] | None = None

    @classmethod
    def from_tensors(cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> KVTensors:
        """The engine's own: one K and one V ``[pages, page_size, heads, head_dim]`` a layer.  Raises `ConfigError`."""
        if len(keys) != len(values) or not len(keys):
            raise ConfigError(
                "kv", (len(keys), len(values)), "needs one K and one V tensor a layer", allowed="equal lengths >= 1"
            )
        named = {f"kv.keys[{i}]": tensor for i, tensor in enumerate(keys)}
        named |= {f"kv.values[{i}]": tensor for i, tensor in enumerate(values)}
        _check(named, "[pages, page_size, heads, head_dim]", dims=4)
        pages, page_size, heads, head_dim = keys[0].shape
        shape = KVShape(len(keys), 2, heads, head_dim, _dtype_name(keys[0]), page_size)
        return cls(list(zip(keys, values, strict=True)), shape, pages)

    @classmethod
    def from_mla(cls, latents: Sequence[torch.Tensor] | torch.Tensor) -> KVTensors:
        """The engine's own: one ``[pages, page_size, head_dim]`` a layer, or a stack ``[layers, ...]`` of them.

        Raises `ConfigError`.
        """
        named = {f"kv.latents[{i}]": tensor for i, tensor in enumerate(latents)}
        if not named:
            raise ConfigError("kv", 0, "needs one tensor a layer", allowed="lengths >= 1")
        _check(named, "[pages, page_size, head_dim]", dims=3)
        pages, page_size, head_dim = latents[0].shape
        shape = KVShape(len(named), 1, 1, head_dim, _dtype_name(latents[0]), page_size)
        with torch.inference_mode(False):
            return cls([(tensor.unsqueeze(2),) for tensor in named.values()], shape, pages)

    @classmethod
    def make(cls, shape: KVShape, pages: int, device: torch.device | str = "cpu") -> KVTensors:
        """Zeroed tensors of our own."""
        if pages < 1:
            raise ConfigError("device.pages", pages, "is not a count", allowed="integers >= 1")
        size = (pages, shape.page_size, shape.heads, shape.head_dim)
        # The caller may be inside inference_mode; its tensors could not be written by the copy thread, which is not.
        with torch.inference_mode(False):
            layers = [
                tuple(torch.zeros(size, dtype=torch_dtype(shape.dtype), device=device) for _ in range(shape.kv))
                for _ in range(shape.layers)
            ]
        return cls(layers, shape, pages)

    def by_head_groups(self, groups: int) -> KVTensors:
        """The same memory for copies with `HostMemory` of so many head groups: K of each group, then V of each, in every layer."""
        if groups == 1:
            return self
        with torch.inference_mode(False):
            layers = [tuple(part for tensor in tensors for part in tensor.chunk(groups, 2)) for tensors in self._layers]
        return KVTensors(layers, self.shape, self.pages)

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """(K, V), or (latent,) with a heads dimension of 1: each [pages, page_size, heads, head_dim], the tensors themselves."""
        return self._layers[layer]

    def raw(self, layer: int) -> tuple[Raw, ...]:
        """`layer` as integers, for copies on the CPU.  Raises `ConfigError` for tensors on another device."""
        if self._raw is None:
            if self.device.type != "cpu":
                raise ConfigError(
                    "kv",
                    str(self.device),
                    "is out of reach of the CPU device",
                    allowed="cpu",
                    fix="open a device of its kind",
                )
            with torch.inference_mode(False):
                self._raw = tuple(tuple(raw_view(tensor) for tensor in tensors) for tensors in self._layers)
        return self._raw[layer]

    def describe(self) -> str:
        tokens = self.pages * self.shape.page_size
        size = format_bytes(self.pages * self.shape.page_bytes)
        return f"{self.pages:,} pages = {tokens:,} tokens, {size} on {self.device} ({self.shape.describe()})"


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check(named: dict[str, torch.Tensor], wanted: str, dims: int) -> None:
    first_name, first = next(iter(named.items()))
    homes: dict[int, str] = {}
    for name, tensor in named.items():
        shown = f"{_dtype_name(tensor)}{list(tensor.shape)} on {tensor.device}"
        if tensor.dim() != dims or 0 in tensor.shape:
            raise ConfigError(name, shown, "has another form", allowed=wanted)
        if _dtype_name(tensor) not in ITEM_BYTES:
            raise ConfigError(name, shown, "has a dtype that cannot be cached", allowed=ITEM_BYTES)
        if (tensor.shape, tensor.dtype, tensor.device) != (first.shape, first.dtype, first.device):
            raise ConfigError(
                name,
                shown,
                f"differs from {first_name}",
                allowed=f"{_dtype_name(first)}{list(first.shape)} on {first.device}",
            )
        if tensor.is_inference():
            raise ConfigError(
                name,
                shown,
                "was made under torch.inference_mode: no other thread can write it",
                fix="make the KV tensors outside inference_mode, or under torch.no_grad",
            )
        if tensor.requires_grad:
            raise ConfigError(name, shown, "requires grad", fix="pass tensor.detach()")
        if _overlaps(tensor):
            raise ConfigError(
                name, (shown, tensor.stride()), "two of its elements share memory", fix="pass a materialised tensor"
            )
        other = homes.setdefault(tensor.data_ptr(), name)
        if other != name:
            raise ConfigError(name, shown, f"starts where {other} starts", fix="give each layer its own K and V")


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether strides may let two indices meet (a stride that does not clear all finer axes)."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False
