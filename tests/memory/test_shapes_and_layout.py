from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hicache_actors.errors import ConfigError
from hicache_actors.memory.layout import Order, SlotLayout
from hicache_actors.memory.shapes import KVShape, format_bytes

SMOL = KVShape(layers=30, kv=2, heads=3, head_dim=64, dtype="bfloat16", page_size=64)


def test_a_page_in_bytes() -> None:
    assert SMOL.token_bytes == 30 * 2 * 3 * 64 * 2
    assert SMOL.page_bytes == 64 * SMOL.token_bytes == 30 * SMOL.layer_page_bytes
    mla = KVShape(layers=61, kv=1, heads=1, head_dim=576, dtype="float8_e4m3fn", page_size=64)
    assert mla.page_bytes == 61 * 576 * 64


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": 0}, "shape.layers"),
        ({"heads": -1}, "shape.heads"),
        ({"head_dim": 64.0}, "shape.head_dim"),
        ({"page_size": True}, "shape.page_size"),
        ({"kv": 3}, "shape.kv"),
        ({"kv": 1}, "shape.heads"),
        ({"dtype": "bf16"}, "shape.dtype"),
    ],
)
def test_nonsense_is_refused(change: dict[str, Any], field: str) -> None:
    good: dict[str, Any] = {"layers": 2, "kv": 2, "heads": 3, "head_dim": 4, "dtype": "float32", "page_size": 16}
    with pytest.raises(ConfigError) as caught:
        KVShape(**(good | change))
    assert caught.value.field == field
    assert caught.value.allowed


def test_a_slot_is_header_payload_and_padding() -> None:
    layout = SlotLayout(SMOL)
    assert (layout.order, layout.header_bytes) == ("page_first_direct", 4096)
    assert layout.object_bytes == 4096 + SMOL.page_bytes
    small = SlotLayout(KVShape(1, 2, 1, 3, "uint8", 7))
    assert (small.payload_bytes, small.object_bytes, small.slot_bytes) == (42, 4138, 8192)
    raw = SlotLayout(SMOL, "page_first", 0)
    assert raw.object_bytes == raw.slot_bytes == SMOL.page_bytes


def test_strides_follow_the_order() -> None:
    shape = KVShape(layers=5, kv=2, heads=3, head_dim=4, dtype="float16", page_size=8)
    slot = {"s": (4096 + 2 * 960 + 2176) // 2}
    assert SlotLayout(shape, "page_first").strides(7) == {"d": 1, "h": 4, "l": 12, "t": 60, "k": 480} | slot
    assert SlotLayout(shape, "page_first_direct").strides(7) == {"d": 1, "h": 4, "t": 12, "l": 96, "k": 480} | slot
    assert SlotLayout(shape, "page_head").strides(7) == {"d": 1, "l": 4, "t": 20, "h": 160, "k": 480} | slot
    layer_first = SlotLayout(shape, "layer_first").strides(7)
    assert layer_first == {"d": 1, "h": 4, "t": 12, "s": 96, "k": 7 * 96, "l": 2 * 7 * 96}


@pytest.mark.parametrize("header_bytes", [0, 4096])
def test_under_layer_first_pages_are_no_runs_and_become_objects_elsewhere(header_bytes: int) -> None:
    layout = SlotLayout(SMOL, "layer_first", header_bytes)
    assert not layout.in_place
    assert (layout.slot_bytes, layout.slot_header_bytes, layout.padding_bytes) == (SMOL.page_bytes, 0, 0)
    assert layout.object_layout == SlotLayout(SMOL, "page_first_direct", header_bytes)
    assert layout.object_bytes == layout.object_layout.object_bytes == header_bytes + SMOL.page_bytes


@pytest.mark.parametrize("order", ["page_first_direct", "page_first", "page_head"])
def test_other_layouts_keep_objects_in_their_slots(order: Order) -> None:
    layout = SlotLayout(SMOL, order)
    assert layout.in_place
    assert layout.object_layout is layout


def test_a_latent_has_no_heads_to_put_first() -> None:
    with pytest.raises(ConfigError, match="MLA has no heads") as caught:
        SlotLayout(KVShape(61, 1, 1, 576, "bfloat16", 64), "page_head")
    assert caught.value.field == "host.layout"


@pytest.mark.parametrize(
    ("order", "header_bytes", "field"), [("token_first", 0, "host.layout"), ("page_first", 512, "host.header_bytes")]
)
def test_unknown_layouts_are_refused(order: Any, header_bytes: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SlotLayout(SMOL, order, header_bytes)
    assert caught.value.field == field


def test_descriptions_speak_of_tokens_and_bytes() -> None:
    text = SlotLayout(SMOL).describe(100)
    assert "6,400 tokens" in text
    assert "147.87 MB" in text
    assert "page_first_direct" in text
    assert "23,040 bytes a token" in SMOL.describe()
    assert [format_bytes(count) for count in (12, 1_500, 10**10)] == ["12 bytes", "1.50 kB", "10.00 GB"]


def test_a_page_of_several_chunks_has_a_header_for_each() -> None:
    shape = KVShape(layers=5, kv=2, heads=4, head_dim=3, dtype="float16", page_size=8)
    layout = SlotLayout(shape, "page_unified", 4096, head_group=2, layer_partition=2)
    part = 2 * 8 * 2 * 3 * 2  # K and V, tokens, heads of a group, dimensions, bytes: one layer
    row = [4096 + layers * part for layers in (2, 2, 1)]
    lengths = [end - start for start, end in layout.chunk_spans]
    assert lengths == [*row, *row]
    assert [start for start, _ in layout.chunk_spans[1:]] == [end for _, end in layout.chunk_spans[:-1]]
    assert layout.object_bytes == sum(lengths) == layout.chunk_spans[-1][1]
    assert layout.slot_header_bytes == 6 * 4096
    assert layout.slot_bytes == -(-layout.object_bytes // 4096) * 4096
    assert layout.head_groups == 2
    strides = layout.strides(10)
    assert layout.first_element(3, 1, 1, strides) * 2 == sum(row) + row[0] + 4096 + part + part // 2


def test_chunks_need_their_order_and_whole_groups() -> None:
    makers: tuple[tuple[Callable[[], SlotLayout], str], ...] = (
        (lambda: SlotLayout(SMOL, "page_first", head_group=1), "layout.head_group"),
        (lambda: SlotLayout(SMOL, "page_unified", head_group=2), "layout.head_group"),
        (lambda: SlotLayout(SMOL, "page_unified", layer_partition=-1), "layout.layer_partition"),
    )
    for make, field in makers:
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.field == field


def test_one_chunk_is_the_default_and_its_bytes_go_layer_by_layer() -> None:
    layout = SlotLayout(SMOL, "page_unified")
    assert layout.chunk_spans == ((0, layout.object_bytes),)
    assert layout.object_bytes == 4096 + SMOL.page_bytes
