"""Where the KV of a step comes from and goes to: the paged device pool, as a transformers cache.

Attention reads pages: for each layer the pages of all sequences are gathered into one buffer, which all layers and steps share.
A page is one run of memory in the pool, so that costs a small part of the attention itself.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from hicache_actors.errors import HiCacheError, MissingExtraError
from hicache_actors.integrations.hf_cache import LoadFailed
from hicache_actors.integrations.serving.step import LayerWait, Step
from hicache_actors.memory.kv import KVTensors

try:
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise MissingExtraError("transformers", "transformers") from error


class Rows(Protocol):
    """The KV of running sequences."""

    def exchange(self, step: Step, layer: int, new: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Keep the step's new rows [tokens, heads, dim] -> the rows of all its sequences [rows, heads, dim].

        A sequence's rows are in order and begin at its segment's ``kv_first``; rows between segments are padding.
        """


class PoolRows:
    """Rows in the pages of a device pool.  One forward pass at a time."""

    def __init__(self, kv: KVTensors, *, load_timeout_s: float = 30.0) -> None:
        self.kv, self.load_timeout_s = kv, load_timeout_s
        self.wait_s = 0.0  #: that passes have spent waiting for layers
        self._buffers: list[torch.Tensor] = [tensor.new_empty(0) for tensor in kv.layer(0)]

    def exchange(self, step: Step, layer: int, new: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `Rows`.  Waits for the load of the step; raises `LoadFailed` if this layer does not come."""
        if step.load is not None:
            self._wait(step.load, layer)
        found = []
        for index, (pool, rows) in enumerate(zip(self.kv.layer(layer), new, strict=True)):
            pool.index_put_((step.write_pages, step.write_rows), rows)
            buffer = self._buffer(index, pool, step.n_pages)
            torch.index_select(pool, 0, step.table, out=buffer)
            found.append(buffer.flatten(0, 1))
        return tuple(found)

    def _wait(self, load: LayerWait, layer: int) -> None:
        started_s = time.perf_counter()
        try:
            arrived = load.wait(layer, self.load_timeout_s)
        except HiCacheError as error:
            raise LoadFailed(f"layer {layer} of a cached prefix did not arrive") from error
        finally:
            self.wait_s += time.perf_counter() - started_s
        if not arrived:
            raise LoadFailed(f"layer {layer} of a cached prefix did not arrive within {self.load_timeout_s} s")

    def _buffer(self, index: int, pool: torch.Tensor, n_pages: int) -> torch.Tensor:
        buffer = self._buffers[index]
        if len(buffer) < n_pages:
            # An inference tensor could not be used outside inference mode, and nobody says where the next pass runs.
            with torch.inference_mode(False):
                buffer = pool.new_empty(n_pages + n_pages // 4, *pool.shape[1:])
            self._buffers[index] = buffer
        return buffer[:n_pages]


class StepLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__ has no annotations
    """One model layer during one step."""

    is_sliding = False

    def __init__(self, index: int, step: Step, rows: Rows, latent_dim: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index, self.step, self.rows, self.latent_dim = index, step, rows, latent_dim
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to make."""

    def get_seq_length(self) -> int:
        return 0  # positions are given, each sequence has its own

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take K and V [1, heads, tokens, dim] of the step's tokens -> those of all tokens of all its sequences.

        A model with latent attention gives its latent and its rotary key, and gets both back: they share one row.
        """
        new = (key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        if self.latent_dim is None:
            keys, values = self.rows.exchange(self.step, self.index, new)
        else:
            (rows,) = self.rows.exchange(self.step, self.index, (torch.cat(new, dim=-1),))
            keys, values = rows[..., : self.latent_dim], rows[..., self.latent_dim :]
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def step_cache(step: Step, rows: Rows, layers: int, latent_dim: int | None) -> Cache:
    """What a model's forward takes as its cache in one step."""
    return Cache(layers=[StepLayer(index, step, rows, latent_dim) for index in range(layers)])
