"""A forward pass over paged prefixes: bit-equal to a live cache, waiting where a layer is missing, refusing what is unsound."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hicache_actors.errors import ConfigError, TransferError, UsageError
from hicache_actors.integrations.transformers import (
    CACHE_ARGUMENTS,
    LoadFailed,
    PagedCache,
    PagedModel,
    kv_shape_of,
    model_facts,
)
from hicache_actors.memory.kv import KVTensors

PAGE_SIZE = 8
N_PAGES = 16
LAYERS = 4
PROMPT = [(7 * i * i + 3) % 251 for i in range(43)]  # five pages and three tokens


class FakeLoad:
    """Layers arrive when the test says so."""

    def __init__(self, layers: int) -> None:
        self.arrived = [threading.Event() for _ in range(layers)]
        self.entered = [threading.Event() for _ in range(layers)]
        self.passed: list[int] = []
        self.broken_from = layers

    def wait(self, layer: int, timeout_s: float) -> bool:
        self.entered[layer].set()
        if not self.arrived[layer].wait(timeout_s) or layer >= self.broken_from:
            return False
        self.passed.append(layer)
        return True

    def arrive(self, first: int, last: int) -> None:
        for event in self.arrived[first:last]:
            event.set()


class FakeLease:
    def __init__(self, pages: Sequence[int], usable_tokens: int, loading: Any = None) -> None:
        self.pages, self.usable_tokens, self.loading = pages, usable_tokens, loading


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=251,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    return model


@pytest.fixture
def kv(model: LlamaForCausalLM) -> KVTensors:
    return KVTensors.make(kv_shape_of(model, page_size=PAGE_SIZE), N_PAGES)


@pytest.fixture
def engine(model: LlamaForCausalLM, kv: KVTensors) -> Iterator[PagedModel]:
    engine = PagedModel(model, kv, capacity_tokens=96)
    yield engine
    engine.detach()


def named(engine: PagedModel, cache: Any) -> dict[str, Any]:
    """The cache under the name that this version of transformers gives it."""
    assert engine.cache_argument is not None
    return {engine.cache_argument: cache}


def layers_of(cache: DynamicCache) -> list[Any]:
    return list(cache.layers)


def fill(engine: PagedModel, pages: Sequence[int], n_tokens: int) -> DynamicCache:
    """Compute the first tokens of PROMPT and put their K and V into ``pages``, page by page -> the live cache."""
    live = DynamicCache(config=engine.model.config)
    engine.forward(PROMPT[:n_tokens], live)
    for index, layer in enumerate(layers_of(live)):
        for pool, dense in zip(engine.kv.layer(index), (layer.keys, layer.values), strict=True):
            for i in range(n_tokens // PAGE_SIZE):
                pool[pages[i]].copy_(dense[0, :, i * PAGE_SIZE : (i + 1) * PAGE_SIZE].transpose(0, 1))
    return live


def test_a_prefix_from_pages_gives_the_bits_of_a_live_cache(engine: PagedModel) -> None:
    pages = [9, 2, 14, 5, 11, 3]
    live = fill(engine, pages, 40)
    cache = engine.new_cache(FakeLease(pages, 40))
    assert cache.get_seq_length() == cache.prefix_tokens == 40
    suffix = PROMPT[40:]
    for tokens in (suffix, [17], [90]):
        assert torch.equal(engine.forward(tokens, cache), engine.forward(tokens, live))
    for mine, other in zip(cache.paged_layers, layers_of(live), strict=True):
        n_tokens = mine.get_seq_length()
        assert torch.equal(mine.dense[0][:, :, :n_tokens], other.keys)
        assert torch.equal(mine.dense[1][:, :, :n_tokens], other.values)


def test_prefill_runs_what_is_missing_in_chunks(engine: PagedModel) -> None:
    pages = [9, 2, 14, 5, 11, 3]
    live = fill(engine, pages, 16)
    cache = engine.new_cache(FakeLease(pages, 16))
    got = engine.prefill(PROMPT, cache, chunk_tokens=10)
    for first in range(16, len(PROMPT), 10):
        wanted = engine.forward(PROMPT[first : first + 10], live)
    assert torch.equal(got, wanted)
    with pytest.raises(UsageError, match="nothing left to compute"):
        engine.prefill(PROMPT, cache)


def test_flush_hands_over_whole_pages_once_and_they_serve_the_next_request(engine: PagedModel) -> None:
    pages = [4, 8, 1, 13, 6, 10, 15]
    first = engine.new_cache(FakeLease(pages, 0))
    engine.prefill(PROMPT, first)
    assert first.flush() == 40
    for token in (21, 22, 23, 24, 25):
        engine.forward([token], first)
    engine.kv.layer(0)[0][4].add_(0.0).mul_(-1.0)  # an already flushed page is not written again
    marked = engine.kv.layer(0)[0][4].clone()
    assert first.flush() == 48
    assert torch.equal(engine.kv.layer(0)[0][4], marked)
    engine.kv.layer(0)[0][4].mul_(-1.0)

    second = engine.new_cache(FakeLease(pages, 48))
    assert torch.equal(engine.forward([77], second), engine.forward([77], first))


def test_flush_needs_pages_that_were_allocated(engine: PagedModel) -> None:
    cache = engine.new_cache(FakeLease([1, 2], 0))
    engine.prefill(PROMPT, cache)
    with pytest.raises(UsageError, match="allocate before the forward pass"):
        cache.flush()


def test_a_forward_pass_waits_at_the_layer_that_is_missing(engine: PagedModel) -> None:
    pages = [9, 2, 14, 5, 11, 3]
    live = fill(engine, pages, 40)
    kept = engine.kv.layer(2)[1].clone()
    engine.kv.layer(2)[1].zero_()
    load = FakeLoad(LAYERS)
    load.arrive(0, 2)
    cache = engine.new_cache(FakeLease(pages, 40, load))
    got: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: got.append(engine.forward(PROMPT[40:], cache)), daemon=True)
    thread.start()
    assert load.entered[2].wait(20)
    assert load.passed == [0, 1]
    assert [layer.get_seq_length() for layer in cache.paged_layers] == [43, 43, 40, 40]
    assert not load.entered[3].is_set()
    assert thread.is_alive()
    engine.kv.layer(2)[1].copy_(kept)
    load.arrive(2, LAYERS)
    thread.join(20)
    assert torch.equal(got[0], engine.forward(PROMPT[40:], live))
    assert load.passed == [0, 1, 2, 3]
    assert cache.wait_s > 0
    engine.forward([5], cache)
    assert load.passed == [0, 1, 2, 3]  # gathered once per request


def test_a_failed_load_spends_the_cache(engine: PagedModel) -> None:
    load = FakeLoad(LAYERS)
    load.arrive(0, LAYERS)
    load.broken_from = 2
    cache = engine.new_cache(FakeLease([1, 2], 16, load))
    for _ in range(2):
        with pytest.raises(LoadFailed, match=r"layer 2 .* acquire again"):
            engine.forward([5, 6], cache)
    with pytest.raises(LoadFailed):
        cache.flush()
    assert load.passed == [0, 1]


def test_a_load_that_does_not_arrive_in_time_has_failed(engine: PagedModel) -> None:
    load = FakeLoad(LAYERS)
    load.arrive(0, 1)
    cache = engine.new_cache(FakeLease([1, 2], 16, load), load_timeout_s=0.01)
    with pytest.raises(LoadFailed, match=r"layer 1 .* within 0\.01 s"):
        engine.forward([5, 6], cache)


def test_an_error_of_the_load_is_the_cause(engine: PagedModel) -> None:
    class Broken:
        def wait(self, layer: int, timeout_s: float) -> bool:
            raise TransferError("the device is gone")

    cache = engine.new_cache(FakeLease([1, 2], 16, Broken()))
    with pytest.raises(LoadFailed) as caught:
        engine.forward([5, 6], cache)
    assert isinstance(caught.value.__cause__, TransferError)


def test_generate_continues_a_prefix(model: LlamaForCausalLM, engine: PagedModel) -> None:
    pages = [9, 2, 14, 5, 11, 3, 12]
    live = fill(engine, pages, 40)
    ids = torch.tensor([PROMPT])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    cache = engine.new_cache(FakeLease(pages, 40))
    got = model.generate(ids, **named(engine, cache), **options)
    wanted = model.generate(ids, **named(engine, live), **options)
    assert got.tolist() == wanted.tolist()
    assert cache.get_seq_length() == len(PROMPT) + 5  # the last token has no KV
    assert cache.flush() == 48


class TestRefusals:
    """One request with two cached pages; a refused call changes nothing."""

    @pytest.fixture
    def cache(self, engine: PagedModel) -> PagedCache:
        fill(engine, [1, 2], 16)
        return engine.new_cache(FakeLease([1, 2, 3], 16))

    def run(
        self, engine: PagedModel, cache: PagedCache, ids: Sequence[Sequence[int]] = ((5, 6),), **kwargs: Any
    ) -> None:
        with torch.inference_mode():
            engine.model(input_ids=torch.tensor(ids), use_cache=True, **named(engine, cache), **kwargs)

    def test_a_batch(self, engine: PagedModel, cache: PagedCache) -> None:
        with pytest.raises(UsageError, match="batch has 2: call the model once per request"):
            self.run(engine, cache, [[5, 6], [5, 6]])
        assert cache.get_seq_length() == 16

    def test_gradients(self, engine: PagedModel, cache: PagedCache) -> None:
        with pytest.raises(UsageError, match=r"torch\.inference_mode"):
            engine.model(input_ids=torch.tensor([[5, 6]]), use_cache=True, **named(engine, cache))
        with torch.no_grad():
            engine.model(input_ids=torch.tensor([[5, 6]]), use_cache=True, **named(engine, cache))
        assert cache.get_seq_length() == 18

    @pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_copies(self, cache: PagedCache, copier: Any) -> None:
        with pytest.raises(UsageError, match="cannot be copied"):
            copier(cache)

    def test_a_mask_without_the_prefix(self, engine: PagedModel, cache: PagedCache) -> None:
        with pytest.raises(UsageError, match=r"covers 2 tokens, not the 16 cached and 2 new ones: .* \[1, 18\]"):
            self.run(engine, cache, attention_mask=torch.ones(1, 2, dtype=torch.long))

    def test_a_mask_with_holes(self, engine: PagedModel, cache: PagedCache) -> None:
        mask = torch.ones(1, 18, dtype=torch.long)
        mask[0, 3] = 0
        with pytest.raises(UsageError, match="hides tokens"):
            self.run(engine, cache, attention_mask=mask)

    def test_a_mask_of_four_dimensions(self, engine: PagedModel, cache: PagedCache) -> None:
        with pytest.raises(UsageError, match=r"shape \[1, 1, 2, 18\]: pass none"):
            self.run(engine, cache, attention_mask=torch.ones(1, 1, 2, 18, dtype=torch.bool))

    def test_the_mask_of_a_pass_with_another_cache_is_left_alone(self, engine: PagedModel) -> None:
        other = DynamicCache(config=engine.model.config)
        self.run(engine, other, attention_mask=torch.tensor([[0, 1]]))  # type: ignore[arg-type]
        assert other.get_seq_length() == 2

    def test_a_full_mask_is_accepted_and_changes_no_bit(self, engine: PagedModel, cache: PagedCache) -> None:
        with torch.inference_mode():
            mask = torch.ones(1, 18, dtype=torch.long)
            masked = engine.model(torch.tensor([[5, 6]]), mask, **named(engine, cache), logits_to_keep=1).logits[0, -1]
        again = engine.new_cache(FakeLease([1, 2, 3], 16))
        assert torch.equal(masked, engine.forward([5, 6], again))

    def test_other_positions(self, engine: PagedModel, cache: PagedCache) -> None:
        with pytest.raises(UsageError, match=r"not 16\.\.17: leave them out"):
            self.run(engine, cache, position_ids=torch.tensor([[0, 1]]))
        self.run(engine, cache, position_ids=torch.tensor([[16, 17]]))
        assert cache.get_seq_length() == 18

    def test_more_tokens_than_the_workspace_holds(self, engine: PagedModel, cache: PagedCache) -> None:
        with pytest.raises(UsageError, match=r"97 tokens, but the workspace holds 96: .* capacity_tokens"):
            self.run(engine, cache, [[5] * 81])
        with pytest.raises(UsageError, match="capacity_tokens is 96"):
            engine.new_cache(FakeLease(range(16), 104))

    @pytest.mark.parametrize(
        ("method", "argument"),
        [
            ("crop", -1),
            ("reorder_cache", torch.tensor([0])),
            ("batch_repeat_interleave", 2),
            ("batch_select_indices", torch.tensor([0])),
        ],
    )
    def test_unwinding_and_beams(self, cache: PagedCache, method: str, argument: object) -> None:
        with pytest.raises(UsageError, match=f"does not support {method}"):
            getattr(cache, method)(argument)
        with pytest.raises(UsageError, match="new_cache"):
            cache.reset()

    def test_a_model_without_its_guard(self, engine: PagedModel, cache: PagedCache) -> None:
        engine.detach()
        with pytest.raises(UsageError, match="0 were announced: call the model that was given to PagedModel"):
            self.run(engine, cache)

    def test_a_pass_that_broke_between_two_layers(self, engine: PagedModel, cache: PagedCache) -> None:
        layer = engine.model.model.layers[1]
        hook = layer.register_forward_pre_hook(_break)
        with pytest.raises(ZeroDivisionError):
            self.run(engine, cache)
        hook.remove()
        with pytest.raises(UsageError, match="ended between two layers: discard this cache"):
            self.run(engine, cache)

    def test_a_prefix_that_is_no_run_of_pages(self, engine: PagedModel) -> None:
        with pytest.raises(UsageError, match="no multiple of the page size 8"):
            engine.new_cache(FakeLease([1, 2], 12))


def _break(*_: object) -> None:
    raise ZeroDivisionError


def test_a_workspace_goes_back_when_its_cache_is_gone(engine: PagedModel) -> None:
    gc.disable()  # by reference counts alone
    try:
        first = engine.new_cache(FakeLease([], 0))
        second = engine.new_cache(FakeLease([], 0))
        tensors = {first.paged_layers[0].dense[0].data_ptr(), second.paged_layers[0].dense[0].data_ptr()}
        assert len(tensors) == 2
        del first, second
        third = engine.new_cache(FakeLease([], 0))
        assert third.paged_layers[0].dense[0].data_ptr() in tensors
    finally:
        gc.enable()


def test_a_workspace_made_within_inference_mode_serves_outside_it(engine: PagedModel) -> None:
    with torch.inference_mode():
        cache = engine.new_cache(FakeLease([], 0))
        assert not cache.paged_layers[0].dense[0].is_inference()
    with torch.no_grad():
        engine.model(torch.tensor([[5, 6]]), **named(engine, cache))
    assert cache.get_seq_length() == 2


class OlderLlama(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Calls its cache ``past_key_values``, as models did before transformers 5.24, and computes all logits."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, use_cache: bool = True) -> Any:
        return super().forward(input_ids, **{CACHE_NAME: past_key_values}, use_cache=use_cache)


CACHE_NAME = next(name for name in CACHE_ARGUMENTS if name in inspect.signature(LlamaForCausalLM.forward).parameters)


def test_the_older_name_of_the_cache_is_found(model: LlamaForCausalLM, kv: KVTensors, engine: PagedModel) -> None:
    older_model = OlderLlama(model.config)
    older_model.load_state_dict(model.state_dict())
    older_model.train(False)
    older = PagedModel(older_model, kv, capacity_tokens=96)
    assert older.cache_argument == "past_key_values"
    cache, live = older.new_cache(FakeLease([], 0)), DynamicCache(config=model.config)
    assert torch.allclose(older.forward(PROMPT, cache), engine.forward(PROMPT, live), atol=1e-5)
    assert cache.get_seq_length() == len(PROMPT)


def test_without_transformers_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['transformers'] = None; import hicache_actors.integrations.transformers"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "pip install 'hicache-actors[transformers]'" in result.stderr


class TestConfigurations:
    def test_shape_and_facts(self, model: LlamaForCausalLM) -> None:
        shape = kv_shape_of(model.config, page_size=32)
        assert (shape.layers, shape.kv, shape.heads, shape.head_dim) == (LAYERS, 2, 2, 16)
        assert (shape.dtype, shape.page_size) == ("float32", 32)
        assert kv_shape_of(model, dtype="bfloat16").dtype == "bfloat16"
        facts = model_facts(model.config, model_id="tiny", weights="v1")
        assert (facts.model_id, facts.weights, facts.total_kv_heads) == ("tiny", "v1", 2)

    @pytest.mark.parametrize(
        "change",
        [
            {"sliding_window": 16},
            {"attention_chunk_size": 16},
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            {"layer_types": ["linear_attention"] * 4},
            {"kv_lora_rank": 8},
            {"num_kv_shared_layers": 2},
        ],
    )
    def test_models_that_pages_cannot_hold(
        self, model: LlamaForCausalLM, kv: KVTensors, change: dict[str, Any]
    ) -> None:
        odd = copy.copy(model)
        odd.config = copy.deepcopy(model.config)
        for name, value in change.items():
            setattr(odd.config, name, value)
        with pytest.raises(ConfigError, match="run this model with its own DynamicCache"):
            PagedModel(odd, kv, capacity_tokens=96)

    def test_a_full_attention_model_may_name_a_window_it_does_not_use(
        self, model: LlamaForCausalLM, kv: KVTensors
    ) -> None:
        plain = copy.copy(model)
        plain.config = copy.deepcopy(model.config)
        plain.config.layer_types, plain.config.sliding_window = ["full_attention"] * LAYERS, 16
        PagedModel(plain, kv, capacity_tokens=96).detach()

    def test_tensors_of_another_shape(self, model: LlamaForCausalLM) -> None:
        other = KVTensors.make(kv_shape_of(model, page_size=PAGE_SIZE, dtype="bfloat16"), 2)
        with pytest.raises(ConfigError, match="another shape than the model's"):
            PagedModel(model, other, capacity_tokens=96)
