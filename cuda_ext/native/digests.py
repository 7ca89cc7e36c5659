"""Checksums of stored objects and hashes of pages, a batch a call and without the GIL (capi/digest.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Final

from hicache_actors.cuda_ext.native.buffers import address, addresses, lengths
from hicache_actors.cuda_ext.native.library import Library, library
from hicache_actors.cuda_ext.native.structs import Names

_HASH_BYTES: Final = 32
_NAMESPACE_BYTES: Final = 16


class Digests:
    """Any thread, a worker's best: a call takes about 50 us for each MiB."""

    def __init__(self, loaded: Library) -> None:
        count, array, names = ctypes.c_uint64, ctypes.c_void_p, ctypes.POINTER(Names)
        self._last_error = loaded.last_error
        self._xxh3 = loaded.function("hic_xxh3_128", ctypes.c_int32, array, count, array, count, ctypes.c_char_p)
        self._seal = loaded.function("hic_seal", ctypes.c_int32, count, array, array, names)
        self._verify = loaded.function("hic_verify", ctypes.c_int32, count, array, array, names, array)
        self._page_hashes = loaded.function(
            "hic_page_hashes", ctypes.c_int32, ctypes.c_char_p, count, array, count, count, ctypes.c_char_p
        )

    def xxh3_128(self, head: memoryview, tail: memoryview) -> bytes:
        """The digest of both in one run, as the xxhash package writes it.  ValueError for less than 241 bytes."""
        digest = ctypes.create_string_buffer(16)
        self._check(self._xxh3(address(head), len(head), address(tail), len(tail), digest))
        return digest.raw

    def seal(self, objects: Sequence[memoryview], names: Names) -> None:
        """Write the header of each object, which has room for one."""
        self._check(self._seal(len(objects), addresses(objects), lengths(objects), names))

    def verify(self, objects: Sequence[memoryview], names: Names) -> list[int]:
        """-> a hic_verdict for each object."""
        verdicts = (ctypes.c_uint8 * len(objects))()
        self._check(self._verify(len(objects), addresses(objects), lengths(objects), names, verdicts))
        return list(verdicts)

    def page_hashes(self, parent: bytes, packed: memoryview, pages: int, page_tokens: int) -> list[bytes]:
        """Chained SHA-256 over the first ``pages`` pages of ``packed`` (int64), after ``parent`` (32 bytes, or none)."""
        hashes = ctypes.create_string_buffer(_HASH_BYTES * pages)
        self._check(self._page_hashes(parent, len(parent), address(packed), pages, page_tokens, hashes))
        data = hashes.raw
        return [data[at : at + _HASH_BYTES] for at in range(0, len(data), _HASH_BYTES)]

    def _check(self, code: int) -> None:
        if code < 0:
            raise ValueError(self._last_error())


def names(
    namespace: bytes, page_hashes: Sequence[bytes], chunks: Sequence[int], unchecked: bytes | None = None
) -> Names:
    """What the headers of a batch say: ``len(chunks)`` objects for each page.  ``unchecked``: one byte a page, not 0 where
    checksums are to be left out when judging.  ValueError for digests of another length."""
    joined = b"".join(page_hashes)
    if len(namespace) != _NAMESPACE_BYTES or any(len(page_hash) != _HASH_BYTES for page_hash in page_hashes):
        raise ValueError(f"a namespace digest has {_NAMESPACE_BYTES} bytes, a page hash {_HASH_BYTES}")
    coordinates = (ctypes.c_uint64 * len(chunks))(*chunks)
    return Names(namespace, joined, coordinates, len(chunks), unchecked)


@cache
def digests() -> Digests | None:
    """None where the native library is missing: `hicache_actors.cuda_ext.native.library.why_not` says why."""
    loaded = library()
    return None if loaded is None else Digests(loaded)
