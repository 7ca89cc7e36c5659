"""Raw keys: SGLang's names, to the letter."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_actors.errors import ConfigError
from hicache_actors.keys import Namespace, Rank, RawKeys

HASH = bytes(range(32))


def raw(model_id: str = "org/model", *, mla: bool = False, **rank: Any) -> RawKeys:
    heads = 1 if mla else 8
    namespace = Namespace(
        model_id=model_id, weights="v1", dtype="bfloat16", page_size=64, layout="page_first", total_kv_heads=heads,
        head_group=1, layer_partition=4, replicated=mla,
    )  # fmt: skip
    return RawKeys(namespace, Rank(**rank))


@pytest.mark.parametrize(
    ("keys", "suffix"),
    [
        (raw(), "_org-model_0_1"),
        (raw(tp_rank=3, tp_size=4), "_org-model_3_4"),
        (raw(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2), "_org-model_1_2_2_1"),
        (raw(tp_rank=1, tp_size=2, cp_rank=2, cp_size=4), "_org-model_1_2_cp2_4"),
        (raw(pp_rank=0, pp_size=3, cp_rank=0, cp_size=2), "_org-model_0_1_3_0_cp0_2"),
        (raw(mla=True, tp_rank=3, tp_size=4), "_org-model"),
        (raw(mla=True, tp_rank=3, tp_size=4, pp_rank=1, pp_size=2), "_org-model_2_1"),
        (raw("/data/models/x.1"), "_-data-models-x.1_0_1"),
    ],
)
def test_the_names_of_sglang(keys: RawKeys, suffix: str) -> None:
    assert keys.keys([HASH]) == [HASH.hex() + suffix]
    assert keys.chunks == (0,)


def test_mla_is_written_by_one_rank() -> None:
    assert [raw(mla=True, tp_rank=rank, tp_size=4).writes for rank in range(4)] == [True, False, False, False]
    assert raw(tp_rank=3, tp_size=4).writes


@pytest.mark.parametrize("model_id", ["a b", "名前", "a\0b", "x" * 200, "a\\b"])
def test_names_that_make_no_safe_file_name_are_refused(model_id: str) -> None:
    with pytest.raises(ConfigError, match="safe file name") as caught:
        raw(model_id)
    assert caught.value.field == "model.model_id"


def test_raw_names_tell_neither_weights_nor_similar_models_apart() -> None:
    """The one documented exception; names of our own do."""
    assert raw("a/b").keys([HASH]) == raw("a-b").keys([HASH])
    assert raw().with_weights("v2").keys([HASH]) == raw().keys([HASH])
    assert not raw().tells_weights
    assert "nothing is verified" in raw().shared_with()
