"""Storage URLs, checked: what a URL says and a backend does not know is refused, never ignored."""

from __future__ import annotations

import math
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from hicache_actors.errors import ConfigError

FIELD = "storage.url"


class StorageURL(NamedTuple):
    scheme: str
    host: str
    path: str
    options: dict[str, str]


def parse_url(
    url: str, scheme: str, *, host: bool = True, path: bool = True, options: tuple[str, ...] = ()
) -> StorageURL:
    """Split ``url``; `ConfigError` for another scheme, and for a host, path or option (``?name=value``) that has no meaning."""
    parts = urlsplit(url)
    if parts.scheme != scheme:
        raise ConfigError(FIELD, url, f"not a {scheme} URL", allowed=f"{scheme}://...")
    if parts.netloc and not host:
        raise ConfigError(
            FIELD,
            url,
            f"names a host, {parts.netloc!r}",
            allowed=f"{scheme}:///absolute/path",
            fix="write three slashes",
        )
    if parts.path.strip("/") and not path:
        raise ConfigError(FIELD, url, f"has a path, {parts.path!r}", allowed=f"{scheme}:// or {scheme}://NAME")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(given.keys() - set(options))
    if unknown or parts.fragment:
        what = f"unknown option {unknown[0]!r}" if unknown else f"a fragment, '#{parts.fragment}'"
        raise ConfigError(FIELD, url, what, allowed=options or "no options", fix="remove it (or write %23 for a '#')")
    return StorageURL(parts.scheme, unquote(parts.netloc), unquote(parts.path), given)


def number(url: str, name: str, text: str, *, whole: bool = False, least: float = 0) -> float:
    """The number that an option of ``url`` gives; `ConfigError` if it is none, or less than ``least``."""
    try:
        value = float(int(text)) if whole else float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:  # also refuses nan
        kind = "a whole number" if whole else "a number"
        raise ConfigError(FIELD, url, f"{name}={text!r} is no such number", allowed=f"{kind}, {least:g} or more")
    return value
