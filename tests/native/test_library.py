"""The native library is in use wherever it could have been built, and one that does not fit is refused."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from hicache_actors.cuda_ext.native import library as loading
from hicache_actors.cuda_ext.native import structs
from hicache_actors.cuda_ext.native.library import library, why_not


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here: the library is optional")
def test_the_library_is_in_use_where_there_is_a_compiler() -> None:
    assert library() is not None, why_not()
    assert why_not() == ""


def test_switched_off_it_says_so() -> None:
    assert loading._find("off") == (None, "HICACHE_NATIVE=off")


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "_native.so"
    path.write_bytes(b"no library")
    found, reason = loading._find(str(path))
    assert found is None
    assert reason.startswith("_native.so cannot be loaded: ")


@pytest.fixture
def built() -> Path:
    found = library()
    if found is None:
        pytest.skip(f"the native library is not in use: {why_not()}")
    return found.path


def test_another_version_of_the_abi_is_refused(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "ABI_VERSION", structs.ABI_VERSION + 1)
    found, reason = loading._find(str(built))
    assert found is None
    assert f"speaks version {structs.ABI_VERSION} of the ABI, this package {structs.ABI_VERSION + 1}" in reason


def test_another_layout_of_a_struct_is_refused(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Grown(ctypes.Structure):
        _fields_ = (*structs.Size._fields_, ("more", ctypes.c_uint64))

    monkeypatch.setitem(structs.STRUCTS, "hic_size", Grown)
    found, reason = loading._find(str(built))
    assert found is None
    assert "lays out hic_size in 16 bytes, this package in 24: install the package again" in reason


def test_a_struct_that_the_library_lacks_is_refused(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(structs.STRUCTS, "hic_zzz", structs.Size)
    assert loading._find(str(built))[1].startswith(f"{built.name} lays out hic_zzz in None bytes, this package in 16")
