"""Which names the objects of one rank get, and how its host slots are cut for them: from a configuration, a shape and a rank."""

from __future__ import annotations

from hicache_actors.config import Config
from hicache_actors.errors import ConfigError
from hicache_actors.keys.namespace import SINGLE_RANK, Namespace, Rank
from hicache_actors.keys.raw import RawKeys
from hicache_actors.keys.scheme import KeyScheme, SuffixKeys
from hicache_actors.keys.unified import Shard, UnifiedKeys, head_group_of
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.shapes import KVShape


def layout_of(config: Config, shape: KVShape, rank: Rank = SINGLE_RANK) -> SlotLayout:
    """Of the host slots.  Raises `ConfigError`."""
    host = config.host
    if config.storage.keys != "unified":
        return SlotLayout(shape, host.layout, host.header_bytes)
    return SlotLayout(
        shape, host.layout, host.header_bytes, _head_group(config, shape, rank), _partition(config, shape)
    )


def keys_of(config: Config, shape: KVShape, rank: Rank = SINGLE_RANK) -> KeyScheme:
    """Of the objects.  ``config`` is fit for a store (`Config.check_storage`).  Raises `ConfigError`."""
    unified = config.storage.keys == "unified"
    namespace = Namespace(
        model_id=config.model.model_id or "",
        weights=config.model.weights or "",
        dtype=shape.dtype,
        page_size=shape.page_size,
        layout=layout_of(config, shape, rank).object_layout.order,
        total_kv_heads=_total_heads(config, shape, rank),
        head_group=_head_group(config, shape, rank) if unified else shape.heads,
        layer_partition=_partition(config, shape) if unified else shape.layers,
        replicated=shape.kv == 1,
    )
    if unified:
        return UnifiedKeys(namespace, Shard(_first_layer(config, rank), shape.layers, shape.heads), rank)
    return RawKeys(namespace, rank) if config.storage.keys == "raw" else SuffixKeys(namespace, rank)


def _total_heads(config: Config, shape: KVShape, rank: Rank) -> int:
    return config.model.total_kv_heads or (1 if shape.kv == 1 else shape.heads * rank.tp_size)


def _head_group(config: Config, shape: KVShape, rank: Rank) -> int:
    storage = config.storage
    if shape.kv == 1:
        for name in ("head_group", "tp_lcm_size"):
            if getattr(storage, name) is not None:
                raise ConfigError(
                    f"storage.{name}", getattr(storage, name), "MLA has no KV heads to group", allowed="not given",
                    fix="leave it out: any tensor-parallel size shares",
                )  # fmt: skip
        return 1
    total = _total_heads(config, shape, rank)
    return head_group_of(total, rank, shape.heads, storage.head_group, storage.tp_lcm_size)


def _partition(config: Config, shape: KVShape) -> int:
    return config.storage.layer_partition or shape.layers


def _first_layer(config: Config, rank: Rank) -> int:
    first = config.model.first_layer
    if first is None and rank.pp_size > 1:
        raise ConfigError(
            "model.first_layer", None, f"missing: this is stage {rank.pp_rank} of {rank.pp_size}, and keys are unified",
            allowed="the number of the first layer of this stage, counted over the model", fix="set it on each rank",
        )  # fmt: skip
    return first or 0
