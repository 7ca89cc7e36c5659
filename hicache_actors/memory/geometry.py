"""Where the bytes of one side of a copy lie, as addresses and strides.  No torch needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch

Place: TypeAlias = Literal["device", "host"]


class Strides(NamedTuple):
    """Distance of two neighbours along each axis, in bytes.  An axis with a single element has 0: it is never walked."""

    page: int
    token: int
    head: int
    dim: int


class Geometry:
    """Byte of element (layer, part, page, token, head, dim) = ``bases[layer][part]`` + the sum of index * stride.

    A part is one tensor of a layer: K or V, or one group of heads of it.  ``extents``: tokens, heads and dims of each.  Made once
    for each side, compared by identity, changed never.  It holds addresses only: whoever uses them keeps the memory mapped.
    """

    __slots__ = ("bases", "extents", "item_bytes", "pages", "place", "strides")

    def __init__(
        self,
        place: Place,
        pages: int,
        extents: tuple[int, int, int],
        item_bytes: int,
        bases: Sequence[Sequence[int]],
        strides: Sequence[Sequence[Strides]],
    ) -> None:
        self.place, self.pages, self.extents, self.item_bytes = place, pages, extents, item_bytes
        self.bases = tuple(tuple(layer) for layer in bases)
        self.strides = tuple(tuple(layer) for layer in strides)

    @classmethod
    def of(cls, place: Place, layers: Sequence[Sequence[torch.Tensor]]) -> Geometry:
        """Of tensors [pages, page_size, heads, head_dim], equally many in each layer, with any strides."""
        first = layers[0][0]
        pages, tokens, heads, dims = first.shape
        return cls(
            place,
            pages,
            (tokens, heads, dims),
            first.element_size(),
            [[tensor.data_ptr() for tensor in layer] for layer in layers],
            [[_strides(tensor) for tensor in layer] for layer in layers],
        )


def _strides(tensor: torch.Tensor) -> Strides:
    item_bytes = tensor.element_size()
    return Strides(
        *(stride * item_bytes if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    )
