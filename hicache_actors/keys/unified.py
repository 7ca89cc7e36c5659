"""Unified keys: names that do not depend on how a deployment divides the model among its ranks.

A page is cut along the model, not along the ranks: a chunk is a range of layers times a group of KV heads.  Each rank stores the
chunks that it holds, under the same names and with the same bytes as any other deployment that cuts alike::

    {page hash}_hku1-{namespace digest}_L{a}-{b}_H{g}      layers [a, b), group g of the model's KV heads
    {page hash}_hku1-{namespace digest}_L{a}-{b}           MLA: there are no heads

Layers and groups are counted over the whole model.  Within a chunk: layer > K/V > token > head > dimension; within a host slot the
chunks stand head group > layer range (`hicache_actors.memory.layout`, order ``page_unified``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec.structs import replace

from hicache_actors.errors import ConfigError
from hicache_actors.keys.namespace import SINGLE_RANK, Namespace, Rank

VERSION_PREFIX: Final = "hku1-"
UNIFIED_LAYOUT: Final = "page_unified"


class Shard(msgspec.Struct, frozen=True):
    """What one rank holds: layers [first_layer, first_layer + layers) of the model, and ``heads`` KV heads of it (1 for MLA)."""

    first_layer: int
    layers: int
    heads: int


class UnifiedKeys:
    """``namespace`` says how the model is cut (``head_group``, ``layer_partition``), ``shard`` and ``rank`` which part is here.

    Raises `ConfigError` for a shard that is no whole number of chunks.
    """

    def __init__(self, namespace: Namespace, shard: Shard, rank: Rank = SINGLE_RANK) -> None:
        self.namespace, self.shard, self.rank = namespace, shard, rank
        self.namespace_digest = namespace.digest
        self.leads = not (rank.tp_rank or rank.pp_rank or rank.cp_rank)
        self.tells_weights = True
        copies = _copies(namespace, shard, rank)
        self.writes = rank.tp_rank % copies == 0
        groups = range(1)
        if not namespace.replicated:
            count = shard.heads // namespace.head_group
            groups = range(rank.tp_rank // copies * count, (rank.tp_rank // copies + 1) * count)
        ranges = _layer_ranges(namespace, shard, rank)
        places = [(layers, group) for group in groups for layers in ranges]
        self.chunks = tuple(layers.start | layers.stop << 16 | group << 32 for layers, group in places)
        head = f"_{VERSION_PREFIX}{self.namespace_digest.hex()}"
        self._suffixes = tuple(
            f"{head}_L{layers.start}-{layers.stop}" + ("" if namespace.replicated else f"_H{group}")
            for layers, group in places
        )

    def keys(self, page_hashes: Iterable[bytes]) -> list[str]:
        return [name + suffix for name in (page.hex() for page in page_hashes) for suffix in self._suffixes]

    def with_weights(self, weights: str) -> UnifiedKeys:
        return UnifiedKeys(replace(self.namespace, weights=weights), self.shard, self.rank)

    def shared_with(self) -> str:
        namespace = self.namespace
        whole = namespace.layer_partition == self.shard.layers
        layers = f"{namespace.layer_partition} layers"
        text = f"unified keys, objects of {layers}"
        if not namespace.replicated:
            text += f" x {namespace.head_group} KV heads"
        text += ": shared with every deployment of the same model, weights, dtype and page size that cuts alike, whose "
        text += f"pipeline stages begin at multiples of {layers}"
        if whole and self.rank.pp_size == 1:
            text += (
                " (that is, without pipeline stages: set storage.layer_partition to share with those that have some)"
            )
        if not namespace.replicated:
            most = namespace.total_kv_heads // namespace.head_group
            text += f", at any tensor-parallel size that divides {most}"
            if namespace.head_group == self.shard.heads and self.rank.tp_size < namespace.total_kv_heads:
                text += " (not above this one: set storage.tp_lcm_size to share with larger ones)"
        return text


def head_group_of(total_kv_heads: int, rank: Rank, heads: int, head_group: int | None, tp_lcm_size: int | None) -> int:
    """KV heads in one object, by what was asked for.

    ``head_group`` itself, or ``total_kv_heads / tp_lcm_size``, where ``tp_lcm_size`` is the least common multiple of the
    tensor-parallel sizes of all that shall share; with neither, the ``heads`` of this rank.  Raises `ConfigError`.
    """
    if head_group is not None and tp_lcm_size is not None:
        raise ConfigError(
            "storage.head_group", head_group, f"storage.tp_lcm_size = {tp_lcm_size} was given as well",
            fix="give one of them",
        )  # fmt: skip
    if tp_lcm_size is not None:
        if total_kv_heads % tp_lcm_size:
            raise ConfigError(
                "storage.tp_lcm_size", tp_lcm_size, f"does not divide the model's {total_kv_heads} KV heads",
                allowed=[str(n) for n in range(1, total_kv_heads + 1) if total_kv_heads % n == 0],
                fix="take the least common multiple of the TP sizes that shall share; with more TP ranks than KV heads set "
                "storage.head_group instead",
            )  # fmt: skip
        if tp_lcm_size % rank.tp_size:
            raise ConfigError(
                "storage.tp_lcm_size", tp_lcm_size, f"is no multiple of this deployment's tp_size = {rank.tp_size}",
                allowed=f"multiples of {rank.tp_size} that divide {total_kv_heads}", fix="take the least common multiple",
            )  # fmt: skip
        return total_kv_heads // tp_lcm_size
    if head_group is None and rank.tp_size > total_kv_heads:
        raise ConfigError(
            "storage.head_group", None,
            f"missing: {rank.tp_size} tensor-parallel ranks share {total_kv_heads} KV heads, so several ranks hold the same",
            allowed="1", fix="set storage.head_group = 1: then one rank of each head writes",
        )  # fmt: skip
    return head_group or heads


def _copies(namespace: Namespace, shard: Shard, rank: Rank) -> int:
    """How many tensor-parallel ranks hold the very same heads; neighbours do."""
    if rank.cp_size > 1:
        raise ConfigError(
            "storage.keys", "unified", f"context ranks (cp_size = {rank.cp_size}) hold parts of a page",
            allowed="'suffix' with context parallelism", fix="set storage.keys = 'suffix'",
        )  # fmt: skip
    if namespace.replicated:
        return rank.tp_size
    total = namespace.total_kv_heads
    if rank.tp_size * shard.heads < total or (rank.tp_size * shard.heads) % total:
        raise ConfigError(
            "model.total_kv_heads", total,
            f"{rank.tp_size} tensor-parallel ranks of {shard.heads} KV heads are {rank.tp_size * shard.heads}",
            allowed="their product, or a divisor of it where each rank holds one head",
            fix="take num_key_value_heads of the model's config",
        )  # fmt: skip
    copies = rank.tp_size * shard.heads // total
    if copies > 1 and shard.heads > 1:
        raise ConfigError(
            "model.total_kv_heads", total,
            f"{rank.tp_size} ranks of {shard.heads} KV heads hold some of them {copies} times",
            allowed="ranks with one KV head each, where there are more ranks than heads",
        )  # fmt: skip
    if shard.heads % namespace.head_group:
        raise ConfigError(
            "namespace.head_group", namespace.head_group, f"does not divide this rank's {shard.heads} KV heads",
            allowed=f"a divisor of {shard.heads}", fix="raise storage.tp_lcm_size, or lower storage.head_group",
        )  # fmt: skip
    return copies


def _layer_ranges(namespace: Namespace, shard: Shard, rank: Rank) -> list[range]:
    """The layer ranges of this rank's chunks.  Only the model's last one may be short."""
    part, first, end = namespace.layer_partition, shard.first_layer, shard.first_layer + shard.layers
    last = rank.pp_rank == rank.pp_size - 1
    if first % part or (end % part and not last):
        raise ConfigError(
            "storage.layer_partition", part, f"stage {rank.pp_rank} of {rank.pp_size} holds layers [{first}, {end})",
            allowed="a number of layers that divides the first layer of every pipeline stage",
            fix="lower it, e.g. to the greatest common divisor of the stages' first layers",
        )  # fmt: skip
    if end >= 2**16:
        raise ConfigError("model.first_layer", first, f"the stage would end at layer {end}", allowed="below 65536")
    return [range(at, min(at + part, end)) for at in range(first, end, part)]
