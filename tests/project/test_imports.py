"""The package is lazy: frontends and tools can use its pure parts without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hicache_actors

ROOT = Path(__file__).parents[2]

WITHOUT_TORCH = [
    "",
    ".backends",
    ".checks",
    ".command.cli",
    ".config",
    ".core",
    ".errors",
    ".events",
    ".keys",
    ".metrics",
    ".runtime",
]


@pytest.mark.parametrize("module", [f"hicache_actors{name}" for name in WITHOUT_TORCH])
def test_importing_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_public_names_without_torch_stay_without_it() -> None:
    code = "import sys; from hicache_actors import *; print('torch' in sys.modules)".replace(
        "*", "Config, Prompt, Scope, Match, ConfigError"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", hicache_actors.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(hicache_actors, name).__name__ == name
    assert name in dir(hicache_actors)


def test_the_lazy_table_is_what_type_checkers_see() -> None:
    assert hicache_actors.__file__ is not None
    tree = ast.parse(Path(hicache_actors.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    table = {name: f"hicache_actors.{module}" for name, module in hicache_actors._HOME_OF.items()}
    assert table == seen
    assert sorted(table) == sorted(hicache_actors.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'HyCache'"):
        _ = hicache_actors.HyCache


FOLDERS = {"hicache_actors": None, "backends": "backends", "cuda_ext": "cuda_ext"}


def test_imports_go_downwards() -> None:
    """In the order that docs/architecture.md gives, type checks included.  Below all stands what calls the native library."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Imports go downwards")[1].split(". `import")[0]
    order = {name: at for at, name in enumerate(re.findall(r"`(\w+)`", section))}
    wrong = []
    for folder, package in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            here = package or parts[0]
            if here not in order or parts[0] in ("native", "gpu_check"):  # the latter is a command
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("hicache_actors."):
                    continue
                assert node.module is not None
                there = node.module.split(".")[1]
                if order.get(there, len(order)) < order[here] and not node.module.startswith(
                    "hicache_actors.cuda_ext.native"
                ):
                    wrong.append(f"{file.relative_to(ROOT)}: {node.module}")
    packages = {file.parent.name for file in (ROOT / "hicache_actors").glob("*/__init__.py")}
    assert set(order) == packages | {"backends", "cuda_ext", "config", "errors"}
    assert not wrong, "imports go downwards: " + ", ".join(wrong)
