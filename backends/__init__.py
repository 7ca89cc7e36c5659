"""Storage backends (L3).  Importable without torch; each module is loaded when a name of it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_actors.backends.backend import Backend as Backend
    from hicache_actors.backends.backend import BackendFactory as BackendFactory
    from hicache_actors.backends.backend import Stored as Stored
    from hicache_actors.backends.backend import map_errors as map_errors
    from hicache_actors.backends.file import FileBackend as FileBackend
    from hicache_actors.backends.memory import MemoryBackend as MemoryBackend
    from hicache_actors.backends.registry import known_schemes as known_schemes
    from hicache_actors.backends.registry import open_backend as open_backend
    from hicache_actors.backends.wrappers import Faulty as Faulty
    from hicache_actors.backends.wrappers import Hanging as Hanging
    from hicache_actors.backends.wrappers import Logging as Logging
    from hicache_actors.backends.wrappers import Slow as Slow

_HOME = {
    "Backend": "backend",
    "BackendFactory": "backend",
    "Faulty": "wrappers",
    "FileBackend": "file",
    "Hanging": "wrappers",
    "Logging": "wrappers",
    "MemoryBackend": "memory",
    "Slow": "wrappers",
    "Stored": "backend",
    "known_schemes": "registry",
    "map_errors": "backend",
    "open_backend": "registry",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
