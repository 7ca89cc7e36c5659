from __future__ import annotations

import gc
import weakref

import pytest
import torch

from hicache_actors.core.words import pack_slots
from hicache_actors.cuda_ext.native.hostmem import host_memory_calls
from hicache_actors.errors import ConfigError, StoppedError, UsageError
from hicache_actors.memory import host as host_module
from hicache_actors.memory.host import MAGIC_BYTES, HostMemory
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.shapes import KVShape

SHAPE = KVShape(layers=3, kv=2, heads=2, head_dim=8, dtype="bfloat16", page_size=4)


def test_slots_are_aligned_runs_of_one_mapping() -> None:
    host = HostMemory(SlotLayout(SHAPE), 5)
    assert host.nbytes == 5 * host.layout.slot_bytes
    assert "20 tokens" in host.describe()
    for slot in range(5):
        assert len(host.object(slot)) == host.layout.object_bytes
        assert len(host.header(slot)) == 4096
        assert len(host.payload(slot)) == SHAPE.page_bytes
        assert host.layer(0)[0][slot].data_ptr() % 4096 == 0
    assert host.object(0).contiguous
    assert not host.object(0).readonly


def test_views_and_memoryviews_are_the_same_bytes() -> None:
    host = HostMemory(SlotLayout(SHAPE, header_bytes=0), 5)
    host.layer(2)[1][3].fill_(1.0)
    half = SHAPE.page_bytes // 2
    run = SHAPE.page_bytes // 6
    assert bytes(host.payload(3)) == bytes(half + 2 * run) + b"\x80\x3f" * (run // 2)
    host.payload(3)[:run] = bytes(range(256))[:run]
    assert host.layer(0)[0][3].contiguous().view(torch.uint8).flatten().tolist() == list(range(256))[:run]
    assert bytes(host.object(2)) == bytes(host.layout.object_bytes)
    assert len(host.header(2)) == 0


@pytest.mark.parametrize("shape", [SHAPE, KVShape(3, 1, 1, 8, "float32", 4)], ids=["mha", "mla"])
def test_under_layer_first_each_layer_is_one_run_over_all_slots(shape: KVShape) -> None:
    host = HostMemory(SlotLayout(shape, "layer_first"), 5)
    assert host.nbytes == 5 * shape.page_bytes
    assert host._mapping is not None
    row_bytes = shape.layer_page_bytes // shape.kv
    value = 0
    for layer in range(shape.layers):
        for tensor in host.layer(layer):
            for slot in range(5):
                value += 1
                tensor[slot].view(torch.uint8).fill_(value)
    rows = [bytes([value]) * row_bytes for value in range(1, 5 * shape.layers * shape.kv + 1)]
    assert host._mapping[: host.nbytes] == b"".join(rows)


def test_under_layer_first_a_page_is_no_run() -> None:
    host = HostMemory(SlotLayout(SHAPE, "layer_first"), 5)
    for use in (host.object, host.header, host.payload):
        with pytest.raises(UsageError, match="layer_first"):
            use(0)
    host.layer(0)[0].fill_(1.0)
    host.clear_headers(pack_slots([0, 0, 3]))  # there are none
    assert bool((host.layer(0)[0] == 1.0).all())
    del use
    assert host.close()
    with pytest.raises(StoppedError):
        host.object(0)
    with pytest.raises(StoppedError):
        host.clear_headers(pack_slots([0]))


def test_slots_outside_are_refused() -> None:
    host = HostMemory(SlotLayout(SHAPE), 5)
    for slot in (5, -1):
        with pytest.raises(IndexError, match="of 5"):
            host.object(slot)
    with pytest.raises(ConfigError, match=r"host\.pages"):
        HostMemory(SlotLayout(SHAPE), 0)


@pytest.mark.parametrize("slots", [2**40, 2**60])
def test_memory_that_cannot_be_mapped_is_refused_with_the_fix(slots: int) -> None:
    with pytest.raises(ConfigError, match="could not be mapped") as caught:
        HostMemory(SlotLayout(SHAPE), slots)
    assert "lower host.pages" in str(caught.value)


def test_close_unmaps() -> None:
    host = HostMemory(SlotLayout(SHAPE), 5)
    assert host.close()
    assert host.close()
    for use in (lambda: host.object(0), lambda: host.layer(0), lambda: host.raw(0)):
        with pytest.raises(StoppedError):
            use()


def test_views_that_somebody_holds_keep_it_mapped() -> None:
    host = HostMemory(SlotLayout(SHAPE), 5)
    run, tensor = host.payload(1), host.layer(0)[0]
    assert not host.close()
    tensor[1].fill_(1.0)  # a late write lands where it always did
    assert bytes(run[0:2]) == b"\x80\x3f"


def test_what_must_stay_mapped_is_counted() -> None:
    before = HostMemory.mapped()
    host = HostMemory(SlotLayout(SHAPE), 5)
    nbytes = host.nbytes
    assert not host.close(keep_mapped=True)
    after = HostMemory.mapped()
    assert after["kept_mappings"] == before["kept_mappings"] + 1
    assert after["kept_bytes"] == before["kept_bytes"] + nbytes
    host_module._KEPT.pop()


def test_memory_made_in_inference_mode_is_writable_outside() -> None:
    with torch.inference_mode():
        host = HostMemory(SlotLayout(SHAPE), 5)
    host.layer(0)[0].fill_(2.0)
    assert host.layer(0)[0].sum() == 2 * 5 * 4 * 2 * 8


def test_a_dropped_pool_leaves_no_mapping() -> None:
    host = HostMemory(SlotLayout(SHAPE), 5)
    assert host._mapping is not None
    mapping = weakref.ref(host._mapping)
    del host
    gc.collect()
    assert mapping() is None


def test_headers_are_cleared_when_slots_are_given_again() -> None:
    host = HostMemory(SlotLayout(SHAPE), 3)
    slots = pack_slots([2, 0])
    host.clear_headers(slots)
    for slot in range(3):
        host.header(slot)[:MAGIC_BYTES] = b"x" * MAGIC_BYTES
    host.clear_headers(slots)
    magic = [bytes(host.header(slot)[:MAGIC_BYTES]) for slot in range(3)]
    assert magic == [bytes(MAGIC_BYTES), b"x" * MAGIC_BYTES, bytes(MAGIC_BYTES)]


def test_the_headers_of_all_chunks_are_cleared_and_each_is_an_object() -> None:
    shape = KVShape(layers=3, kv=2, heads=4, head_dim=8, dtype="bfloat16", page_size=4)
    host = HostMemory(SlotLayout(shape, "page_unified", 4096, head_group=2, layer_partition=2), 3)
    host.clear_headers(pack_slots([1, 2]))
    for slot in (1, 2):
        assert [len(run) for run in host.objects(slot)] == [end - start for start, end in host.layout.chunk_spans]
        for run in host.objects(slot):
            run[:MAGIC_BYTES] = b"x" * MAGIC_BYTES
    host.clear_headers(pack_slots([1]))
    assert [bytes(run[:MAGIC_BYTES]) for run in host.objects(1)] == [bytes(MAGIC_BYTES)] * 4
    assert [bytes(run[:MAGIC_BYTES]) for run in host.objects(2)] == [b"x" * MAGIC_BYTES] * 4
    assert b"".join(map(bytes, host.objects(2))) == bytes(host.object(2))
    assert [tensor.shape for tensor in host.layer(2)] == [(3, 4, 2, 8)] * 4, "K of each group, then V"


@pytest.mark.skipif(host_memory_calls() is None, reason="the native library is not in use here")
def test_memory_is_touched_ahead() -> None:
    host = HostMemory(SlotLayout(SHAPE), 500)
    assert host.touched_bytes is None
    host.payload(7)[:5] = b"given"
    assert host.touch_ahead(2)
    assert not host.touch_ahead(2)  # once is enough
    host.wait_touched()
    assert host.touched_bytes == host.nbytes
    assert host.payload(7)[:5] == b"given"
    assert host.close()
    assert host.touched_bytes == 500 * host.layout.slot_bytes


@pytest.mark.skipif(host_memory_calls() is None, reason="the native library is not in use here")
def test_memory_that_is_forgotten_stops_being_touched() -> None:
    host = HostMemory(SlotLayout(SHAPE), 20_000)
    assert host.touch_ahead(1)
    assert host._touching is not None
    touching = host._touching
    del host
    gc.collect()
    assert touching._handle is None


def test_without_the_library_memory_is_touched_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "host_memory_calls", lambda: None)
    host = HostMemory(SlotLayout(SHAPE), 5)
    assert not host.touch_ahead(2)
    host.wait_touched()
    assert host.touched_bytes is None
    with pytest.raises(OSError, match="native library"):
        host.bind(0)
