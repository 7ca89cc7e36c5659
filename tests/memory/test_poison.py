"""Pages that nobody owns hold poison; those of others are left alone."""

from __future__ import annotations

import pytest
import torch

from hicache_actors import ConfigError, HiCache
from hicache_actors.core.pool import Pool
from hicache_actors.core.words import pack_slots, unpack_slots
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.layout import Order
from hicache_actors.memory.poison import POISON, poison
from hicache_actors.testing.kv_samples import LAYERS, ORDERS, SLOTS, as_bytes, engine_tensors, host_memory, slot_bytes
from hicache_actors.testing.small import SHAPE, open_small, prompt, small_config


@pytest.mark.parametrize("order", ORDERS)
def test_each_byte_of_a_page_and_no_other(order: Order) -> None:
    host = host_memory(engine_tensors("contiguous"), order)
    before = [slot_bytes(host, slot) for slot in range(SLOTS)]
    poison(host, pack_slots([1, 4]))
    poison(host, b"")
    for slot in range(SLOTS):
        if slot in (1, 4):
            for layer in range(LAYERS):
                assert {byte for tensor in host.layer(layer) for byte in as_bytes(tensor[slot])} == {POISON}
        else:
            assert slot_bytes(host, slot) == before[slot]


def test_a_pool_tells_of_each_slot_that_becomes_free_once() -> None:
    pool = Pool("device", 6)
    freed: list[list[int]] = []
    pool.on_free = lambda slots: freed.append(unpack_slots(slots))
    held = pool.take(5)
    pool.give(pack_slots([1, 3]))
    pool.keep_only([pack_slots([0, 4])])
    assert unpack_slots(held) == [0, 1, 2, 3, 4]
    assert freed == [[1, 3], [2]]


@pytest.mark.parametrize("anyio_backend", ["virtual:1", "asyncio"], indirect=True)
async def test_a_cache_poisons_what_it_takes_back(anyio_backend: object) -> None:
    async with open_small() as small:
        lease = small.cache.lease(prompt(0), "r")
        lease.allocate(8)
        pages = list(lease.pages)
        small.cache.kv.layer(0)[0][pages] = 1.0
        lease.release()
        await small.cache.pipelines.idle()
        for layer in range(SHAPE.layers):
            for tensor in small.cache.kv.layer(layer):
                assert set(as_bytes(tensor[pages])) == {POISON}
        first = await small.engine.answer(prompt(4))
        assert (await small.engine.answer(prompt(4))).tokens == first.tokens


async def test_a_device_out_of_reach_is_refused() -> None:
    kv = KVTensors.make(SHAPE, 4)
    kv.device = torch.device("cuda:0")
    with pytest.raises(ConfigError, match="poison_freed"):
        async with HiCache.open(small_config(), kv):
            pytest.fail("it was opened")
