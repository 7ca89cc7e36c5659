"""The package is lazy: frontends and tools can use its pure parts without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hicache_actors

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
