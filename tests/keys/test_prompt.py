"""Prompts: what is taken, what is refused and how, and that views and hashes stay true while tokens are appended."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_actors.keys import Prompt, Scope
from hicache_actors.keys.hashes import page_hashes

ids = st.integers(0, 2**63 - 1)

FORMS: dict[str, Callable[[list[int]], object]] = {
    "list": list,
    "tuple": tuple,
    "array q": lambda tokens: array("q", tokens),
    "array I": lambda tokens: array("I", tokens),
    "int64": lambda tokens: np.array(tokens, np.int64),
    "uint16": lambda tokens: np.array(tokens, np.uint16),
    "uint64": lambda tokens: np.array(tokens, np.uint64),
    "strided": lambda tokens: np.repeat(np.array(tokens, np.int64), 2)[::2],
    "big-endian": lambda tokens: np.array(tokens, ">i8"),
    "list of numpy integers": lambda tokens: [np.int32(token) for token in tokens],
    "torch int64": lambda tokens: torch.tensor(tokens, dtype=torch.int64),
    "torch int32": lambda tokens: torch.tensor(tokens, dtype=torch.int32),
    "memoryview": lambda tokens: memoryview(array("q", tokens)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [[], [0], [5, 65535, 0, 7]], ids=["empty", "one", "some"])
def test_forms(form: str, tokens: list[int]) -> None:
    prompt = Prompt(FORMS[form](tokens))
    assert prompt.tolist() == tokens
    assert len(prompt) == len(tokens)
    assert bytes(prompt.packed) == array("q", tokens).tobytes()


def test_a_range_will_do() -> None:
    assert Prompt(range(3, 6)).tolist() == [3, 4, 5]


@given(st.lists(ids, max_size=20))
def test_all_token_ids(tokens: list[int]) -> None:
    assert Prompt(tokens).tolist() == Prompt(np.array(tokens, np.uint64)).tolist() == tokens


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, -2, 3], ValueError, "token 1 is -2: token ids are not negative"),
        (array("q", [1, 2, -3]), ValueError, "token 2 is -3"),
        (np.array([[1, 2]]), ValueError, r"shape \(1, 2\)"),
        (np.array(7), ValueError, r"shape \(\)"),
        (torch.tensor([4, -1]), ValueError, "token 1 is -1"),
        ([0, 2**63], ValueError, f"token 1 is {2**63}: token ids are at most"),
        ([0, -(2**63) - 1], ValueError, "token 1 is -9223372036854775809: token ids are not negative"),
        (np.array([0, 2**63], np.uint64), ValueError, f"token 1 is {2**63}"),
        ([1, True], TypeError, r"token 1 is True \(bool\)"),
        ([1, np.bool_(False)], TypeError, "token 1 is"),
        (np.array([True]), TypeError, r"dtype bool \(token 0 is True\)"),
        ([1, 2.0], TypeError, r"token 1 is 2.0 \(float\)"),
        (np.array([1.5]), TypeError, r"dtype float64 \(token 0 is 1.5\)"),
        (array("d", [1.0]), TypeError, "dtype float64"),
        ([[1, 2]], TypeError, r"token 0 is \[1, 2\] \(list\)"),
        ([1, None], TypeError, r"token 1 is None \(NoneType\)"),
        ([1, "2"], TypeError, r"token 1 is '2' \(str\)"),
        ("text", TypeError, "tokens are str.*tokenize"),
        (b"text", TypeError, "tokens are bytes"),
        (5, TypeError, "tokens are int"),
        (None, TypeError, "tokens are NoneType"),
        ({1, 2}, TypeError, "tokens are set"),
    ],
)
def test_what_is_no_token_is_named(tokens: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Prompt(tokens)
    prompt = Prompt([1, 2])
    with pytest.raises(error, match=message):
        prompt.append(tokens)
    assert prompt.tolist() == [1, 2]


def test_tokens_are_copied() -> None:
    tokens = array("q", [1, 2, 3])
    prompt = Prompt(tokens)
    tokens[0] = 9
    tokens.append(4)
    assert prompt.tolist() == [1, 2, 3]


def test_the_view_is_read_only() -> None:
    with pytest.raises(TypeError):
        Prompt([1]).packed[0] = 0


@given(st.lists(st.lists(ids, max_size=7), max_size=12))
def test_views_stay_valid_after_append(pieces: list[list[int]]) -> None:
    prompt = Prompt([])
    views: list[tuple[memoryview, list[int]]] = []
    tokens: list[int] = []
    for piece in pieces:
        views.append((prompt.packed, tokens.copy()))
        prompt.append(piece)
        tokens += piece
    assert prompt.tolist() == tokens
    for view, then in views:
        assert view.cast("q").tolist() == then


@given(st.lists(st.lists(ids, max_size=7), max_size=8), st.integers(1, 5), st.booleans())
def test_incremental_hashes_equal_those_made_at_once(pieces: list[list[int]], page_size: int, scoped: bool) -> None:
    scope = Scope(lora="a", salt="b") if scoped else Scope()
    prompt = Prompt([], scope)
    for piece in pieces:
        prompt.append(piece)
        n_pages = len(prompt) // page_size
        assert prompt.page_hashes(page_size, n_pages) == page_hashes(prompt.packed, scope, page_size)
    n_pages = len(prompt) // page_size
    assert prompt.page_hashes(page_size, n_pages // 2) == prompt.page_hashes(page_size, n_pages)[: n_pages // 2]


def test_hashes_are_kept_per_page_size() -> None:
    prompt = Prompt(range(64))
    by_size = {size: list(prompt.page_hashes(size, 64 // size)) for size in (1, 4, 16, 64)}
    assert len({digest for digests in by_size.values() for digest in digests}) == 64 + 16 + 4 + 1
    assert all(prompt.page_hashes(size, 64 // size) == digests for size, digests in by_size.items())


def test_more_pages_than_there_are() -> None:
    with pytest.raises(ValueError, match="3 pages of 4 tokens asked for, the prompt has 11 tokens"):
        Prompt(range(11)).page_hashes(4, 3)
    assert Prompt([]).page_hashes(4, 0) == []


def test_threads_hash_while_the_engine_appends() -> None:
    prompt = Prompt(range(1000))
    expected = page_hashes(array("q", range(9000)).tobytes(), Scope(), 10)
    wrong: list[int] = []
    start = threading.Barrier(5)

    def hash_often() -> None:
        start.wait()
        for _ in range(200):
            n_pages = len(prompt) // 10
            if prompt.page_hashes(10, n_pages) != expected[:n_pages]:
                wrong.append(n_pages)

    threads = [threading.Thread(target=hash_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    for first in range(1000, 9000, 8):
        prompt.append(range(first, first + 8))
    for thread in threads:
        thread.join()
    assert wrong == []
    assert prompt.page_hashes(10, 900) == expected
