"""`pip install` into new environments, as a wheel and editable, with a C++ compiler and without."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HAS_COMPILER = shutil.which("g++") is not None

CHECK = """
import asyncio, json
from hicache_actors import HiCache
from hicache_actors.cuda_ext.native.library import library, why_not
from hicache_actors.memory.kv import KVTensors
from hicache_actors.testing.small import SHAPE, open_small, prompt

async def main():
    async with open_small() as small:
        first = await small.engine.answer(prompt(4))
        await small.cache.drain(30.0)
        await small.engine.answer(prompt(15, family=1))
        await small.cache.drain(30.0)
        again = await small.engine.answer(prompt(4))
        assert (again.tokens, again.account.host) == (first.tokens, 16), again
        return dict(small.cache.snapshot().device.device)

device = asyncio.run(main())
print(json.dumps({"device": device, "why_not": why_not(), "path": library() and str(library().path)}))
"""
"""A prompt is computed, evicted from the device and loaded again from the host, byte for byte."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment -> its folder.  It finds the packages that this one has, but not this installation."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for old in site.glob("setuptools*"):  # that of the environment may be older than we need
        shutil.rmtree(old)
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def _source(folder: Path) -> Path:
    """A copy of the sources without anything that was built."""
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("hicache_actors", "backends", "cuda_ext"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return folder


def _run(environment: Path, *words: str, variables: Mapping[str, str] | None = None, cwd: Path) -> str:
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HICACHE_", "CC", "CXX"))
    }
    done = subprocess.run(
        [str(environment / "bin" / words[0]), *words[1:]],
        cwd=cwd,
        env={**plain, **(variables or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.install
@pytest.mark.parametrize("form", ["wheel", "editable"])
@pytest.mark.parametrize("compiler", ["compiler", "empty_path", "broken_compiler"])
def test_an_installation_works(environment: Path, compiler: str, form: str, tmp_path: Path) -> None:
    if compiler == "compiler" and not HAS_COMPILER:
        pytest.skip("there is no C++ compiler here")
    source = _source(tmp_path / "source")
    variables = {
        "compiler": {},
        "empty_path": {"PATH": str(environment / "bin")},
        "broken_compiler": {"CC": "false", "CXX": "false"},
    }[compiler]
    what = ["-e", str(source)] if form == "editable" else [str(source)]
    install = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", *what]
    _run(environment, *install, variables=variables, cwd=tmp_path)
    try:
        found = json.loads(_run(environment, "python", "-I", "-c", CHECK, cwd=tmp_path).splitlines()[-1])
        doctor = json.loads(_run(environment, "hicache", "doctor", "--no-probe", "--json", cwd=tmp_path))
    finally:
        _run(environment, "pip", "uninstall", "--quiet", "--yes", "hicache-actors", cwd=tmp_path)
    facts = doctor["sections"]["device"]
    if compiler == "compiler":
        assert found["why_not"] == ""
        assert found["device"]["implementation"] == "native threads"
        home = source if form == "editable" else environment
        assert Path(found["path"]).is_relative_to(home)
        assert facts["native_library"] == found["path"]
    else:
        assert found["path"] is None
        reason = "the native library is not in use: it was not built: install the package again where g++ is found"
        assert found["device"]["implementation"] == f"threads of Python ({reason})"
        assert facts["native_library"] is None
        assert any(reason in finding["text"] for finding in doctor["findings"])
