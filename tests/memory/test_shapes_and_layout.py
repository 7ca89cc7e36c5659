from __future__ import annotations

from typing import Any

import pytest

from hicache_actors.errors import ConfigError
from hicache_actors.memory.layout import SlotLayout
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
    assert SlotLayout(shape, "page_first").strides() == {"d": 1, "h": 4, "l": 12, "t": 60, "k": 480}
    assert SlotLayout(shape, "page_first_direct").strides() == {"d": 1, "h": 4, "t": 12, "l": 96, "k": 480}


@pytest.mark.parametrize(
    ("order", "header_bytes", "field"), [("layer_first", 0, "host.layout"), ("page_first", 512, "host.header_bytes")]
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
