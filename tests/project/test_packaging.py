"""What a wheel holds, and what an installation makes importable."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAPPED = {
    "hicache_actors": "hicache_actors",
    "backends": "hicache_actors/backends",
    "cuda_ext": "hicache_actors/cuda_ext",
}


def _modules() -> Iterator[tuple[Path, str]]:
    """Each source file of the library and its place in a wheel."""
    for folder, place in MAPPED.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file, f"{place}/{file.relative_to(ROOT / folder).as_posix()}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in MAPPED:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(target)], cwd=source, check=True, capture_output=True)
    (built,) = target.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_package_list_is_complete() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {place.rpartition("/")[0].replace("/", ".") for _, place in _modules()}
    assert listed == sorted(listed)
    assert set(listed) == found


def test_a_wheel_holds_every_module_where_it_is_imported_from(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {place for _, place in _modules()} <= names
    assert "hicache_actors/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hicache_actors"}


def test_a_wheel_holds_the_headers_and_what_the_compilers_at_hand_make_of_them(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    native = ROOT / "cuda_ext" / "native"
    headers = [native / "capi.h", *native.glob("capi/*.h"), *native.glob("include/*.h")]
    assert {
        f"hicache_actors/cuda_ext/{header.relative_to(ROOT / 'cuda_ext').as_posix()}" for header in headers
    } <= names
    built = "hicache_actors/cuda_ext/native/_native.abi3.so" in names
    assert built == (shutil.which("g++") is not None)
    kernels = {name for name in names if name.startswith("hicache_actors/cuda_ext/native/kernels/")}
    assert "hicache_actors/cuda_ext/native/kernels/copy.cu" in kernels
    assert len(kernels) == 1 + (shutil.which("nvcc") is not None)  # machine code for all GPUs


def test_a_wheel_says_what_it_needs_and_how_it_may_be_used(wheel: zipfile.ZipFile) -> None:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text
    for needed in ("torch", "anyio", "aiofiles", "msgspec", "structlog", "numpy", "psutil", "xxhash"):
        assert f"\nRequires-Dist: {needed}" in text


@pytest.mark.parametrize(
    ("module", "there"),
    [
        ("hicache_actors", True),
        ("hicache_actors.backends.backend", True),
        ("hicache_actors.cuda_ext.device", True),
        ("backends", False),
        ("cuda_ext", False),
    ],
)
def test_what_is_importable_from_outside(module: str, there: bool, tmp_path: Path) -> None:
    code = f"from importlib.util import find_spec; print(find_spec({module!r}) is not None)"
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(there)
