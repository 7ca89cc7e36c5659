"""What an ``s3://`` URL may say."""

from __future__ import annotations

from typing import Final, NamedTuple

from hicache_actors.backends.buckets import BUCKET_OPTIONS, Bucket, bucket_of
from hicache_actors.backends.urls import number, parse_url

_NAMES: Final = (*BUCKET_OPTIONS, "requests", "timeout_s", "connect_timeout_s", "retries")


class S3Options(NamedTuple):
    """``s3://BUCKET[/PREFIX]``; what is left out of the query is as ``AWS_...`` variables, or S3 itself, say."""

    bucket: Bucket
    requests: int  #: under way at once
    timeout_s: float  #: of one request
    connect_timeout_s: float
    retries: int

    @classmethod
    def parse(cls, url: str) -> S3Options:
        """`ConfigError` for what cannot be honoured."""
        parts = parse_url(url, "s3", options=_NAMES)
        given = parts.options
        return cls(
            bucket_of(url, parts, fix="s3://BUCKET/PREFIX?endpoint=http://HOST:PORT"),
            int(number(url, "requests", given.get("requests", "16"), whole=True, least=1)),
            number(url, "timeout_s", given.get("timeout_s", "5"), least=0.001),
            number(url, "connect_timeout_s", given.get("connect_timeout_s", "2"), least=0.001),
            int(number(url, "retries", given.get("retries", "1"), whole=True)),
        )
