"""What a ``file://`` URL may say."""

from __future__ import annotations

import math
import os
from typing import Final, NamedTuple

from hicache_actors.backends.ledger import Limits
from hicache_actors.backends.urls import FIELD, StorageURL, parse_url
from hicache_actors.errors import ConfigError

GB = 10**9
FILE_OPTIONS: Final = ("max_gb", "min_free_gb", "metadata_ttl_s")


class FileOptions(NamedTuple):
    """``file:///absolute/folder?max_gb=200&min_free_gb=20&metadata_ttl_s=5``, all but the folder optional.

    ``limits`` hold for the folder, over all processes.  ``metadata_ttl_s``: 0 is off, infinity (written ``never``) keeps what
    is known for ever.
    """

    root: str
    limits: Limits
    metadata_ttl_s: float

    @classmethod
    def parse(cls, url: str) -> FileOptions:
        """`ConfigError` for what cannot be honoured."""
        return cls.of(url, parse_url(url, "file", host=False, options=FILE_OPTIONS))

    @classmethod
    def of(cls, url: str, parts: StorageURL) -> FileOptions:
        """What the ``parts`` of a URL say, of this scheme or another; `ConfigError` for what cannot be honoured."""
        if parts.path.strip("/") == "":
            raise ConfigError(FIELD, url, "names no folder", allowed=f"{parts.scheme}:///absolute/path")
        given = parts.options
        max_bytes = gigabytes(url, "max_gb", given["max_gb"]) if "max_gb" in given else None
        if max_bytes == 0:
            raise ConfigError(
                FIELD, url, "max_gb=0 leaves no room", allowed="more than 0", fix="leave it out for no cap"
            )
        return cls(
            os.path.normpath(parts.path),
            Limits(max_bytes, gigabytes(url, "min_free_gb", given.get("min_free_gb", "0"))),
            _ttl_s(url, given.get("metadata_ttl_s", "0")),
        )


def gigabytes(url: str, name: str, text: str) -> int:
    """An option of a URL, in bytes.  Raises `ConfigError`."""
    return round(_number(url, name, text, "gigabytes of 1e9 bytes, 0 or more, e.g. 200 or 0.5") * GB)


def _ttl_s(url: str, text: str) -> float:
    if text == "never":
        return math.inf
    return _number(url, "metadata_ttl_s", text, "seconds, 0 (off), or never (nothing expires)")


def _number(url: str, name: str, text: str, allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # also refuses nan
        raise ConfigError(FIELD, url, f"{name}={text!r} is no such number", allowed=allowed)
    return value
