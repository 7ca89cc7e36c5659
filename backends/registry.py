"""From a URL to a backend."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final

from hicache_actors.backends.backend import Backend, BackendFactory
from hicache_actors.backends.layers import LayeredBackend
from hicache_actors.backends.layers.options import names_layers
from hicache_actors.backends.urls import FIELD
from hicache_actors.errors import ConfigError, HiCacheError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

ENTRY_POINT_GROUP: Final = "hicache_actors.backends"

_BUILT_IN: Final = {
    "memory": ("hicache_actors.backends.memory", "MemoryBackend"),
    "file": ("hicache_actors.backends.file", "FileBackend"),
    "dynamic": ("hicache_actors.backends.foreign.dynamic", "dynamic_backend"),
    "sglang": ("hicache_actors.backends.foreign.sglang", "SGLangBackend"),
    "lmcache": ("hicache_actors.backends.lmcache", "LMCacheBackend"),
    "mooncake": ("hicache_actors.backends.mooncake", "MooncakeBackend"),
    "nixl": ("hicache_actors.backends.nixl", "nixl_backend"),
    "sglang-file": ("hicache_actors.backends.sglang_file", "SGLangFileBackend"),
    "s3": ("hicache_actors.backends.s3", "S3Backend"),
    **dict.fromkeys(("slab", "mmap", "shm"), ("hicache_actors.backends.slab", "SlabBackend")),
    **dict.fromkeys(
        ("redis", "redis+unix", "valkey", "valkey+unix"), ("hicache_actors.backends.redis", "RedisBackend")
    ),
}
_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://")


def open_backend(url: str, workers: Workers) -> Backend:
    """The backend that ``url`` names, built but not connected: await its `open` next.

    ``workers`` lends the threads for blocking calls.  Several URLs with spaces between are one store in layers, the nearest first.
    Raises `ConfigError` for a URL that cannot be honoured.
    """
    if names_layers(url):
        return LayeredBackend(url, workers, open_one=open_backend)
    match = _SCHEME.match(url)
    if match is None:
        raise ConfigError(
            FIELD, url, "not a URL", allowed=[f"{scheme}://..." for scheme in known_schemes()],
            fix="for a folder write file:///absolute/path",
        )  # fmt: skip
    factory = _factory(url, match[1])
    try:
        backend = factory(url, workers)
    except HiCacheError:
        raise
    except Exception as error:  # of a class that somebody else has written
        raise ConfigError(
            FIELD, url, f"its store cannot be made: {type(error).__name__}: {error}", allowed="what the class takes",
            fix="correct the URL, or the class: it is called with the URL and the threads",
        ) from error  # fmt: skip
    if not isinstance(backend, Backend):
        raise ConfigError(
            FIELD, url, f"the factory of scheme {match[1]!r} returned a {type(backend).__name__}",
            allowed="an instance of hicache_actors.backends.Backend", fix="correct the package that registers the scheme",
        )  # fmt: skip
    return backend


def known_schemes() -> list[str]:
    return sorted({*_BUILT_IN, *(point.name for point in _installed())})


def _factory(url: str, scheme: str) -> BackendFactory:
    """Built-in schemes first: no installed package can take them over."""
    if scheme in _BUILT_IN:
        module, name = _BUILT_IN[scheme]
        factory: BackendFactory = getattr(import_module(module), name)
        return factory
    points = [point for point in _installed() if point.name == scheme]
    if not points:
        raise ConfigError(
            FIELD, url, f"unknown scheme {scheme!r}", allowed=known_schemes(),
            fix=f"install the package that registers it (entry point group {ENTRY_POINT_GROUP!r})",
        )  # fmt: skip
    if len({point.value for point in points}) > 1:
        raise ConfigError(
            FIELD, url, f"scheme {scheme!r} is registered by several packages: {sorted(p.value for p in points)}",
            allowed="one registration per scheme", fix="uninstall the others",
        )  # fmt: skip
    try:
        loaded: BackendFactory = points[0].load()
    except Exception as error:  # whatever its module raises
        raise ConfigError(
            FIELD, url, f"scheme {scheme!r} is registered as {points[0].value}, which cannot be imported: {error}",
            allowed=known_schemes(), fix="install what it needs, or uninstall it",
        ) from error  # fmt: skip
    return loaded


def _installed() -> list[EntryPoint]:
    return [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in _BUILT_IN]
