from __future__ import annotations

import pytest
import torch

from hicache_actors.errors import ConfigError
from hicache_actors.memory.kv import KVTensors
from hicache_actors.memory.shapes import KVShape


def pair(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.zeros(6, 4, 2, 8, dtype=dtype) for _ in range(3)], [
        torch.zeros(6, 4, 2, 8, dtype=dtype) for _ in range(3)
    ]


def test_an_engines_tensors_describe_themselves() -> None:
    keys, values = pair(torch.bfloat16)
    kv = KVTensors.from_tensors(keys, values)
    assert kv.shape == KVShape(3, 2, 2, 8, "bfloat16", 4)
    assert kv.pages == 6
    assert kv.layer(2)[1] is values[2]
    assert "24 tokens" in kv.describe()


def test_mla_takes_a_list_or_one_stack() -> None:
    stack = torch.zeros(3, 6, 4, 16)
    for latents in (stack, list(stack)):
        kv = KVTensors.from_mla(latents)
        assert kv.shape == KVShape(3, 1, 1, 16, "float32", 4)
        (latent,) = kv.layer(1)
        assert latent.shape == (6, 4, 1, 16)
        assert latent.data_ptr() == stack[1].data_ptr()


def test_raw_views_share_memory() -> None:
    kv = KVTensors.make(KVShape(2, 2, 2, 8, "bfloat16", 4), 5)
    kv.raw(1)[0][3] = 0x3F80  # 1.0
    assert (kv.layer(1)[0][3] == 1).all()
    assert (kv.layer(1)[1] == 0).all()


def test_our_own_tensors_are_writable_anywhere() -> None:
    with torch.inference_mode():
        kv = KVTensors.make(KVShape(2, 1, 1, 8, "float16", 4), 5)
    kv.layer(0)[0].fill_(1)
    assert kv.layer(0)[0].sum() == 5 * 4 * 8
    with pytest.raises(ConfigError, match=r"device\.pages"):
        KVTensors.make(kv.shape, 0)


def refused(keys: list[torch.Tensor], values: list[torch.Tensor], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        KVTensors.from_tensors(keys, values)
    assert caught.value.field == field


def test_tensors_that_do_not_fit_are_refused() -> None:
    keys, values = pair()
    refused(keys, values[:2], "kv", "one K and one V")
    refused([], [], "kv", "one K and one V")
    refused(
        [*keys[:1], torch.zeros(6, 4, 2, 8, dtype=torch.float16), *keys[2:]],
        values,
        "kv.keys[1]",
        "differs from kv.keys",
    )
    refused(keys, [*values[:2], torch.zeros(7, 4, 2, 8)], "kv.values[2]", "differs from kv.keys")
    refused(keys, [torch.zeros(6, 4, 2, 8, device="meta"), *values[1:]], "kv.values[0]", "differs from kv.keys")
    refused([key[0] for key in keys], values, "kv.keys[0]", r"pages, page_size, heads, head_dim")
    refused([key[:0] for key in keys], values, "kv.keys[0]", "another form")
    refused([key.to(torch.complex64) for key in keys], values, "kv.keys[0]", "dtype")
    with pytest.raises(ConfigError, match="one tensor a layer"):
        KVTensors.from_mla([])


def test_tensors_that_no_copy_thread_could_write_are_refused() -> None:
    keys, values = pair()
    with torch.inference_mode():
        frozen = torch.zeros(6, 4, 2, 8)
    refused([frozen, *keys[1:]], values, "kv.keys[0]", "inference_mode")
    refused(keys, [torch.zeros(6, 4, 2, 8, requires_grad=True), *values[1:]], "kv.values[0]", "requires grad")


def test_tensors_that_share_memory_are_refused() -> None:
    keys, values = pair()
    refused([keys[0].new_zeros(6, 4, 1, 8).expand(6, 4, 2, 8), *keys[1:]], values, "kv.keys[0]", "share memory")
    refused([keys[0].as_strided((6, 4, 2, 8), (32, 16, 8, 1)), *keys[1:]], values, "kv.keys[0]", "share memory")
    refused([keys[0], keys[0], keys[2]], values, "kv.keys[1]", r"starts where kv\.keys\[0\]")
    refused(keys, [keys[2], *values[1:]], "kv.values[0]", r"starts where kv\.keys\[2\]")


def test_tensors_out_of_the_cpus_reach_are_refused_when_it_copies() -> None:
    kv = KVTensors.make(KVShape(1, 1, 1, 8, "float16", 4), 5, device="meta")
    with pytest.raises(ConfigError, match="CPU device"):
        kv.raw(0)
