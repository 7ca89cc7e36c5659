"""How a page lies in a host slot.  No torch needed.

A slot is ``header + payload``, padded to 4096 bytes: with a header it is the stored object byte for byte, so storage reads and
writes slots in place.  Axes of the payload, slow to fast: k (K then V), l (layer), t (token), h (head), d (dimension).
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

import msgspec

from hicache_actors.errors import ConfigError
from hicache_actors.memory.shapes import KVShape, format_bytes

SLOT_ALIGN_BYTES: Final = 4096

Order: TypeAlias = Literal["page_first_direct", "page_first"]

_AXES: Final[dict[str, str]] = {"page_first_direct": "klthd", "page_first": "ktlhd"}


class SlotLayout(msgspec.Struct, frozen=True):
    """``order``: page_first_direct (k, l, t, h, d) keeps page x layer runs together; page_first (k, t, l, h, d) is byte-equal
    to SGLang's flat page.  ``header_bytes``: 4096, or 0 for raw objects.  Raises `ConfigError`.
    """

    shape: KVShape
    order: Order = "page_first_direct"
    header_bytes: int = 4096

    def __post_init__(self) -> None:
        if self.order not in _AXES:
            raise ConfigError("host.layout", self.order, "unknown order", allowed=get_args(Order))
        if self.header_bytes not in (0, 4096):
            raise ConfigError(
                "host.header_bytes", self.header_bytes, "unknown size", allowed="4096, or 0 for raw objects"
            )

    @property
    def payload_bytes(self) -> int:
        return self.shape.page_bytes

    @property
    def object_bytes(self) -> int:
        """Header and payload: what storage keeps of a page."""
        return self.header_bytes + self.payload_bytes

    @property
    def slot_bytes(self) -> int:
        """Distance of two slots: a multiple of 4096."""
        return -(-self.object_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES

    def strides(self) -> dict[str, int]:
        """Distance along each axis of the payload, in elements."""
        shape = self.shape
        extent = {"k": shape.kv, "l": shape.layers, "t": shape.page_size, "h": shape.heads, "d": shape.head_dim}
        strides: dict[str, int] = {}
        step = 1
        for axis in reversed(_AXES[self.order]):
            strides[axis] = step
            step *= extent[axis]
        return strides

    def describe(self, slots: int) -> str:
        padding = self.slot_bytes - self.object_bytes
        return (
            f"{slots:,} slots of {self.shape.page_size:,} tokens = {slots * self.shape.page_size:,} tokens, "
            f"{format_bytes(slots * self.slot_bytes)} ({self.order}; a slot is {self.slot_bytes:,} bytes: "
            f"{self.header_bytes:,} header, {self.payload_bytes:,} KV, {padding:,} padding)"
        )
