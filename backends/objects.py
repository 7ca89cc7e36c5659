"""A stored object: a header of 4096 bytes and its payload in one run, so that a store sees one buffer.

`FIELDS` lists the fields of the header; docs/storage-format.md explains them.

`seal_many` and `verify_many` hash payloads (about 0.1 ms per MiB): call them from a worker thread, a batch per call.  The native
library does a batch without the GIL; where it is missing, the GIL is released while a payload of 96 KiB or more is hashed.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from xxhash import xxh3_128

from hicache_actors.cuda_ext.native import digests as native
from hicache_actors.cuda_ext.native.structs import Names

HEADER_BYTES: Final = 4096
MAGIC: Final = b"HICACHE\n"
FORMAT_VERSION: Final = 1

_FIELDS: Final = struct.Struct("<8sH6x16s32sQQ")
_CHECKSUM_AT: Final = HEADER_BYTES - 16
_CLEARED: Final = bytes(len(MAGIC))
_PADDING: Final = bytes(_CHECKSUM_AT - _FIELDS.size)


class Field(NamedTuple):
    """A run of bytes of the header; integers are little-endian."""

    offset: int
    n_bytes: int
    name: str
    text: str


FIELDS: Final = (
    Field(0, 8, "magic", f"`{MAGIC!r}`; all zero in a cleared slot"),
    Field(8, 2, "version", f"of this format: {FORMAT_VERSION}; an object of another version is a miss"),
    Field(10, 6, "reserved", "zero"),
    Field(16, 16, "namespace", "digest of the facts that must match to share bytes"),
    Field(32, 32, "page hash", "of the page and everything before it"),
    Field(64, 8, "chunk", "which part of the page, as the key scheme counts"),
    Field(72, 8, "payload length", "in bytes"),
    Field(80, _CHECKSUM_AT - 80, "reserved", "zero"),
    Field(_CHECKSUM_AT, 16, "checksum", "xxh3-128, big-endian, of all the rest: the header before this field, then the payload"),
)  # fmt: skip
"""The header of a stored object, without a gap."""


class Verdict(enum.Enum):
    """What `verify` found.  Only OK may be served; only CORRUPT (and EMPTY, in what a store returned) is worth quarantining."""

    OK = "ok"
    FOREIGN = "foreign"  #: whole, but of another namespace, or written by another version of this format: a plain miss
    CORRUPT = "corrupt"  #: torn, flipped, misfiled, or no object at all
    EMPTY = "empty"  #: magic cleared: nothing has been sealed here


_BY_CODE: Final = (Verdict.OK, Verdict.FOREIGN, Verdict.CORRUPT, Verdict.EMPTY)  # as capi/digest.h numbers them


def verdicts_of(codes: Iterable[int]) -> list[Verdict]:
    """Of the native library's codes."""
    return [*map(_BY_CODE.__getitem__, codes)]


class Expected(NamedTuple):
    """What the headers of the objects of whole pages must or shall say: ``len(chunks)`` objects for each page hash, in their order.

    ``namespace`` is a digest of 16 bytes, each page hash has 32.  ``checksums`` is asked for each page: False leaves its checksums
    out, and the rest of the headers only is compared.
    """

    namespace: bytes
    page_hashes: Sequence[bytes]
    chunks: Sequence[int] = (0,)
    checksums: Callable[[], bool] = lambda: True

    def verify(self, objects: Sequence[memoryview]) -> list[Verdict]:
        return verify_many(objects, *self)

    def seal(self, object: memoryview, number: int) -> None:
        """Make it the object of that number."""
        page, chunk = divmod(number, len(self.chunks))
        seal(object, self.namespace, self.page_hashes[page], self.chunks[chunk])

    def judge(self, object: memoryview, number: int, *, checksum: bool) -> Verdict:
        """Is it the object of that number?"""
        page, chunk = divmod(number, len(self.chunks))
        return verify(object, self.namespace, self.page_hashes[page], self.chunks[chunk], checksum=checksum)

    def names(self) -> Names:
        """For the native library.  ValueError for digests of another length."""
        unchecked = bytes(not self.checksums() for _ in self.page_hashes)
        return native.names(self.namespace, self.page_hashes, self.chunks, unchecked)


class Header(NamedTuple):
    """What an object says of itself; see `FIELDS`."""

    version: int
    namespace: bytes
    page_hash: bytes
    chunk: int
    payload_bytes: int


def read_header(object: memoryview) -> Header | None:
    """None for what does not begin as an object of ours does, such as a raw one.  Nothing of it is verified."""
    if len(object) < HEADER_BYTES or bytes(object[: len(MAGIC)]) != MAGIC:
        return None
    return Header(*_FIELDS.unpack_from(object)[1:])


def clear(object: memoryview) -> None:
    """Make a slot's old content unusable; cheap, any thread."""
    object[: len(MAGIC)] = _CLEARED


def seal(object: memoryview, namespace: bytes, page_hash: bytes, chunk: int = 0) -> None:
    """Write the header for the payload that stands in ``object[HEADER_BYTES:]``.

    ``namespace`` is a digest of 16 bytes, ``page_hash`` has 32, ``chunk`` is an unsigned 64-bit coordinate.
    """
    if len(namespace) != 16 or len(page_hash) != 32:
        raise ValueError(f"namespace digest has {len(namespace)} bytes (16), page hash {len(page_hash)} (32)")
    payload_bytes = len(object) - HEADER_BYTES
    _FIELDS.pack_into(object, 0, MAGIC, FORMAT_VERSION, namespace, page_hash, chunk, payload_bytes)
    object[_FIELDS.size : _CHECKSUM_AT] = _PADDING
    object[_CHECKSUM_AT:HEADER_BYTES] = _checksum(object)


def verify(object: memoryview, namespace: bytes, page_hash: bytes, chunk: int = 0, *, checksum: bool = True) -> Verdict:
    """Is this the object that was asked for, bit for bit?  Never raises on content, whatever it is.

    Without ``checksum``: by its header.  A torn or flipped payload then passes.
    """
    if len(object) < HEADER_BYTES:
        return Verdict.CORRUPT
    magic, version, found_namespace, found_hash, found_chunk, payload_bytes = _FIELDS.unpack_from(object)
    if magic != MAGIC:
        return Verdict.EMPTY if magic == _CLEARED else Verdict.CORRUPT
    if version != FORMAT_VERSION:
        return Verdict.FOREIGN
    if payload_bytes != len(object) - HEADER_BYTES:
        return Verdict.CORRUPT
    if checksum and _checksum(object) != object[_CHECKSUM_AT:HEADER_BYTES]:
        return Verdict.CORRUPT
    if found_namespace != namespace:
        return Verdict.FOREIGN
    return Verdict.OK if (found_hash, found_chunk) == (page_hash, chunk) else Verdict.CORRUPT


def seal_many(
    objects: Sequence[memoryview], namespace: bytes, page_hashes: Sequence[bytes], chunks: Sequence[int] = (0,)
) -> None:
    """Seal the objects of whole pages: ``len(chunks)`` of them for each page hash, in the order of ``chunks``."""
    library = native.digests()
    if library is not None and len(objects) == len(page_hashes) * len(chunks):
        library.seal(objects, native.names(namespace, page_hashes, chunks))
        return
    for object, (page_hash, chunk) in zip(objects, _names(page_hashes, chunks), strict=True):
        seal(object, namespace, page_hash, chunk)


def verify_many(
    objects: Sequence[memoryview],
    namespace: bytes,
    page_hashes: Sequence[bytes],
    chunks: Sequence[int] = (0,),
    checksums: Callable[[], bool] = lambda: True,
) -> list[Verdict]:
    """A verdict for each object of whole pages; see `Expected`."""
    library = native.digests()
    if library is not None and len(objects) == len(page_hashes) * len(chunks):
        names = Expected(namespace, page_hashes, chunks, checksums).names()
        return verdicts_of(library.verify(objects, names))
    verdicts: list[Verdict] = []
    whole = True
    for at, (object, (page_hash, chunk)) in enumerate(zip(objects, _names(page_hashes, chunks), strict=True)):
        if at % len(chunks) == 0:
            whole = checksums()
        verdicts.append(verify(object, namespace, page_hash, chunk, checksum=whole))
    return verdicts


def _names(page_hashes: Sequence[bytes], chunks: Sequence[int]) -> list[tuple[bytes, int]]:
    return [(page_hash, chunk) for page_hash in page_hashes for chunk in chunks]


def _checksum(object: memoryview) -> bytes:
    digest = xxh3_128(object[:_CHECKSUM_AT])
    digest.update(object[HEADER_BYTES:])
    return digest.digest()
