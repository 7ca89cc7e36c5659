"""What a transformers configuration says about its KV: the shape of a page, and what a page cannot hold.

Reads attributes only, so it needs no import of transformers.
"""

from __future__ import annotations

from typing import Any

from hicache_actors.config import ModelFacts
from hicache_actors.errors import ConfigError
from hicache_actors.memory.shapes import KVShape


def kv_shape_of(config: Any, *, page_size: int = 64, dtype: str | None = None) -> KVShape:
    """Shape of one page of a model's KV.  ``config``: a transformers configuration, or a model that has one.

    Latent attention (MLA) keeps one row a token and layer: its latent, and behind it the rotary key that all heads share.
    ``dtype`` (a torch name, e.g. "bfloat16") defaults to the configuration's own.  Raises `ConfigError`.
    """
    text = _text_config(config)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if dtype is None:
        declared = getattr(text, "dtype", None)
        if declared is None:
            raise ConfigError(
                "dtype",
                None,
                "the model's configuration does not name one",
                allowed="a torch name",
                fix="pass dtype='bfloat16'",
            )
        dtype = str(declared).removeprefix("torch.")
    latent_dim = latent_dim_of(text)
    if latent_dim is not None:
        row_dim = latent_dim + text.qk_rope_head_dim
        return KVShape(layers=text.num_hidden_layers, kv=1, heads=1, head_dim=row_dim, dtype=dtype, page_size=page_size)
    return KVShape(
        layers=text.num_hidden_layers, kv=2, heads=kv_heads, head_dim=head_dim, dtype=dtype, page_size=page_size
    )


def model_facts(config: Any, *, model_id: str, weights: str) -> ModelFacts:
    """Facts under which a model's pages may be shared in storage.

    ``weights``: a fingerprint of the weight files (e.g. their SHA-256), or an epoch that changes whenever they do.
    """
    text = _text_config(config)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if latent_dim_of(text) is not None:
        kv_heads = 1
    return ModelFacts(model_id=model_id, weights=weights, total_kv_heads=kv_heads)


def latent_dim_of(config: Any) -> int | None:
    """Width of the latent of a model with latent attention (MLA), without its rotary key; None for K and V."""
    rank: int | None = getattr(_text_config(config), "kv_lora_rank", None)
    return rank


def check_attention(config: Any, *, latent: bool = False) -> None:
    """Refuse a model with state that pages of K and V cannot hold.  ``latent``: rows of MLA are fine.  Raises `ConfigError`."""
    text = _text_config(config)
    kinds = getattr(text, "layer_types", None)
    odd = sorted({kind for kind in kinds or () if kind != "full_attention"})
    if odd:
        raise ConfigError("layer_types", odd, "layers whose state is not one K and V per token", **_ONLY_FULL)
    if kinds is None:
        for name in ("sliding_window", "attention_chunk_size"):
            window = getattr(text, name, None)
            if window is not None:
                raise ConfigError(name, window, "a page outside the window would be missing", **_ONLY_FULL)
    if not latent and latent_dim_of(text) is not None:
        raise ConfigError("kv_lora_rank", text.kv_lora_rank, "MLA keeps a latent, not K and V", **_ONLY_FULL)
    if getattr(text, "num_kv_shared_layers", None) or getattr(text, "kv_sharing_modes", None):
        raise ConfigError(
            "kv_sharing", "on", "layers that borrow the KV of others have none of their own", **_ONLY_FULL
        )
    if getattr(text, "is_encoder_decoder", False):
        raise ConfigError("is_encoder_decoder", True, "cross attention is not a prefix", **_ONLY_FULL)


_ONLY_FULL = {
    "allowed": "full attention with K and V in every layer",
    "fix": "run this model with its own DynamicCache",
}


def _text_config(config: Any) -> Any:
    config = getattr(config, "config", config)
    get = getattr(config, "get_text_config", None)
    return config if get is None else get(decoder=True)
