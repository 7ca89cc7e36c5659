"""A causal language model of transformers that computes steps over a paged device pool."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hicache_actors.errors import ConfigError
from hicache_actors.integrations.hf_config import check_attention, kv_shape_of, latent_dim_of
from hicache_actors.integrations.serving.attention import ATTENTION
from hicache_actors.integrations.serving.rows import PoolRows, Rows, step_cache
from hicache_actors.integrations.serving.step import LayerWait, Piece, Step
from hicache_actors.integrations.transformers import CACHE_ARGUMENTS
from hicache_actors.memory.kv import KVTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ServedModel:
    """``model`` over the KV tensors of a cache: any mix of prefill chunks and decoding sequences in one forward pass.

    Full attention with K and V, or latent attention (MLA) with its compressed rows.  From here to `detach` the model's attention
    is ours, and other calls of the model are refused.  One forward pass at a time, any thread.

    Raises `ConfigError` for a model whose state pages cannot hold (sliding windows, recurrent layers, ...), for attention that
    is more than a softmax over keys, and for KV tensors of another shape.
    """

    def __init__(self, model: PreTrainedModel, kv: KVTensors, *, load_timeout_s: float = 30.0) -> None:
        check_attention(model.config, latent=True)
        wanted = kv_shape_of(model.config, page_size=kv.shape.page_size, dtype=str(model.dtype).removeprefix("torch."))
        if wanted != kv.shape:
            raise ConfigError(
                "kv", kv.shape, "another shape than the model's", allowed=repr(wanted), fix="use kv_shape_of(model)"
            )
        names = inspect.signature(model.forward).parameters
        cache_argument = next((name for name in CACHE_ARGUMENTS if name in names), None)
        if cache_argument is None or "logits_to_keep" not in names:
            raise ConfigError(
                "model", type(model).__name__, "its forward takes no cache or no logits_to_keep", allowed="a causal LM"
            )
        if not getattr(model, "_supports_attention_backend", False):
            raise ConfigError(
                "model",
                type(model).__name__,
                "its attention cannot be replaced",
                allowed="models that use AttentionInterface",
            )
        self.model, self.kv = model, kv
        self.pool = PoolRows(kv, load_timeout_s=load_timeout_s)
        self._cache_argument = cache_argument
        self._latent_dim = latent_dim_of(model.config)
        self._attention_before: str = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)

    def detach(self) -> None:
        """Give the model its own attention back."""
        self.model.set_attn_implementation(self._attention_before)

    @property
    def vocabulary(self) -> int:
        """Ids below this have an embedding."""
        embeddings: Any = self.model.get_input_embeddings()
        n_embeddings: int = embeddings.num_embeddings
        return n_embeddings

    @property
    def max_tokens(self) -> int:
        """Longest sequence, prompt and answer: what the pool holds, and the positions that the model knows."""
        pool_tokens = self.kv.pages * self.kv.shape.page_size
        return min(pool_tokens, getattr(self.model.config, "max_position_embeddings", None) or pool_tokens)

    def forward(
        self, pieces: Sequence[Piece], *, load: LayerWait | None = None, rows: Rows | None = None
    ) -> torch.Tensor:
        """Compute one step -> logits [pieces, vocabulary] after the last token of each piece.

        ``load`` is waited for layer by layer.  ``rows`` takes the pool's place (a replay).  Raises `LoadFailed`; pages that were
        to be computed are then half written, and computing them again is all that is needed.
        """
        step = Step(pieces, self.kv.shape.page_size, self.kv.device, load)
        cache = step_cache(step, rows or self.pool, self.kv.shape.layers, self._latent_dim)
        with torch.inference_mode():
            output = self.model(
                input_ids=step.ids,
                position_ids=step.positions,
                use_cache=True,
                logits_to_keep=step.last,
                hicache_step=step,
                **{self._cache_argument: cache},
            )
        logits: torch.Tensor = output.logits[0]
        if self.kv.device.type == "cuda":
            # What is committed next is read by copies on other streams.
            torch.cuda.current_stream(self.kv.device).synchronize()
        return logits
