"""What an ``s3://`` URL may say."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from hicache_actors.backends.urls import FIELD, number, parse_url
from hicache_actors.errors import ConfigError

_NAMES: Final = ("endpoint", "region", "requests", "timeout_s", "connect_timeout_s", "retries", "addressing")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9_./=-]*")


class S3Options(NamedTuple):
    """``s3://BUCKET[/PREFIX]``; what is left out of the query is as ``AWS_...`` variables, or S3 itself, say.

    Keys and secrets are never in the URL: they come from ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, or the machine's role.
    """

    bucket: str
    prefix: str  #: "" or with a "/" at its end
    endpoint: str | None
    region: str | None
    requests: int  #: under way at once
    timeout_s: float  #: of one request
    connect_timeout_s: float
    retries: int
    path_style: bool  #: the bucket is in the path, not in the host's name

    @classmethod
    def parse(cls, url: str) -> S3Options:
        """`ConfigError` for what cannot be honoured."""
        parts = parse_url(url, "s3", options=_NAMES)
        given = parts.options
        if not _BUCKET.fullmatch(parts.host):
            raise ConfigError(
                FIELD, url, f"{parts.host!r} is no name of a bucket", allowed="3 to 63 of a-z, 0-9, '.' and '-'",
                fix="s3://BUCKET/PREFIX?endpoint=http://HOST:PORT",
            )  # fmt: skip
        prefix = parts.path.strip("/")
        if not _PREFIX.fullmatch(prefix) or any(part in ("", ".", "..") for part in prefix.split("/")[: len(prefix)]):
            raise ConfigError(FIELD, url, f"prefix {prefix!r}", allowed="letters, digits, '_', '-', '=', '.' and '/'")
        endpoint = given.get("endpoint")
        if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
            raise ConfigError(FIELD, url, f"endpoint={endpoint!r}", allowed="http://HOST:PORT or https://HOST")
        addressing = given.get("addressing", "path" if endpoint else "virtual")
        if addressing not in ("path", "virtual"):
            raise ConfigError(FIELD, url, f"addressing={addressing!r}", allowed=["path", "virtual"])
        return cls(
            parts.host,
            f"{prefix}/" if prefix else "",
            endpoint,
            given.get("region"),
            int(number(url, "requests", given.get("requests", "16"), whole=True, least=1)),
            number(url, "timeout_s", given.get("timeout_s", "5"), least=0.001),
            number(url, "connect_timeout_s", given.get("connect_timeout_s", "2"), least=0.001),
            int(number(url, "retries", given.get("retries", "1"), whole=True)),
            addressing == "path",
        )
