"""Page hashes: golden vectors of SGLang 0.5.23, and properties of the chain."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_actors.keys import NO_SCOPE, Prompt, Scope
from hicache_actors.keys.hashes import HASH_BYTES, chain, page_hashes, scope_root

pytestmark = pytest.mark.usefixtures("both_ways")

narrow_ids = st.integers(0, 2**32 - 1)
wide_ids = st.integers(2**32, 2**63 - 1)
prompts = st.lists(narrow_ids | wide_ids, max_size=60)
page_sizes = st.integers(1, 9)
texts = st.none() | st.text(max_size=4)
scopes = st.builds(Scope, lora=texts, salt=texts)


def packed(tokens: list[int]) -> bytes:
    return array("q", tokens).tobytes()


def hashes_of(tokens: list[int], page_size: int, scope: Scope = NO_SCOPE) -> list[bytes]:
    return page_hashes(packed(tokens), scope, page_size)


def test_golden_plain() -> None:
    assert [digest.hex() for digest in hashes_of([1, 2, 3, 4, 5, 6, 7, 8], 4)] == [
        "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
        "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6",
    ]


def test_golden_lora() -> None:
    [digest] = hashes_of([1, 2, 3, 4], 4, Scope(lora="loraX"))
    assert digest.hex() == "85e7ce3a663d6d4b8966baf0bfd3e56d0e396b6a9d0dbfab45f660f5c2e948bc"


def test_golden_salt() -> None:
    [digest] = hashes_of([1, 2, 3, 4], 4, Scope(salt="s"))
    assert digest.hex() == "3c1af139207cc370e3e1301de86b803c9991780f62b27410d259d68c09bea59c"


def test_golden_wide_id() -> None:
    [digest] = hashes_of([1, 2, 3, 2**33], 4)
    assert digest.hex() == "a2ad9fe92a425d06aaaf12e074281aa24f51ecd05ff669e37f20e537b82238a1"


def test_golden_through_a_prompt() -> None:
    digests = Prompt([1, 2, 3, 4, 5, 6, 7, 8, 9]).page_hashes(4, 2)
    assert [digest[:4].hex() for digest in digests] == ["cf97adee", "4ebfa8a1"]


@given(prompts, page_sizes, scopes, st.data())
def test_a_chain_may_be_split_at_any_page(tokens: list[int], page_size: int, scope: Scope, data: st.DataObject) -> None:
    whole = hashes_of(tokens, page_size, scope)
    split = data.draw(st.integers(0, len(whole)))
    head = chain(scope_root(scope), packed(tokens)[: split * page_size * 8], page_size)
    parent = head[-1] if head else scope_root(scope)
    assert head + chain(parent, packed(tokens)[split * page_size * 8 :], page_size) == whole


@given(prompts, page_sizes)
def test_only_whole_pages_are_hashed(tokens: list[int], page_size: int) -> None:
    digests = hashes_of(tokens, page_size)
    assert len(digests) == len(tokens) // page_size
    assert digests == hashes_of(tokens[: len(digests) * page_size], page_size)
    assert {len(digest) for digest in digests} <= {HASH_BYTES}


@given(prompts, prompts, page_sizes)
def test_equal_hashes_mean_equal_prefixes(one: list[int], other: list[int], page_size: int) -> None:
    pairs = zip(hashes_of(one, page_size), hashes_of(other, page_size), strict=False)
    for page, (a, b) in enumerate(pairs):
        end = (page + 1) * page_size
        assert (a == b) == (one[:end] == other[:end])


@given(st.lists(narrow_ids, min_size=1, max_size=8))
def test_a_wide_page_is_no_narrow_page_in_disguise(tokens: list[int]) -> None:
    """The bytes of two narrow ids are the bytes of one wide id; the hashes must differ all the same."""
    halves = [half for token in tokens for half in (token, 1)]
    wide = [token | 1 << 32 for token in tokens]
    assert array("I", halves).tobytes() == packed(wide)
    assert hashes_of(halves, len(halves)) != hashes_of(wide, len(wide))


@given(scopes, scopes)
def test_scopes_are_told_apart(one: Scope, other: Scope) -> None:
    assert (scope_root(one) == scope_root(other)) == (one == other)
    assert (hashes_of([1, 2], 1, one) == hashes_of([1, 2], 1, other)) == (one == other)


def test_an_empty_text_is_not_an_absent_one() -> None:
    scopes = [Scope(), Scope(lora=""), Scope(salt=""), Scope(lora="", salt=""), Scope(lora="a"), Scope(salt="a")]
    assert len({scope_root(scope) for scope in scopes}) == len(scopes)
