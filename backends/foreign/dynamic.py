"""``dynamic://package.module/ClassName?any=option``: a backend by its class, for who would not write an entry point."""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from hicache_actors.backends.backend import Backend
from hicache_actors.backends.urls import FIELD
from hicache_actors.errors import ConfigError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_CLASS: Final = re.compile(r"/[A-Za-z_]\w*")


class Named(NamedTuple):
    found: Any  #: the class
    options: dict[str, str]


def named_by(url: str, scheme: str) -> Named:
    """What ``scheme://package.module/Name?options`` names.  Raises `ConfigError`."""
    parts = urlsplit(url)
    form = f"{scheme}://package.module/ClassName"
    if parts.scheme != scheme or not _MODULE.fullmatch(parts.netloc) or not _CLASS.fullmatch(parts.path):
        raise ConfigError(FIELD, url, "names no class", allowed=form)
    try:
        module = import_module(parts.netloc)
    except Exception as error:  # whatever it raises while it is imported
        what = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            FIELD, url, f"{parts.netloc} cannot be imported: {what}", allowed=form,
            fix="install it, or put its folder on PYTHONPATH",
        ) from error  # fmt: skip
    try:
        found = getattr(module, parts.path[1:])
    except AttributeError as error:
        raise ConfigError(FIELD, url, str(error), allowed=form, fix="correct the name of the class") from error
    return Named(found, dict(parse_qsl(parts.query, keep_blank_values=True)))


def dynamic_backend(url: str, workers: Workers) -> Backend:
    """An instance of the class, which is given the whole URL and the threads, as a registered scheme is."""
    found = named_by(url, "dynamic").found
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ConfigError(
            FIELD, url, f"{found!r} is no backend", allowed="a subclass of hicache_actors.backends.Backend",
            fix="for a HiCacheStorage of SGLang write sglang:// in place of dynamic://",
        )  # fmt: skip
    backend: Backend = found(url, workers)  # type: ignore[call-arg]
    return backend
