"""A Llama split over the ranks of a tensor-parallel group, in plain torch: each rank has some heads and some columns of the MLP.

Attention reads a paged pool that holds this rank's heads only, so the ranks need the same pages at the same time, and nothing of
each other's.  Two reductions a layer join their halves.  The model's own group carries them; the cache's group is another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hicache_actors import KVShape, KVTensors

Reduce = Callable[[Tensor], None]
"""Sums a tensor over the ranks, in place."""


class LayerLoad(Protocol):
    def wait(self, layer: int, timeout_s: float) -> bool: ...


class Shard:
    """One rank's part of a `transformers` Llama.  ``reduce`` is called twice a layer, in the same order on all ranks.

    A KV head and the query heads that read it stay together.  Where the ranks do not divide the KV heads (SmolLM2-135M has three),
    the last rank has heads of zeros beside its own: they add nothing, and all ranks have KV of one shape.
    """

    def __init__(self, model: Any, rank: int, ranks: int, reduce: Reduce) -> None:
        config = model.config
        self.kv_heads = -(-config.num_key_value_heads // ranks)
        group = config.num_attention_heads // config.num_key_value_heads
        self.heads = self.kv_heads * group
        inner = -(-config.intermediate_size // ranks)
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self._reduce = reduce
        weights: dict[str, Tensor] = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        mine = {"q": self.heads * self.head_dim, "k": self.kv_heads * self.head_dim, "v": self.kv_heads * self.head_dim}

        def rows(name: str, count: int) -> Tensor:
            part = weights[name][rank * count : (rank + 1) * count]
            return F.pad(part, (0, 0, 0, count - part.shape[0])).contiguous()

        def columns(name: str, count: int) -> Tensor:
            part = weights[name][:, rank * count : (rank + 1) * count]
            return F.pad(part, (0, count - part.shape[1])).contiguous()

        self.embedding, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.output = weights["lm_head.weight"]
        self.layers: list[dict[str, Tensor]] = []
        for index in range(config.num_hidden_layers):
            at = f"model.layers.{index}"
            layer = {name: rows(f"{at}.self_attn.{name}_proj.weight", mine[name]) for name in mine}
            layer |= {name: rows(f"{at}.mlp.{name}_proj.weight", inner) for name in ("gate", "up")}
            layer["o"] = columns(f"{at}.self_attn.o_proj.weight", mine["q"])
            layer["down"] = columns(f"{at}.mlp.down_proj.weight", inner)
            layer["norm1"] = weights[f"{at}.input_layernorm.weight"]
            layer["norm2"] = weights[f"{at}.post_attention_layernorm.weight"]
            self.layers.append(layer)
        theta = float(config.rope_parameters["rope_theta"])
        self.frequencies = theta ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim)

    def new_pool(self, page_size: int, pages: int) -> KVTensors:
        """A device pool for this rank's heads."""
        shape = KVShape(
            layers=len(self.layers),
            kv=2,
            heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=str(self.embedding.dtype).removeprefix("torch."),
            page_size=page_size,
        )
        return KVTensors.make(shape, pages)

    @torch.no_grad()
    def prefill(
        self, ids: Sequence[int], pool: KVTensors, pages: Sequence[int], start: int, load: LayerLoad | None
    ) -> tuple[Tensor, bool]:
        """Compute tokens [start, end) on top of the pages before -> (logits of the last, whether all layers of the load came).

        One page at a time, from a page boundary: so a page's bytes depend on its tokens alone, whatever was cached before it.  A
        rank whose load fails goes on, with a result that nobody may use: the others are in the same reductions.
        """
        page_size, arrived = pool.shape.page_size, True
        for at in range(start, len(ids), page_size):
            logits, came = self.forward(ids[at : at + page_size], pool, pages, at, load if at == start else None)
            arrived = arrived and came
        return logits, arrived

    @torch.no_grad()
    def forward(
        self, ids: Sequence[int], pool: KVTensors, pages: Sequence[int], start: int, load: LayerLoad | None = None
    ) -> tuple[Tensor, bool]:
        """Tokens ``ids``, which stand at [start, start + n) -> (logits [vocabulary] of the last, whether all layers came)."""
        n, end, arrived = len(ids), start + len(ids), True
        positions = torch.arange(start, end)
        page_size = pool.shape.page_size
        table = torch.tensor(pages[: -(-end // page_size)], dtype=torch.int64)
        rows = table[positions // page_size], positions % page_size
        hidden = self.embedding[torch.tensor(ids)]
        visible = torch.arange(end)[None, :] <= positions[:, None]
        angles = positions[:, None].float() * self.frequencies[None, :]
        cos, sin = angles.cos(), angles.sin()
        for index, layer in enumerate(self.layers):
            if load is not None and not load.wait(index, 10.0):
                load, arrived = None, False
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer["norm1"], self.eps)
            q = _rotate((normed @ layer["q"].T).view(n, self.heads, self.head_dim), cos, sin)
            k = _rotate((normed @ layer["k"].T).view(n, self.kv_heads, self.head_dim), cos, sin)
            v = (normed @ layer["v"].T).view(n, self.kv_heads, self.head_dim)
            keys, values = pool.layer(index)
            keys[rows], values[rows] = k, v
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1),
                keys[table].flatten(0, 1)[:end].transpose(0, 1),
                values[table].flatten(0, 1)[:end].transpose(0, 1),
                attn_mask=visible,
                enable_gqa=True,
            )
            hidden = hidden + self._joined(attended.transpose(0, 1).reshape(n, -1) @ layer["o"].T)
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer["norm2"], self.eps)
            inner = F.silu(normed @ layer["gate"].T) * (normed @ layer["up"].T)
            hidden = hidden + self._joined(inner @ layer["down"].T)
        last = F.rms_norm(hidden[-1], hidden.shape[-1:], self.norm, self.eps)
        return self.output @ last, arrived

    def _joined(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        self._reduce(part)
        return part


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: the two halves of a head turn together, as transformers' Llama has them."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def random_llama(vocabulary: int) -> Any:
    """Small, random, float32, the same on all ranks; three KV heads, as the real one has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=4096,
        dtype="float32",
        # Wide enough that attention over the whole prompt decides the next token, else wrong pages would change no text.
        initializer_range=0.2,
    )
    model: Any = LlamaForCausalLM(config)
    return model.train(False)
