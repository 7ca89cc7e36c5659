"""How a page lies in a host slot.  No torch needed.

Mostly a slot is ``header + payload``, padded to 4096 bytes: with a header it is the stored object byte for byte, so storage reads
and writes slots in place.  Under layer_first each layer is one run over all slots, so a page is no run: its object is put together
in a staging slot (`SlotLayout.object_layout`), and taken apart there.  Under page_unified a page is several objects, its *chunks*
(a range of layers x a group of heads), each with a header of its own: a slot is ``chunks x (header + chunk)``, head group > layer
range.

Axes, slow to fast: s (slot), k (K then V), l (layer), t (token), h (head), d (dimension).
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

import msgspec

from hicache_actors.errors import ConfigError
from hicache_actors.memory.shapes import KVShape, format_bytes

SLOT_ALIGN_BYTES: Final = 4096

Order: TypeAlias = Literal["page_first_direct", "page_first", "page_head", "layer_first", "page_unified"]

_AXES: Final[dict[Order, str]] = {
    "page_first_direct": "sklthd",
    "page_first": "sktlhd",
    "page_head": "skhtld",
    "layer_first": "lksthd",
    "page_unified": "slkthd",  # of a chunk
}


class SlotLayout(msgspec.Struct, frozen=True):
    """``order``: page_first_direct (k, l, t, h, d) keeps page x layer runs together; page_first (k, t, l, h, d) is byte-equal
    to SGLang's flat page; page_head (k, h, t, l, d) keeps heads together, of which MLA has none; layer_first (l, k, slot, t, h, d)
    keeps the layers of a pool together; page_unified is (head group, layer range), each (l, k, t, h, d).  ``header_bytes`` of an
    object: 4096, or 0 for raw objects.  ``head_group``, ``layer_partition``: heads and layers in a chunk of page_unified, 0 for all
    of them; the last range of layers may be short.  Raises `ConfigError`.
    """

    shape: KVShape
    order: Order = "page_first_direct"
    header_bytes: int = 4096
    head_group: int = 0
    layer_partition: int = 0

    def __post_init__(self) -> None:
        if self.order not in _AXES:
            raise ConfigError("host.layout", self.order, "unknown order", allowed=get_args(Order))
        if self.order == "page_head" and self.shape.kv == 1:
            raise ConfigError(
                "host.layout",
                self.order,
                "MLA has no heads to keep together",
                allowed=("page_first_direct", "page_first", "layer_first"),
                fix="use page_first_direct",
            )
        if self.header_bytes not in (0, 4096):
            raise ConfigError(
                "host.header_bytes", self.header_bytes, "unknown size", allowed="4096, or 0 for raw objects"
            )
        self._check_chunks()

    def _check_chunks(self) -> None:
        for field in ("head_group", "layer_partition"):
            value = getattr(self, field)
            if value and self.order != "page_unified":
                raise ConfigError(f"layout.{field}", value, f"a page of {self.order} is one chunk", allowed="0")
            if value < 0:
                raise ConfigError(f"layout.{field}", value, "is not a count", allowed="0 (all), or more")
        if self.head_group and self.shape.heads % self.head_group:
            raise ConfigError(
                "layout.head_group", self.head_group, f"does not divide this rank's {self.shape.heads} heads",
                allowed=f"a divisor of {self.shape.heads}", fix="raise storage.tp_lcm_size, or lower storage.head_group",
            )  # fmt: skip

    @property
    def head_groups(self) -> int:
        """Groups of heads whose bytes lie apart."""
        return self.shape.heads // (self.head_group or self.shape.heads)

    @property
    def chunk_spans(self) -> tuple[tuple[int, int], ...]:
        """Where the objects of a page stand in its slot: (first byte, one past the last)."""
        spans: list[tuple[int, int]] = []
        part_layers, end = self._part_layers, 0
        for _ in range(self.head_groups):
            for first in range(0, self.shape.layers, part_layers):
                layers = min(part_layers, self.shape.layers - first)
                start, end = end, end + self.header_bytes + layers * self._group_layer_bytes
                spans.append((start, end))
        return tuple(spans)

    @property
    def longest_object_bytes(self) -> int:
        """Of the objects of a page, the longest, with its header."""
        return max(end - start for start, end in self.object_layout.chunk_spans)

    def first_element(self, layer: int, kv: int, group: int, strides: dict[str, int]) -> int:
        """Of a layer's K (``kv`` 0) or V and a group of heads: its distance from the beginning of a slot, in elements.

        ``strides`` are those of the pool.
        """
        part, layer = divmod(layer, self._part_layers)
        chunk_bytes = part * (self.header_bytes + self._part_layers * self._group_layer_bytes)
        if group:
            chunk_bytes += group * self.object_bytes // self.head_groups
        header_bytes = self.header_bytes if self.in_place else 0
        return (chunk_bytes + header_bytes) // self.shape.item_bytes + kv * strides["k"] + layer * strides["l"]

    @property
    def _part_layers(self) -> int:
        return self.layer_partition or self.shape.layers

    @property
    def _group_layer_bytes(self) -> int:
        """K and V of one page in one layer, of one group of heads."""
        return self.shape.layer_page_bytes // self.head_groups

    @property
    def _chunks(self) -> int:
        return self.head_groups * -(-self.shape.layers // self._part_layers)

    @property
    def in_place(self) -> bool:
        """Whether a slot holds the object itself."""
        return _AXES[self.order].startswith("s")

    @property
    def object_layout(self) -> SlotLayout:
        """Of the slots in which pages stand as objects: this one, or that of staging slots.

        What is stored under layer_first is byte-equal to page_first_direct, and shared with it.
        """
        return self if self.in_place else SlotLayout(self.shape, "page_first_direct", self.header_bytes)

    @property
    def payload_bytes(self) -> int:
        return self.shape.page_bytes

    @property
    def object_bytes(self) -> int:
        """Headers and payload: what storage keeps of a page."""
        return self._chunks * self.header_bytes + self.payload_bytes

    @property
    def slot_header_bytes(self) -> int:
        """Room for headers in a slot of the pool."""
        return self._chunks * self.header_bytes if self.in_place else 0

    @property
    def slot_bytes(self) -> int:
        """What a page takes of the pool: if slots are runs, the distance of two, a multiple of 4096."""
        if not self.in_place:
            return self.payload_bytes
        return -(-self.object_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES

    @property
    def padding_bytes(self) -> int:
        """Of a slot."""
        return self.slot_bytes - self.slot_header_bytes - self.payload_bytes

    def strides(self, slots: int) -> dict[str, int]:
        """Distance along each axis in a pool of ``slots``, in elements."""
        shape = self.shape
        extent = {
            "s": slots,
            "k": shape.kv,
            "l": shape.layers,
            "t": shape.page_size,
            "h": shape.heads // self.head_groups,
            "d": shape.head_dim,
        }
        strides: dict[str, int] = {}
        step = 1
        for axis in reversed(_AXES[self.order]):
            strides[axis] = step
            step *= extent[axis]
        if self.in_place:
            strides["s"] = self.slot_bytes // shape.item_bytes
        return strides

    def describe(self, slots: int) -> str:
        return (
            f"{slots:,} slots of {self.shape.page_size:,} tokens = {slots * self.shape.page_size:,} tokens, "
            f"{format_bytes(slots * self.slot_bytes)} ({self.order}; a slot is {self.slot_bytes:,} bytes: "
            f"{self.slot_header_bytes:,} header, {self.payload_bytes:,} KV, {self.padding_bytes:,} padding)"
        )
