"""``nixl://``: objects through NIXL's plugins, by address: files (POSIX), or a bucket (OBJ) (extra ``nixl``)."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hicache_actors.backends.backend import Backend
from hicache_actors.backends.nixl.bucket import NixlBucket
from hicache_actors.backends.nixl.files import NixlFiles
from hicache_actors.backends.nixl.options import FilesOptions, bucket_options

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

__all__ = ["FilesOptions", "NixlBucket", "NixlFiles", "bucket_options", "nixl_backend"]


def nixl_backend(url: str, workers: Workers) -> Backend:
    """``nixl:///folder`` or ``nixl://BUCKET``.  Raises `ConfigError` and `MissingExtraError`."""
    return NixlBucket(url, workers) if urlsplit(url).netloc else NixlFiles(url, workers)
