"""What an opening cache tells the other ranks about itself, and what only works on one rank."""

from __future__ import annotations

import msgspec

from hicache_actors.config import Config
from hicache_actors.core.config import SlotOwner
from hicache_actors.errors import ConfigError
from hicache_actors.memory.shapes import KVShape
from hicache_actors.ranks.group import RankGroup
from hicache_actors.ranks.start import Fact


def facts_of(config: Config, shape: KVShape, slots: SlotOwner, *, storage: bool, enabled: bool) -> dict[str, Fact]:
    """Settings that Core decides by, and those that make stored bytes fit together.

    Layers and heads of a rank are its own affair: pipeline stages may differ.
    """
    return {
        "page_size": config.page_size,
        "write_policy": config.write_policy,
        "eviction": config.eviction,
        **{f"policy.{name}": value for name, value in msgspec.structs.asdict(config.policy).items()},
        "slots": slots,
        "enabled": enabled,
        "storage.url": storage,
        "storage.tp_lcm_size": config.storage.tp_lcm_size,
        "storage.head_group": config.storage.head_group,
        "storage.layer_partition": config.storage.layer_partition,
        "storage.store_on": config.storage.store_on,
        "storage.store_water_mark": config.storage.store_water_mark,
        "storage.gather_s": config.storage.gather_s,
        "storage.prefetch_threshold_tokens": config.storage.prefetch_threshold_tokens,
        "storage.prefetch_policy": config.storage.prefetch_policy,
        "storage.keys": config.storage.keys,
        "model.model_id": config.model.model_id,
        "model.weights": config.model.weights,
        "model.total_kv_heads": config.model.total_kv_heads,
        "shape.kv": shape.kv,
        "shape.dtype": shape.dtype,
        "host.layout": config.host.layout,
        "host.header_bytes": config.host.header_bytes,
        "close_timeout_s": config.close_timeout_s,
    }


def check_ranks(config: Config, group: RankGroup, *, steps: bool) -> None:
    """Raises `ConfigError` for what more than one rank cannot have."""
    if not steps:
        raise ConfigError(
            "driver",
            "auto",
            f"{group.size} ranks agree once per step",
            allowed=("step",),
            fix="open it with driver='step'",
        )
    if config.shadow:
        raise ConfigError("shadow", True, "works on one rank", allowed="False", fix="switch it off")
    load_s = config.deadlines.load_s
    if load_s is not None and load_s >= group.deadline_s:
        raise ConfigError(
            "deadlines.load_s",
            load_s,
            f"ranks.deadline_s is {group.deadline_s} s: a forward pass may wait so long, and the others would give this rank up",
            allowed=f"less than {group.deadline_s} s",
            fix="leave it out, or raise ranks.deadline_s",
        )
