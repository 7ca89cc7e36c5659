"""What a ``nixl://`` URL may say."""

from __future__ import annotations

from typing import Final, NamedTuple

from hicache_actors.backends.buckets import BUCKET_OPTIONS, Bucket, bucket_of
from hicache_actors.backends.file_options import FILE_OPTIONS, FileOptions
from hicache_actors.backends.urls import FIELD, parse_url
from hicache_actors.errors import ConfigError

IO: Final = ("uring", "aio", "posix_aio")


class FilesOptions(NamedTuple):
    """``nixl:///absolute/folder?io=uring&direct=1``, and the options of ``file://``"""

    files: FileOptions
    io: str  #: which of the plugin's queues: one of `IO`
    direct: bool  #: past the page cache, where addresses and lengths allow it

    @classmethod
    def parse(cls, url: str) -> FilesOptions:
        """`ConfigError` for what cannot be honoured."""
        parts = parse_url(url, "nixl", host=False, options=("io", "direct", *FILE_OPTIONS))
        if parts.path.strip("/") == "":
            raise ConfigError(
                FIELD, url, "names no folder and no bucket", allowed="nixl:///absolute/folder or nixl://BUCKET/PREFIX"
            )
        io, direct = parts.options.get("io", "uring"), parts.options.get("direct", "0")
        if io not in IO:
            raise ConfigError(FIELD, url, f"io={io!r}", allowed=IO)
        if direct not in ("0", "1"):
            raise ConfigError(FIELD, url, f"direct={direct!r}", allowed=["0", "1"])
        return cls(FileOptions.of(url, parts), io, direct == "1")


def bucket_options(url: str) -> Bucket:
    """``nixl://BUCKET[/PREFIX]?endpoint=http://HOST:PORT&region=REGION``; `ConfigError` for what cannot be honoured."""
    parts = parse_url(url, "nixl", options=BUCKET_OPTIONS)
    return bucket_of(url, parts, fix="nixl://BUCKET/PREFIX?endpoint=http://HOST:PORT, or nixl:///folder for files")
