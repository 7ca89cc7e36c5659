"""The native digests are those of xxhash and hashlib, whatever the length, the alignment and the cut between two runs."""

from __future__ import annotations

import random
import shutil
import subprocess
from array import array
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from hicache_actors.cuda_ext import native
from hicache_actors.cuda_ext.native.buffers import address
from hicache_actors.cuda_ext.native.digests import Digests, names
from hicache_actors.cuda_ext.native.library import Library, library

NATIVE = Path(native.__file__).parent
LOADED = library()
pytestmark = pytest.mark.skipif(LOADED is None, reason="the native library is not in use here")

NOISE = random.Random(1).randbytes(1 << 18)


@pytest.fixture(scope="module", params=["as installed", "isa 0", "isa 1"])
def digests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """As the library chooses on this machine, and as it would on older ones."""
    assert LOADED is not None
    if request.param == "as installed":
        return Digests(LOADED)
    path = tmp_path_factory.mktemp("native") / "digests.so"
    sources = [NATIVE / "src" / name for name in ("abi.cpp", "digest.cpp", "sha256.cpp", "xxh3.cpp")]
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", f"-DHIC_ISA={request.param[-1]}", f"-I{NATIVE}"]
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    subprocess.run([compiler, *flags, "-o", path, *sources], check=True)
    return Digests(Library(path))


@given(n_bytes=st.one_of(st.integers(241, 5000), st.integers(241, 200_000)), skip=st.integers(0, 130), data=st.data())
def test_checksums_are_those_of_xxhash(digests: Digests, n_bytes: int, skip: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, n_bytes))
    run = memoryview(bytearray(NOISE[: skip + n_bytes]))[skip:]
    other = memoryview(bytearray(b"x" + NOISE[skip + cut : skip + n_bytes]))[1:]
    assert digests.xxh3_128(run[:cut], other) == xxh3_128_digest(run)


def test_every_length_around_blocks(digests: Digests) -> None:
    for n_bytes in (*range(241, 1400), *range(4096 - 70, 4096 + 70)):
        run = memoryview(bytearray(NOISE[:n_bytes]))
        assert digests.xxh3_128(run[:0], run) == xxh3_128_digest(run), n_bytes


def test_short_inputs_are_refused(digests: Digests) -> None:
    with pytest.raises(ValueError, match="240 bytes"):
        digests.xxh3_128(memoryview(bytearray(100)), memoryview(bytearray(140)))


@given(
    parent=st.one_of(st.just(b""), st.binary(min_size=32, max_size=32)),
    page_tokens=st.integers(1, 130),
    pages=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_page_hashes_are_those_of_hashlib(
    digests: Digests, parent: bytes, page_tokens: int, pages: int, seed: int
) -> None:
    chance = random.Random(seed)
    tokens = array("q", (chance.choice((7, 2**32 - 1, chance.getrandbits(31))) for _ in range(pages * page_tokens)))
    if tokens and seed % 3 == 0:
        tokens[chance.randrange(len(tokens))] = chance.choice((2**32, 2**63 - 1))
    expected, before = [], parent
    for first in range(0, len(tokens), page_tokens):
        page = np.array(tokens[first : first + page_tokens])
        wide = page.max() > 2**32 - 1
        before = sha256(
            before + (b"\xff" + page.astype("<u8").tobytes() if wide else page.astype("<u4").tobytes())
        ).digest()
        expected.append(before)
    skewed = memoryview(bytearray(b"x" + tokens.tobytes()))[1:]  # prompts are hashed in place, wherever they lie
    assert digests.page_hashes(parent, skewed, pages, page_tokens) == expected


def test_hashes_of_one_page_of_every_length(digests: Digests) -> None:
    for page_tokens in range(200):
        tokens = array("q", range(page_tokens))
        [found] = digests.page_hashes(b"", memoryview(tokens).cast("B"), 1, page_tokens)
        assert found == sha256(np.array(tokens).astype("<u4").tobytes()).digest()


def test_a_parent_of_another_length_is_refused(digests: Digests) -> None:
    with pytest.raises(ValueError, match="0 or 32"):
        digests.page_hashes(b"short", memoryview(bytearray(8)), 1, 1)


def test_names_of_another_length_are_refused() -> None:
    for namespace, page_hash in ((b"n" * 15, b"h" * 32), (b"n" * 16, b"h" * 33)):
        with pytest.raises(ValueError, match="16 bytes"):
            names(namespace, [page_hash], [0])


def test_an_object_without_a_header_is_not_sealed(digests: Digests) -> None:
    objects = [memoryview(bytearray(4096)), memoryview(bytearray(4095))]
    with pytest.raises(ValueError, match="object 1"):
        digests.seal(objects, names(b"n" * 16, [b"h" * 32] * 2, [0]))
    assert bytes(objects[0]) == bytes(4096)
    assert digests.verify(objects, names(b"n" * 16, [b"h" * 32] * 2, [0])) == [3, 2]


def test_addresses_are_those_of_the_bytes() -> None:
    data = np.arange(64, dtype=np.uint8)
    for view in (data.data, memoryview(data.tobytes())):
        assert address(view[5:]) == address(view) + 5
    assert address(data.data) == data.ctypes.data
    assert address(memoryview(b"")) == 0
    with pytest.raises((ValueError, TypeError, BufferError)):
        address(memoryview(bytearray(8))[::2])
