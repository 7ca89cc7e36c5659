"""``slab://``, ``mmap://`` and ``shm://``: objects in the slots of one preallocated file, shared by processes of one host.

``table`` (who is in which slot) is memory that all processes map, in the same file; ``locks`` end with the process that holds them;
``medium`` moves the bytes: past the page cache (slab; short objects through it, by ``page_cache``), or through a mapping (mmap, and
shm on a file system in memory).
"""

from hicache_actors.backends.slab.backend import SlabBackend
from hicache_actors.backends.slab.options import SlabOptions

__all__ = ["SlabBackend", "SlabOptions"]
