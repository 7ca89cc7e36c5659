"""What URLs of buckets say, without a client of any."""

from __future__ import annotations

import pytest

from hicache_actors.backends.buckets import bucket_of
from hicache_actors.backends.nixl.options import bucket_options
from hicache_actors.backends.s3.options import S3Options
from hicache_actors.backends.urls import parse_url
from hicache_actors.errors import ConfigError


@pytest.mark.parametrize("scheme", ["s3", "nixl"])
@pytest.mark.parametrize(
    ("rest", "found", "address"),
    [
        ("kv-pages", ("kv-pages", "", None, None, False), None),
        ("kv-pages/", ("kv-pages", "", None, None, False), None),
        ("kv0/a/b?region=eu", ("kv0", "a/b/", None, "eu", False), None),
        ("kv1?endpoint=http://h:9000", ("kv1", "", "http://h:9000", None, True), ("h", 9000)),
        ("kv1?endpoint=http://h", ("kv1", "", "http://h", None, True), ("h", 80)),
        ("kv1?endpoint=https://h&addressing=virtual", ("kv1", "", "https://h", None, False), ("h", 443)),
    ],
)
def test_both_schemes_say_it_alike(
    scheme: str, rest: str, found: tuple[object, ...], address: tuple[str, int] | None
) -> None:
    url = f"{scheme}://{rest}"
    bucket = S3Options.parse(url).bucket if scheme == "s3" else bucket_options(url)
    assert bucket == found
    assert bucket.address == address


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("UPPER", "no name of a bucket"),
        ("kv", "no name of a bucket"),
        ("bucket/../x", "prefix"),
        ("bucket/a//b", "prefix"),
        ("bucket/a%20b", "prefix"),
        ("bucket?endpoint=here", "endpoint"),
        ("bucket?endpoint=http://", "endpoint"),
        ("bucket?endpoint=http://h:x", "endpoint"),
        ("bucket?addressing=x", "addressing"),
    ],
)
def test_what_cannot_be_honoured(rest: str, words: str) -> None:
    url = f"s3://{rest}"
    parts = parse_url(url, "s3", options=("endpoint", "region", "addressing"))
    with pytest.raises(ConfigError, match=words):
        bucket_of(url, parts, fix="name one")
