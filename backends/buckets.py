"""What the URLs of buckets say, for whoever speaks S3.

``SCHEME://BUCKET[/PREFIX]?endpoint=http://HOST:PORT&region=REGION&addressing=path``.  Keys and secrets are never in the URL: they
come from ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, or the machine's role.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from hicache_actors.backends.urls import FIELD, StorageURL
from hicache_actors.errors import ConfigError

BUCKET_OPTIONS: Final = ("endpoint", "region", "addressing")

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9_./=-]*")


class Bucket(NamedTuple):
    name: str
    prefix: str  #: "" or with a "/" at its end
    endpoint: str | None  #: None: AWS
    region: str | None  #: None: as the environment says
    path_style: bool  #: the bucket is in the path, not in the host's name

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of the endpoint."""
        if self.endpoint is None:
            return None
        parts = urlsplit(self.endpoint)
        assert parts.hostname is not None
        return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def bucket_of(url: str, parts: StorageURL, *, fix: str) -> Bucket:
    """What ``parts`` of ``url`` say, checked; `ConfigError` for what cannot be honoured, with ``fix`` if no bucket is named."""
    given = parts.options
    if not _BUCKET.fullmatch(parts.host):
        raise ConfigError(
            FIELD, url, f"{parts.host!r} is no name of a bucket", allowed="3 to 63 of a-z, 0-9, '.' and '-'", fix=fix
        )
    prefix = parts.path.strip("/")
    if prefix and (not _PREFIX.fullmatch(prefix) or {"", ".", ".."} & set(prefix.split("/"))):
        raise ConfigError(FIELD, url, f"prefix {prefix!r}", allowed="letters, digits, '_', '-', '=', '.' and '/'")
    endpoint = given.get("endpoint") or None
    if endpoint is not None and not _is_endpoint(endpoint):
        raise ConfigError(FIELD, url, f"endpoint={endpoint!r}", allowed="http://HOST:PORT or https://HOST")
    addressing = given.get("addressing", "path" if endpoint else "virtual")
    if addressing not in ("path", "virtual"):
        raise ConfigError(FIELD, url, f"addressing={addressing!r}", allowed=["path", "virtual"])
    return Bucket(
        parts.host, f"{prefix}/" if prefix else "", endpoint, given.get("region") or None, addressing == "path"
    )


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False
