"""URLs to backends, and what importing them costs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import hicache_actors.backends
from hicache_actors.backends import Backend, FileBackend, MemoryBackend, known_schemes, open_backend
from hicache_actors.backends.registry import _BUILT_IN, ENTRY_POINT_GROUP
from hicache_actors.errors import ConfigError
from hicache_actors.runtime.workers import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("test", 1)
    yield workers
    workers.close()


def register(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Make entry points, as installed packages do."""
    points = [importlib.metadata.EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in values.items()]
    monkeypatch.setattr("hicache_actors.backends.registry.entry_points", lambda group: points)


def test_built_in_schemes(workers: Workers, tmp_path: Path) -> None:
    assert isinstance(open_backend("memory://", workers), MemoryBackend)
    assert isinstance(open_backend("memory://shared", workers), MemoryBackend)
    assert isinstance(open_backend(f"file://{tmp_path}", workers), FileBackend)
    assert {"file", "memory"} <= set(known_schemes())


@pytest.mark.parametrize("url", ["nosuch://localhost", "memori://x"])
def test_an_unknown_scheme_names_those_that_are_known(url: str, workers: Workers) -> None:
    with pytest.raises(ConfigError, match="unknown scheme") as caught:
        open_backend(url, workers)
    assert caught.value.field == "storage.url"
    assert caught.value.allowed == ", ".join(map(repr, sorted(_BUILT_IN)))
    assert ENTRY_POINT_GROUP in str(caught.value)


@pytest.mark.parametrize("url", ["", "/var/cache", "file", "file:/var", "://x", "C:\\cache"])
def test_what_is_no_url(url: str, workers: Workers) -> None:
    with pytest.raises(
        ConfigError, match=r"not a URL; allowed: .*'file://\.\.\.'.*'memory://\.\.\.'.*; fix: .*file:///"
    ) as caught:
        open_backend(url, workers)
    assert caught.value.value == url


@pytest.mark.parametrize(
    ("url", "problem"),
    [("memory://a/b", "has a path"), ("memory://?size=1", "unknown option 'size'"), ("file://host/p", "names a host")],
)
def test_what_a_built_in_scheme_does_not_know(url: str, problem: str, workers: Workers) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_backend(url, workers)


class ThirdParty(MemoryBackend):
    def __init__(self, url: str, workers: Workers) -> None:
        super().__init__()
        self.url, self.workers = url, workers


def no_backend(url: str, workers: Workers) -> object:
    return {}


def test_a_scheme_of_another_package(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "third_party", SimpleNamespace(Store=ThirdParty))
    register(monkeypatch, shelf="third_party:Store")
    backend = open_backend("shelf://a/b?c=d", workers)
    assert isinstance(backend, ThirdParty)
    assert (backend.url, backend.workers) == ("shelf://a/b?c=d", workers)
    assert known_schemes() == sorted([*_BUILT_IN, "shelf"])


def test_no_package_takes_over_a_built_in_scheme(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, memory="third_party:Store")
    assert type(open_backend("memory://", workers)) is MemoryBackend


def test_a_registration_that_cannot_be_imported(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, shelf="no_such_package:Store")
    with pytest.raises(ConfigError, match="no_such_package:Store, which cannot be imported"):
        open_backend("shelf://", workers)


def test_a_registration_that_makes_no_backend(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "third_party", SimpleNamespace(make=no_backend))
    register(monkeypatch, shelf="third_party:make")
    with pytest.raises(ConfigError, match="'shelf' returned a dict"):
        open_backend("shelf://", workers)


def test_two_packages_with_one_scheme(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [importlib.metadata.EntryPoint("shelf", value, ENTRY_POINT_GROUP) for value in ("one:Store", "two:Store")]
    monkeypatch.setattr("hicache_actors.backends.registry.entry_points", lambda group: points)
    with pytest.raises(ConfigError, match=r"registered by several packages.*one:Store.*two:Store"):
        open_backend("shelf://", workers)


def test_built_in_schemes_need_no_registration(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_actors.backends.registry.entry_points", lambda group: [])
    assert known_schemes() == sorted(_BUILT_IN)
    assert isinstance(open_backend("memory://", workers), MemoryBackend)
    assert isinstance(open_backend("file:///tmp/x", workers), FileBackend)


def test_every_public_name_resolves() -> None:
    assert {name for name in hicache_actors.backends.__all__ if not hasattr(hicache_actors.backends, name)} == set()
    assert set(hicache_actors.backends.__all__) <= set(dir(hicache_actors.backends))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = hicache_actors.backends.Nothing


def test_nothing_here_imports_torch() -> None:
    program = """
import sys
import hicache_actors.backends as backends, hicache_actors.keys, hicache_actors.backends.objects
import hicache_actors.testing.backend_contract
assert all(getattr(backends, name) for name in backends.__all__)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_the_contract_is_three_methods() -> None:
    assert Backend.__abstractmethods__ == {"exists", "read", "write"}
