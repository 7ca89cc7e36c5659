"""Namespaces and suffix keys: every fact counts, a missing one is refused, and a key is a safe file name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hicache_actors.errors import ConfigError
from hicache_actors.keys import Namespace, Prompt, Rank, SuffixKeys

FACTS: dict[str, Any] = {
    "model_id": "org/model-1b",
    "weights": "sha256:0f",
    "dtype": "bfloat16",
    "page_size": 64,
    "layout": "page_first_direct",
    "total_kv_heads": 8,
    "head_group": 4,
    "layer_partition": 30,
    "replicated": False,
}
OTHERS: dict[str, Any] = {
    "model_id": "org/model-1B",
    "weights": "sha256:0e",
    "dtype": "float16",
    "page_size": 32,
    "layout": "page_first",
    "total_kv_heads": 16,
    "head_group": 8,
    "layer_partition": 15,
    "replicated": True,
}
PAGE_HASH = Prompt(range(4)).page_hashes(4, 1)[0]


def test_the_facts_are_all_there() -> None:
    assert set(Namespace.__struct_fields__) == FACTS.keys() == OTHERS.keys()


def test_the_digest_is_stable() -> None:
    """Stored objects depend on it: if this changes, every store in the field turns into misses."""
    assert Namespace(**FACTS).digest.hex() == "d9cfd9df56cdc0cc78a6e0a487f8aa80"


@pytest.mark.parametrize("field", FACTS)
def test_another_value_of_any_fact_changes_digest_and_keys(field: str) -> None:
    one, other = Namespace(**FACTS), Namespace(**{**FACTS, field: OTHERS[field]})
    assert one.digest != other.digest
    assert SuffixKeys(one).key(PAGE_HASH) != SuffixKeys(other).key(PAGE_HASH)


@pytest.mark.parametrize("field", FACTS)
def test_a_missing_fact_is_refused(field: str) -> None:
    facts = {name: value for name, value in FACTS.items() if name != field}
    with pytest.raises(ConfigError) as caught:
        Namespace(**facts)
    assert caught.value.field == f"namespace.{field}"
    assert caught.value.problem == "missing"
    assert caught.value.allowed
    assert "fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_id", "  "),
        ("weights", None),
        ("dtype", "torch.bfloat16"),
        ("page_size", -64),
        ("page_size", 64.0),
        ("page_size", True),
        ("head_group", 3),
        ("layer_partition", 0),
        ("replicated", 1),
    ],
)
def test_a_nonsensical_fact_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"namespace.{field} = {re.escape(repr(value))}") as caught:
        Namespace(**{**FACTS, field: value})
    assert "allowed: " in str(caught.value)
    assert "fix: " in str(caught.value)


@pytest.mark.parametrize(
    "rank", [{"tp_rank": 2, "tp_size": 2}, {"tp_rank": -1}, {"pp_size": 0}, {"pp_rank": 1}, {"tp_size": 2**16}]
)
def test_a_rank_that_cannot_be_is_refused(rank: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"rank\.[tp]p_(rank|size)"):
        Rank(**rank)


def test_ranks_have_keys_and_coordinates_of_their_own() -> None:
    namespace = Namespace(**FACTS)
    places = [(rank, size) for size in (1, 2, 4) for rank in range(size)]
    ranks = [Rank(tp_rank=t, tp_size=n, pp_rank=p, pp_size=m) for t, n in places for p, m in places]
    schemes = [SuffixKeys(namespace, rank) for rank in ranks]
    assert len({scheme.key(PAGE_HASH) for scheme in schemes}) == len(ranks)
    assert len({scheme.chunks for scheme in schemes}) == len(ranks)
    assert all(0 <= scheme.chunks[0] < 2**64 for scheme in schemes)


def test_replicated_ranks_share_their_keys() -> None:
    namespace = Namespace(**{**FACTS, "total_kv_heads": 1, "head_group": 1, "replicated": True})
    one, other = SuffixKeys(namespace, Rank(tp_rank=0, tp_size=4)), SuffixKeys(namespace, Rank(tp_rank=3, tp_size=4))
    assert one.key(PAGE_HASH) == other.key(PAGE_HASH)
    assert one.chunks == other.chunks
    staged = SuffixKeys(namespace, Rank(tp_rank=3, tp_size=4, pp_rank=1, pp_size=2))
    assert staged.key(PAGE_HASH) != one.key(PAGE_HASH)


@pytest.mark.parametrize("model_id", ["a/b", "a-b", "a_b", "../../etc", "名前", "a b\0", "A/b", "x" * 500])
def test_keys_are_safe_file_names_whatever_the_model_is_called(model_id: str) -> None:
    scheme = SuffixKeys(Namespace(**{**FACTS, "model_id": model_id}), Rank(tp_rank=65534, tp_size=65535))
    key = scheme.key(PAGE_HASH)
    assert re.fullmatch(r"[0-9a-z_]{98,160}", key)
    assert key.startswith(PAGE_HASH.hex() + "_" + scheme.namespace_digest.hex())
    assert scheme.keys([PAGE_HASH, PAGE_HASH]) == [key, key]


def test_similar_model_names_do_not_collide() -> None:
    names = ["a/b", "a-b", "a_b", "a.b", "A/b", "a//b", "a/b/"]
    assert len({SuffixKeys(Namespace(**{**FACTS, "model_id": name})).key(PAGE_HASH) for name in names}) == len(names)
