"""A model's config.json, read for the size of its KV.  Plain JSON: neither torch nor transformers is needed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from hicache_actors.errors import ConfigError
from hicache_actors.memory.shapes import ITEM_BYTES, KVShape

DTYPE_ALIASES: Final[Mapping[str, str]] = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

_TEXT_PARTS: Final = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where models of several modalities keep the part that writes text."""

_NO_KV: Final = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "moe")
"""Kinds of layers that keep no K and V of each token."""

_FULL_KV: Final = ("full_attention", "attention", "indexed_attention", "hybrid")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """KV of a whole model, over all ranks."""

    name: str
    layers: int
    kv_heads: int
    """1 for MLA."""

    head_dim: int
    """For MLA the width of the latent with its rotary part."""

    dtype: str
    mla: bool = False
    max_context_tokens: int | None = None
    remarks: tuple[str, ...] = ()
    """What was assumed or left out, in words."""

    def rank_shape(self, page_size: int, tp: int = 1) -> KVShape:
        """One tensor-parallel rank's part.  MLA is held whole by each rank; heads are split, or repeated if there are fewer of
        them than ranks.  Raises `ConfigError` for a split that no engine can make.
        """
        if self.mla or tp % self.kv_heads == 0:
            heads = 1
        elif self.kv_heads % tp == 0:
            heads = self.kv_heads // tp
        else:
            raise ConfigError(
                "tp",
                tp,
                f"cannot split {self.kv_heads} KV heads evenly, nor repeat them evenly",
                allowed=f"divisors and multiples of {self.kv_heads}",
            )
        return KVShape(self.layers, 1 if self.mla else 2, heads, self.head_dim, self.dtype, page_size)

    @property
    def token_bytes(self) -> int:
        """Of all ranks together, without copies."""
        return self.rank_shape(page_size=1).token_bytes

    def copies(self, tp: int) -> int:
        """How many ranks hold the same bytes."""
        return tp if self.mla else max(1, tp // self.kv_heads)

    def describe(self) -> str:
        kind = f"MLA latent of {self.head_dim}" if self.mla else f"{self.kv_heads} KV heads x {self.head_dim}"
        return f"{self.name}: {self.layers} layers, {kind}, {self.dtype}"


def dtype_name(asked: str) -> str:
    """Torch's name of an element type.  Raises `ConfigError`."""
    name = asked.strip().lower().removeprefix("torch.")
    name = DTYPE_ALIASES.get(name, name)
    if name not in ITEM_BYTES:
        raise ConfigError("dtype", asked, "unknown", allowed=[*ITEM_BYTES, *DTYPE_ALIASES])
    return name


def read_model(path: Path, *, dtype: str | None = None) -> ModelShape:
    """``path``: a config.json, or the folder that holds it.  Raises `ConfigError`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "model",
            str(path),
            f"cannot be read: {error}",
            allowed="a model's config.json, or the folder that holds it",
            fix="give the path of a local copy; nothing is downloaded",
        ) from error
    if not isinstance(data, dict):
        raise ConfigError("model", str(path), "holds no JSON object", allowed="a model's config.json")
    name = data.get("_name_or_path") or (file.parent.name if file.name == "config.json" else file.stem)
    return model_shape(data, name=str(name) or "model", dtype=dtype)


def model_shape(data: Mapping[str, Any], *, name: str = "model", dtype: str | None = None) -> ModelShape:
    """The KV of a model by its configuration.  ``dtype``: of the KV, if it differs from the weights'.

    Raises `ConfigError` for a field that is missing or is no count.
    """
    text = _text_part(data)
    remarks: list[str] = []
    declared = dtype or text.get("dtype") or text.get("torch_dtype") or data.get("dtype") or data.get("torch_dtype")
    if declared is None:
        declared = "bfloat16"
        remarks.append("the configuration names no element type: counted as bfloat16")
    layers = _kv_layers(text, remarks)
    latent = text.get("kv_lora_rank")
    if latent is not None:
        kv_heads, head_dim = 1, _count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")
    else:
        kv_heads = _kv_heads(text)
        head_dim = _head_dim(text)
    return ModelShape(
        name=name,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype_name(str(declared)),
        mla=latent is not None,
        max_context_tokens=_optional(text, "max_position_embeddings", "n_positions"),
        remarks=tuple(remarks),
    )


def _text_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    for part in _TEXT_PARTS:
        if isinstance(data.get(part), Mapping):
            return _text_part(data[part])
    return data


def _kv_layers(text: Mapping[str, Any], remarks: list[str]) -> int:
    layers = _count(text, "num_hidden_layers", "n_layer", "num_layers")
    kinds = Counter(_layer_types(text, layers))
    without = sum(kinds[kind] for kind in _NO_KV)
    if without:
        layers -= without
        remarks.append(f"{without} layers keep a state instead of K and V; that state is not counted")
    borrowed = _optional(text, "num_kv_shared_layers")
    if borrowed is not None:
        layers -= borrowed
        remarks.append(f"{borrowed} layers borrow the KV of others")
    partial = {kind: n for kind, n in kinds.items() if kind not in (*_NO_KV, *_FULL_KV)}
    for kind, n in partial.items():
        remarks.append(f"{n} layers of kind {kind} need less than all K and V; counted in full, as pages keep them")
    window = text.get("sliding_window") or text.get("attention_chunk_size")
    if window and not kinds and text.get("use_sliding_window", True):
        remarks.append(f"layers with a window of {window} tokens are counted in full, as pages keep them")
    if layers < 1:
        raise ConfigError("model.num_hidden_layers", layers, "no layer keeps K and V")
    return layers


def _layer_types(text: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer; none if nothing is said of kinds."""
    kinds = text.get("layer_types") or []
    interval = _optional(text, "full_attention_interval")
    if not kinds and interval is not None:  # Qwen3-Next: each so many-th layer keeps K and V, the others a state
        return ["linear_attention" if at % interval else "full_attention" for at in range(1, layers + 1)]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ConfigError("model.layer_types", kinds, "is no list of texts", allowed="the kind of each layer")
    if kinds and len(kinds) != layers:
        raise ConfigError(
            "model.layer_types", len(kinds), f"names so many layers, and there are {layers}",
            allowed="the kind of each layer", fix="correct it, or give the shape on the command line",
        )  # fmt: skip
    return kinds


def _kv_heads(text: Mapping[str, Any]) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    return _count(text, "num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")


def _head_dim(text: Mapping[str, Any]) -> int:
    declared = _optional(text, "head_dim")
    if declared is not None:
        return declared
    hidden, heads = _count(text, "hidden_size", "n_embd"), _count(text, "num_attention_heads", "n_head")
    if hidden % heads:
        raise ConfigError(
            "model.head_dim",
            None,
            f"missing, and hidden_size = {hidden} is no multiple of {heads} heads",
            fix="add head_dim",
        )
    return hidden // heads


def _optional(text: Mapping[str, Any], *names: str) -> int | None:
    return next((value for name in names if type(value := text.get(name)) is int and value > 0), None)


def _count(text: Mapping[str, Any], *names: str) -> int:
    value = _optional(text, *names)
    if value is None:
        found = next((text[name] for name in names if name in text), None)
        raise ConfigError(
            f"model.{names[0]}",
            found,
            "is not a count" if found is not None else "missing",
            allowed="integers >= 1",
            fix=f"add one of {', '.join(names)}, or give the shape on the command line",
        )
    return value
