"""What a ``nixl://`` URL may say."""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from hicache_actors.backends.urls import FIELD, parse_url
from hicache_actors.errors import ConfigError

IO: Final = ("uring", "aio", "posix_aio")

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9_./=-]*")


class FilesOptions(NamedTuple):
    """``nixl:///absolute/folder?io=uring&direct=1``"""

    root: str
    io: str  #: which of the plugin's queues: one of `IO`
    direct: bool  #: past the page cache, where addresses and lengths allow it

    @classmethod
    def parse(cls, url: str) -> FilesOptions:
        """`ConfigError` for what cannot be honoured."""
        parts = parse_url(url, "nixl", host=False, options=("io", "direct"))
        if parts.path.strip("/") == "":
            raise ConfigError(
                FIELD, url, "names no folder and no bucket", allowed="nixl:///absolute/folder or nixl://BUCKET/PREFIX"
            )
        io, direct = parts.options.get("io", "uring"), parts.options.get("direct", "0")
        if io not in IO:
            raise ConfigError(FIELD, url, f"io={io!r}", allowed=IO)
        if direct not in ("0", "1"):
            raise ConfigError(FIELD, url, f"direct={direct!r}", allowed=["0", "1"])
        return cls(os.path.normpath(parts.path), io, direct == "1")


class BucketOptions(NamedTuple):
    """``nixl://BUCKET[/PREFIX]?endpoint=http://HOST:PORT&region=REGION``

    Keys and secrets are never in the URL: they come from ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, or the machine's role.
    """

    bucket: str
    prefix: str  #: "" or with a "/" at its end
    endpoint: str  #: empty: AWS
    region: str
    path_style: bool  #: the bucket is in the path, not in the host's name

    @classmethod
    def parse(cls, url: str) -> BucketOptions:
        """`ConfigError` for what cannot be honoured."""
        parts = parse_url(url, "nixl", options=("endpoint", "region", "addressing"))
        given = parts.options
        if not _BUCKET.fullmatch(parts.host):
            raise ConfigError(
                FIELD, url, f"{parts.host!r} is no name of a bucket", allowed="3 to 63 of a-z, 0-9, '.' and '-'",
                fix="nixl://BUCKET/PREFIX?endpoint=http://HOST:PORT, or nixl:///folder for files",
            )  # fmt: skip
        prefix = parts.path.strip("/")
        if prefix and (not _PREFIX.fullmatch(prefix) or {"", ".", ".."} & set(prefix.split("/"))):
            raise ConfigError(FIELD, url, f"prefix {prefix!r}", allowed="letters, digits, '_', '-', '=', '.' and '/'")
        endpoint = given.get("endpoint", "")
        if endpoint and not _is_endpoint(endpoint):
            raise ConfigError(FIELD, url, f"endpoint={endpoint!r}", allowed="http://HOST:PORT or https://HOST")
        addressing = given.get("addressing", "path" if endpoint else "virtual")
        if addressing not in ("path", "virtual"):
            raise ConfigError(FIELD, url, f"addressing={addressing!r}", allowed=["path", "virtual"])
        return cls(
            parts.host,
            f"{prefix}/" if prefix else "",
            endpoint,
            given.get("region") or os.environ.get("AWS_REGION", "us-east-1"),
            addressing == "path",
        )

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of the endpoint."""
        parts = urlsplit(self.endpoint)
        if parts.hostname is None:
            return None
        return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False
