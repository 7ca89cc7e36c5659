"""Unified keys: the same names for the same bytes, however a deployment divides the model; and no others."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_actors.errors import ConfigError
from hicache_actors.keys import Namespace, Prompt, Rank, Shard, UnifiedKeys
from hicache_actors.keys.scheme import MAX_KEY_CHARACTERS
from hicache_actors.keys.unified import VERSION_PREFIX, head_group_of

PAGE_HASH = Prompt(range(4)).page_hashes(4, 1)[0]


def namespace(**changes: Any) -> Namespace:
    facts: dict[str, Any] = {
        "model_id": "org/model-1b",
        "weights": "sha256:0f",
        "dtype": "bfloat16",
        "page_size": 64,
        "layout": "page_unified",
        "total_kv_heads": 8,
        "head_group": 1,
        "layer_partition": 2,
        "replicated": False,
    }
    return Namespace(**{**facts, **changes})


def ranks(of: Namespace, tp_size: int, stages: tuple[int, ...]) -> list[UnifiedKeys]:
    """The keys of all ranks of a deployment whose pipeline stages have so many layers."""
    heads = 1 if of.replicated else max(1, of.total_kv_heads // tp_size)
    firsts = [0, *accumulate(stages)][:-1]
    return [
        UnifiedKeys(of, Shard(first, layers, heads), Rank(tp_rank=tp, tp_size=tp_size, pp_rank=pp, pp_size=len(stages)))
        for pp, (first, layers) in enumerate(zip(firsts, stages, strict=True))
        for tp in range(tp_size)
    ]


@st.composite
def grids(draw: st.DrawFn) -> tuple[Namespace, list[tuple[int, tuple[int, ...]]]]:
    """A way to cut a model, and deployments that fit it."""
    part = draw(st.integers(1, 4))
    parts = draw(st.integers(1, 6))
    short = draw(st.integers(0, part - 1))  # the model's last range of layers
    mla = draw(st.booleans())
    sizes = draw(st.sampled_from([(1, 2, 4, 8), (1, 2, 4), (1, 3)]))
    heads, group = sizes[-1], draw(st.integers(1, 2))
    of = namespace(
        layer_partition=part,
        total_kv_heads=1 if mla else heads * group,
        head_group=1 if mla else group,
        replicated=mla,
    )
    deployments = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(1, parts - 1), max_size=2))) if parts > 1 else []
        edges = [0, *cuts, parts]
        stages = [part * (b - a) for a, b in pairwise(edges)]
        stages[-1] -= short if stages[-1] > short else 0
        deployments.append((draw(st.sampled_from(sizes)), tuple(stages)))
    total = sum(deployments[0][1])
    first, (tp_size, stages_) = deployments[0], deployments[1]
    last = total - sum(stages_[:-1])
    return of, [first, (tp_size, (*stages_[:-1], last))] if last > 0 else [first]


@given(grids())
def test_all_splits_of_a_grid_name_the_same_objects_and_no_two_ranks_the_same(
    grid: tuple[Namespace, list[tuple[int, tuple[int, ...]]]],
) -> None:
    of, deployments = grid
    unions = []
    for tp_size, stages in deployments:
        named = [set(zip(keys.keys([PAGE_HASH]), keys.chunks, strict=True)) for keys in ranks(of, tp_size, stages)]
        writing = [names for names, keys in zip(named, ranks(of, tp_size, stages), strict=True) if keys.writes]
        union = set().union(*named)
        assert len(union) == sum(map(len, writing)), "those who write share nothing, and miss nothing"
        assert of.replicated or len(writing) == len(named), "no two ranks hold the same"
        unions.append(union)
    assert all(union == unions[0] for union in unions)


def test_tp4_is_the_union_of_two_ranks_of_tp8() -> None:
    one = ranks(namespace(), 4, (8,))[1]
    others = ranks(namespace(), 8, (8,))[2:4]
    assert set(one.keys([PAGE_HASH])) == {key for keys in others for key in keys.keys([PAGE_HASH])}


def test_more_ranks_than_heads_share_names_and_one_of_them_writes() -> None:
    every = ranks(namespace(total_kv_heads=4), 8, (4,))
    assert [keys.writes for keys in every] == [True, False] * 4
    assert every[2].keys([PAGE_HASH]) == every[3].keys([PAGE_HASH])
    assert every[1].keys([PAGE_HASH]) != every[2].keys([PAGE_HASH])
    assert every[6].chunks == every[7].chunks


def test_mla_names_have_no_heads_and_the_first_tensor_rank_writes() -> None:
    of = namespace(total_kv_heads=1, head_group=1, replicated=True)
    every = ranks(of, 4, (4, 2))
    assert {tuple(keys.keys([PAGE_HASH])) for keys in every[:4]} == {tuple(every[0].keys([PAGE_HASH]))}
    assert [keys.writes for keys in every] == [True, False, False, False] * 2
    assert not any("_H" in key for keys in every for key in keys.keys([PAGE_HASH]))


def test_the_names() -> None:
    """Whoever changes them turns every store in the field into misses."""
    keys = UnifiedKeys(namespace(), Shard(4, 4, 2), Rank(tp_rank=1, tp_size=4, pp_rank=1, pp_size=2))
    head = f"{PAGE_HASH.hex()}_{VERSION_PREFIX}{keys.namespace_digest.hex()}"
    assert keys.keys([PAGE_HASH]) == [f"{head}_L4-6_H2", f"{head}_L6-8_H2", f"{head}_L4-6_H3", f"{head}_L6-8_H3"]
    assert VERSION_PREFIX == "hku1-"
    assert keys.namespace_digest.hex() == "d9cfd9df56cd1d9ff97fb660d7289a74"
    assert keys.chunks == tuple(a | b << 16 | h << 32 for h in (2, 3) for a, b in ((4, 6), (6, 8)))


FIELDS: dict[str, Any] = {
    "model_id": "org/model-1B",
    "weights": "sha256:0e",
    "dtype": "float16",
    "page_size": 32,
    "layout": "page_first",
    "total_kv_heads": 16,
    "head_group": 2,
    "layer_partition": 4,
    "replicated": True,
}


@pytest.mark.parametrize("field", FIELDS)
def test_namespaces_that_differ_in_one_field_share_no_key(field: str) -> None:
    def every(of: Namespace) -> set[str]:
        heads = 1 if of.replicated else of.total_kv_heads
        return set(UnifiedKeys(of, Shard(0, 8, heads)).keys([PAGE_HASH, b"\0" * 32]))

    assert not every(namespace()) & every(namespace(**{field: FIELDS[field]}))


@given(st.text(min_size=1, max_size=300).filter(str.strip), st.text(min_size=1).filter(str.strip))
def test_keys_are_safe_for_every_engine(model_id: str, weights: str) -> None:
    for of in (namespace(model_id=model_id, weights=weights), namespace(total_kv_heads=1, replicated=True)):
        heads = 1 if of.replicated else 8
        last = UnifiedKeys(of, Shard(65520, 8, heads))
        for key in last.keys([PAGE_HASH]):
            assert re.fullmatch(r"[0-9a-zA-Z_-]+", key)
            assert len(key) <= MAX_KEY_CHARACTERS


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "tp_size", "head_group", "tp_lcm_size", "found"),
    [(8, 4, None, 8, 1), (8, 2, None, 4, 2), (8, 4, 1, None, 1), (8, 4, None, None, 2), (4, 8, 1, None, 1)],
)
def test_head_groups(heads: int, tp_size: int, head_group: int | None, tp_lcm_size: int | None, found: int) -> None:
    local = max(1, heads // tp_size)
    assert head_group_of(heads, Rank(tp_size=tp_size), local, head_group, tp_lcm_size) == found


@pytest.mark.parametrize(
    ("heads", "tp_size", "head_group", "tp_lcm_size", "words"),
    [
        (8, 4, None, 12, ("12", "8 KV heads")),
        (8, 8, None, 16, ("16", "8 KV heads")),
        (12, 4, None, 6, ("6", "tp_size = 4")),
        (8, 4, 1, 8, ("tp_lcm_size = 8", "one of them")),
        (4, 8, None, None, ("8 tensor-parallel ranks share 4 KV heads", "storage.head_group = 1")),
    ],
)
def test_head_groups_that_do_not_fit_are_refused_with_both_numbers(
    heads: int, tp_size: int, head_group: int | None, tp_lcm_size: int | None, words: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        head_group_of(heads, Rank(tp_size=tp_size), max(1, heads // tp_size), head_group, tp_lcm_size)
    assert all(word in str(caught.value) for word in words)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("of", "shard", "rank", "field"),
    [
        (namespace(), Shard(1, 8, 8), Rank(), "storage.layer_partition"),
        (namespace(), Shard(0, 3, 8), Rank(pp_size=2), "storage.layer_partition"),
        (namespace(), Shard(65534, 8, 8), Rank(), "model.first_layer"),
        (namespace(), Shard(0, 8, 8), Rank(cp_size=2), "storage.keys"),
        (namespace(head_group=2), Shard(0, 8, 1), Rank(tp_size=8), "namespace.head_group"),
        (namespace(), Shard(0, 8, 3), Rank(tp_size=4), "model.total_kv_heads"),
        (namespace(), Shard(0, 8, 4), Rank(tp_size=4), "model.total_kv_heads"),
        (namespace(), Shard(0, 8, 1), Rank(tp_size=4), "model.total_kv_heads"),
    ],
)
def test_shards_that_are_no_whole_chunks_are_refused(of: Namespace, shard: Shard, rank: Rank, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        UnifiedKeys(of, shard, rank)
    assert caught.value.field == field
    assert caught.value.allowed


def test_only_the_last_stage_may_end_short() -> None:
    keys = UnifiedKeys(namespace(), Shard(4, 3, 1), Rank(tp_size=8, pp_rank=1, pp_size=2))
    assert [key.rsplit("_", 2)[1] for key in keys.keys([PAGE_HASH])] == ["L4-6", "L6-7"]


def test_other_weights_are_another_namespace_on_the_same_grid() -> None:
    keys = ranks(namespace(), 4, (4, 4))[6]
    other = keys.with_weights("sha256:0e")
    assert other.chunks == keys.chunks
    assert not set(other.keys([PAGE_HASH])) & set(keys.keys([PAGE_HASH]))
    assert other.with_weights(keys.namespace.weights).keys([PAGE_HASH]) == keys.keys([PAGE_HASH])


def test_the_start_up_note_says_who_can_share() -> None:
    widest = ranks(namespace(), 4, (4, 4))[0].shared_with()
    assert "2 layers x 1 KV heads" in widest
    assert "divides 8" in widest
    assert "set storage" not in widest
    narrow = UnifiedKeys(namespace(head_group=2, layer_partition=8), Shard(0, 8, 2), Rank(tp_size=4)).shared_with()
    assert "set storage.tp_lcm_size" in narrow
    assert "set storage.layer_partition" in narrow
