"""The structs of capi.h, field by field.  The loader compares their sizes with those that the compiler chose."""

from __future__ import annotations

import ctypes
from typing import Final

ABI_VERSION: Final = 2
"""Raised with every change to a struct or a signature: capi.h states the same number."""


class Size(ctypes.Structure):
    """hic_size: how many bytes a struct takes."""

    _fields_ = (("name", ctypes.c_char_p), ("bytes", ctypes.c_uint64))


class Done(ctypes.Structure):
    """hic_done: what came out of a ring."""

    _fields_ = (("ticket", ctypes.c_uint64), ("code", ctypes.c_int32), ("unused", ctypes.c_int32))


class RingCounts(ctypes.Structure):
    """hic_ring_counts: since the ring was made."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("pushed", "drained", "wakes", "refused"))


class Op(ctypes.Structure):
    """hic_op: one step of a submission."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("bytes", ctypes.c_uint64),
        ("call", ctypes.c_void_p),
        ("argument", ctypes.c_uint64),
        ("release", ctypes.c_void_p),
        ("event", ctypes.c_void_p),
        ("generation", ctypes.c_uint64),
    )


class CallCopies(ctypes.Structure):
    """hic_copies: the plans that hic_call_copies runs."""

    _fields_ = (
        ("plans", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("engine", ctypes.c_int32),
        ("to_host", ctypes.c_int32),
    )


class StreamCounts(ctypes.Structure):
    """hic_stream_counts: what has become of what was submitted."""

    _fields_ = (
        ("submitted", ctypes.c_uint64),
        ("finished", ctypes.c_uint64),
        ("failed", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
        ("moved_bytes", ctypes.c_uint64),
        ("passed", ctypes.c_uint64),
        ("running_ns", ctypes.c_int64),
        ("exited", ctypes.c_int32),
        ("broken", ctypes.c_int32),
        ("calling", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


MAX_LEVELS: Final = 5
"""HIC_LEVELS: loops of a plan."""


class Level(ctypes.Structure):
    """hic_level: one loop of a plan; ``kind`` is 0 affine, 1 page, 2 piece."""

    _fields_ = (
        ("extent", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("source_stride", ctypes.c_int64),
        ("target_stride", ctypes.c_int64),
    )


class Piece(ctypes.Structure):
    """hic_piece: where page 0 of one layer's K or V begins."""

    _fields_ = (("source", ctypes.c_uint64), ("target", ctypes.c_uint64))


class Plan(ctypes.Structure):
    """hic_plan: a copy as nested loops; levels go from the slowest to the fastest."""

    _fields_ = (
        ("pieces", ctypes.c_uint64),
        ("source_pages", ctypes.c_uint64),
        ("target_pages", ctypes.c_uint64),
        ("piece_count", ctypes.c_uint32),
        ("page_count", ctypes.c_uint32),
        ("source_limit", ctypes.c_uint32),
        ("target_limit", ctypes.c_uint32),
        ("run_bytes", ctypes.c_uint32),
        ("unit_bytes", ctypes.c_uint32),
        ("levels", ctypes.c_uint32),
        ("runs", ctypes.c_uint32),
        ("level", Level * MAX_LEVELS),
    )


class Run(ctypes.Structure):
    """hic_run: one copy of contiguous bytes."""

    _fields_ = (("source", ctypes.c_uint64), ("target", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class Stores(ctypes.Structure):
    """hic_stores: what a simulated grid has stored, and where."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("units", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("total", ctypes.c_uint64),
        ("outside", ctypes.c_uint64),
        ("misaligned", ctypes.c_uint64),
    )


class Names(ctypes.Structure):
    """hic_names: what the headers of a batch of objects say, or shall say."""

    _fields_ = (
        ("namespace_digest", ctypes.c_char_p),
        ("page_hashes", ctypes.c_char_p),
        ("chunks", ctypes.POINTER(ctypes.c_uint64)),
        ("chunk_count", ctypes.c_uint64),
        ("unchecked", ctypes.c_char_p),
    )


class FileIdentity(ctypes.Structure):
    """hic_identity: which file it was."""

    _fields_ = (("mtime_ns", ctypes.c_int64), ("inode", ctypes.c_uint64))


class FilePlaces(ctypes.Structure):
    """hic_places: where the objects of a folder are."""

    _fields_ = (
        ("count", ctypes.c_uint64),
        ("keys", ctypes.c_char_p),
        ("keys_bytes", ctypes.c_uint64),
        ("folder", ctypes.c_char_p),
        ("shards", ctypes.c_uint64),
        ("memory", ctypes.c_void_p),
        ("paths", ctypes.c_void_p),
        ("shard_of", ctypes.c_void_p),
    )


class FileReads(ctypes.Structure):
    """hic_reads: a batch of files to be read.  Arrays are given by address, and kept by who made them."""

    _fields_ = (
        ("count", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("paths", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("bytes", ctypes.c_void_p),
        ("touch_before_ns", ctypes.c_int64),
        ("names", ctypes.POINTER(Names)),
        ("outcomes", ctypes.c_void_p),
        ("identities", ctypes.c_void_p),
        ("errors", ctypes.c_void_p),
        ("verdicts", ctypes.c_void_p),
    )


class FileLookups(ctypes.Structure):
    """hic_lookups: a batch of files to be looked for."""

    _fields_ = (
        ("count", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("paths", ctypes.c_void_p),
        ("leading", ctypes.c_uint64),
        ("error", ctypes.c_int32),
        ("lock", ctypes.c_int32),
    )


class FileWrites(ctypes.Structure):
    """hic_writes: a batch of files to be made."""

    _fields_ = (
        ("count", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("paths", ctypes.c_void_p),
        ("temporary", ctypes.c_char_p),
        ("first", ctypes.c_uint64),
        ("buffers", ctypes.c_void_p),
        ("bytes", ctypes.c_void_p),
        ("names", ctypes.POINTER(Names)),
        ("numbers", ctypes.c_void_p),
        ("outcomes", ctypes.c_void_p),
        ("errors", ctypes.c_void_p),
        ("full", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class SlotBatch(ctypes.Structure):
    """hic_slot_batch: pieces that are moved from or to slots.  Arrays are given by address, and kept by who made them."""

    _fields_ = (
        ("count", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("buffers", ctypes.c_void_p),
        ("bytes", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("memory", ctypes.c_void_p),
        ("names", ctypes.POINTER(Names)),
        ("numbers", ctypes.c_void_p),
        ("verdicts", ctypes.c_void_p),
        ("request_bytes", ctypes.c_uint64),
        ("fd", ctypes.c_int32),
        ("writes", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("from_cache", ctypes.c_int32),
    )


class CudaFacts(ctypes.Structure):
    """hic_cuda_facts: a GPU, and what has been done with it."""

    _fields_ = (
        ("name", ctypes.c_char * 128),
        ("pci", ctypes.c_char * 32),
        ("ordinal", ctypes.c_int32),
        ("driver_version", ctypes.c_int32),
        ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
        ("batch_version", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("has_kernel", ctypes.c_int32),
        ("host_address_same", ctypes.c_int32),
        ("registered_bytes", ctypes.c_uint64),
        ("batch_calls", ctypes.c_uint64),
        ("single_calls", ctypes.c_uint64),
        ("launches", ctypes.c_uint64),
    )


class CudaHow(ctypes.Structure):
    """hic_cuda_how: by which engine a copy goes, and in which direction."""

    _fields_ = (
        ("engine", ctypes.c_int32),
        ("to_host", ctypes.c_int32),
        ("notice", ctypes.c_int32),
        ("blocks", ctypes.c_uint32),
        ("lanes", ctypes.c_uint32),
    )


STRUCTS: Final[dict[str, type[ctypes.Structure]]] = {
    "hic_size": Size,
    "hic_done": Done,
    "hic_ring_counts": RingCounts,
    "hic_op": Op,
    "hic_copies": CallCopies,
    "hic_stream_counts": StreamCounts,
    "hic_names": Names,
    "hic_identity": FileIdentity,
    "hic_places": FilePlaces,
    "hic_reads": FileReads,
    "hic_lookups": FileLookups,
    "hic_writes": FileWrites,
    "hic_slot_batch": SlotBatch,
    "hic_level": Level,
    "hic_piece": Piece,
    "hic_plan": Plan,
    "hic_run": Run,
    "hic_stores": Stores,
    "hic_cuda_facts": CudaFacts,
    "hic_cuda_how": CudaHow,
}
"""Every struct that crosses the ABI, by its name in C."""
