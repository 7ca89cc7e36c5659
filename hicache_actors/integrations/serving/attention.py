"""Attention over packed sequences of different lengths, as transformers calls it.

Queries of all sequences of a step stand behind each other, and so do their keys and values; each sequence attends to its own run.
Everything else in a model works token by token, so one forward pass serves prefill chunks and decoding sequences together.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from hicache_actors.errors import MissingExtraError, UsageError
from hicache_actors.integrations.serving.step import Segment, Step

try:
    from transformers import AttentionInterface
except ImportError as error:
    raise MissingExtraError("transformers", "transformers") from error

ATTENTION: Final = "hicache_ragged"
"""Our name among transformers' attention functions.  It has no mask function, so models make no mask for it."""


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    hicache_step: Step | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, tokens, dim], key and value [1, KV heads, rows, dim] -> [1, tokens, heads, value dim].

    Raises `UsageError` outside a step of a `ServedModel`, and for attention that is more than a softmax over keys.
    """
    if hicache_step is None:
        raise UsageError("this model belongs to a serving engine: call ServedModel.detach before you use it otherwise")
    for name in ("softcap", "s_aux", "sliding_window", "position_bias"):
        if kwargs.get(name) is not None:
            raise UsageError(
                f"{type(module).__name__} wants {name} = {kwargs[name]!r}, which paged attention does not do"
            )
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    for segment in hicache_step.segments:
        rows = slice(segment.kv_first, segment.kv_first + segment.kv_count)
        tokens = slice(segment.first, segment.first + segment.count)
        out[:, tokens] = _attend(segment, query[:, :, tokens], key[:, :, rows], value[:, :, rows], scaling)
    return out, None


def _attend(
    segment: Segment, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """One sequence -> [1, tokens, heads, value dim]."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if segment.count == 1:
        # The heads of a group ask the same keys: as if they were tokens, which spares repeated keys.
        grouped = query.reshape(1, kv_heads, heads // kv_heads, query.shape[3])
        found = scaled_dot_product_attention(grouped, key, value, scale=scale)
        return found.reshape(1, 1, heads, value.shape[3])
    before = segment.kv_count - segment.count
    mask = None
    if before:
        mask = torch.ones(segment.count, segment.kv_count, dtype=torch.bool, device=query.device).tril(before)
    found = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=heads != kv_heads
    )
    return found.transpose(1, 2)


AttentionInterface.register(ATTENTION, ragged_attention)
