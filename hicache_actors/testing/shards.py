"""Ranks of a deployment as far as their bytes go: device tensors that are a slice of a model's, host slots, and a store.

For tests of what deployments share: no Core and no requests, but real copies, real objects and a real backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from hicache_actors.backends.backend import Stored
from hicache_actors.backends.registry import open_backend
from hicache_actors.cache.key_choice import keys_of, layout_of
from hicache_actors.config import Config, HostConfig, ModelFacts, StorageConfig
from hicache_actors.core.words import SLOT_BYTES, pack_slots
from hicache_actors.keys.namespace import Rank
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.kv import KVTensors
from hicache_actors.runtime import Workers, bind_log
from hicache_actors.tiers.host import HostTier
from hicache_actors.tiers.storage import Source, Store, StoreThreads
from hicache_actors.transfer.plan import CopyPlan

LAYERS, HEADS, PAGE, HEAD_DIM, PAGES = 7, 8, 4, 8, 5
HASHES = [bytes([number + 1]) * 32 for number in range(PAGES)]


def whole_model(*, mla: bool = False, seed: int = 1) -> list[tuple[torch.Tensor, ...]]:
    """K and V of all layers and heads, or MLA's latents, with every bit pattern there is."""
    random = torch.Generator().manual_seed(seed)
    heads = 1 if mla else HEADS
    size = (PAGES, PAGE, heads, HEAD_DIM)

    def tensor() -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, size, generator=random, dtype=torch.int16).view(torch.bfloat16)

    return [tuple(tensor() for _ in range(1 if mla else 2)) for _ in range(LAYERS)]


class Shard:
    """One rank: layers and heads of the model in the first device pages, host slots, and a store."""

    def __init__(
        self, model: list[tuple[torch.Tensor, ...]], rank: Rank, first: int, layers: int, url: str, **keys: Any
    ):
        self.rank, self.mla = rank, len(model[0]) == 1
        share = HEADS if self.mla else max(1, HEADS // rank.tp_size)
        copies = max(1, rank.tp_size // HEADS)
        at = 0 if self.mla else rank.tp_rank // copies * share
        self.slices = [
            tuple(tensor[:, :, at : at + share].clone() for tensor in tensors)
            for tensors in model[first : first + layers]
        ]
        self.kv = self._tensors([tuple(torch.zeros_like(tensor) for tensor in tensors) for tensors in self.slices])
        limits = StorageConfig(**{"keys": "unified", "layer_partition": 2, **keys})
        config = Config(
            page_size=PAGE,
            model=ModelFacts(model_id="m", weights="v1", first_layer=first, total_kv_heads=1 if self.mla else HEADS),
            host=HostConfig(layout="page_unified" if limits.keys == "unified" else "page_first_direct"),
            storage=limits,
        )
        self.memory = HostMemory(layout_of(config, self.kv.shape, rank), PAGES + 2)
        self.slots = pack_slots(range(PAGES, 0, -1))
        self.threads = StoreThreads({"query": 2, "read": 2, "write": 2})
        self.workers = Workers("hash", 1)
        source = Source(url, open_backend(url, self.threads), keys_of(config, self.kv.shape, rank), self.threads)
        self.store = Store(source, limits, HostTier(self.memory), None, self.workers, lambda _: None, bind_log())

    def _tensors(self, layers: list[tuple[torch.Tensor, ...]]) -> KVTensors:
        if self.mla:
            return KVTensors.from_mla([latent.squeeze(2) for (latent,) in layers])
        return KVTensors.from_tensors([keys for keys, _ in layers], [values for _, values in layers])

    @property
    def objects(self) -> int:
        """That this rank stores."""
        return PAGES * len(self.store.keys.chunks)

    async def save(self) -> Sequence[Stored]:
        """Compute, copy to the host, seal, store -> what became of each page; nothing where another rank stores the same."""
        for here, there in zip(self.slices, (self.kv.layer(at) for at in range(len(self.slices))), strict=True):
            for tensor, pool in zip(here, there, strict=True):
                pool.copy_(tensor)
        kv = self.kv.by_head_groups(self.memory.layout.head_groups)
        CopyPlan(kv, pack_slots(range(PAGES)), self.memory, self.slots).work().run()
        await self.store.open(10.0)
        if not self.store.keys.writes:
            return ()
        assert await self.store.seal(HASHES, self.slots).answer()
        return await self.store.write(HASHES, self.slots, lambda: True).answer()

    async def hit(self) -> int:
        """Pages that are stored for this rank."""
        await self.store.open(10.0)
        return await self.store.query(HASHES).answer()

    async def load(self) -> int:
        """Look up, read, verify, copy to the device -> pages that have come; AssertionError if a bit of them is not the model's."""
        await self.store.open(10.0)
        pages = await self.store.query(HASHES).answer()
        pages = await self.store.read(HASHES[:pages], self.slots[: SLOT_BYTES * pages], lambda: True).answer()
        kv = self.kv.by_head_groups(self.memory.layout.head_groups)
        CopyPlan(self.memory, self.slots[: SLOT_BYTES * pages], kv, pack_slots(range(pages))).work().run()
        found = [tensor for at in range(len(self.slices)) for tensor in self.kv.layer(at)]
        right = [tensor for tensors in self.slices for tensor in tensors]
        for a, b in zip(found, right, strict=True):
            assert torch.equal(a[:pages].view(torch.int16), b[:pages].view(torch.int16))
        return pages

    async def close(self) -> None:
        """Let everything go."""
        await self.store.close(10.0)
        await self.workers.aclose(10.0)
        del self.kv
        self.memory.close()


def deployment(
    model: list[tuple[torch.Tensor, ...]], tp_size: int, stages: tuple[int, ...], folder: Path, **keys: Any
) -> list[Shard]:
    """All ranks of one whose pipeline ``stages`` have so many layers, on a folder; ``keys``: settings of the storage."""
    firsts = [0, *accumulate(stages)][:-1]
    return [
        Shard(
            model,
            Rank(tp_rank=tp, tp_size=tp_size, pp_rank=pp, pp_size=len(stages)),
            first,
            layers,
            f"file://{folder}",
            **keys,
        )
        for pp, (first, layers) in enumerate(zip(firsts, stages, strict=True))
        for tp in range(tp_size)
    ]


def files(folder: Path) -> set[str]:
    """Names of the stored objects."""
    return {file.name for file in folder.glob("objects/*/*.kv")}


async def close(shards: list[Shard]) -> None:
    """Let them all go."""
    await asyncio.gather(*(shard.close() for shard in shards))
