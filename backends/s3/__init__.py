"""``s3://``: objects in a bucket of anything that speaks S3, through obstore (extra ``s3``)."""

from hicache_actors.backends.s3.backend import S3Backend
from hicache_actors.backends.s3.options import S3Options

__all__ = ["S3Backend", "S3Options"]
