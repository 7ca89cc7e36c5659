"""A shadow of everything the cache moves, by content: the proof that a page which comes back is the page that was put there.

Give `ShadowStore.watch` to `HiCache.observe`.  From then on the shadow keeps, for each device slot, host slot and stored key, the
digest of the content that was put there, and compares what arrives on the device with it.  It looks at device pages only: a
wrong byte anywhere on the way (host memory, file, header, slot mix-up) shows when the page comes back.

Contents are named by digest, not by page hash: the bytes of a page also depend on how its prefill was cut into chunks and on
the number of threads, so one page hash may have several versions, all of them right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import torch
import xxhash

from hicache_actors.backends.backend import Stored
from hicache_actors.core.words import Slots, unpack_slots
from hicache_actors.memory.kv import KVTensors, torch_dtype
from hicache_actors.pipelines.observer import BatchEnd, Observation

Digest: TypeAlias = bytes
"""xxh3-128 of a page's bytes, in the order layer, K or V, token, head."""

UNKNOWN: Final[Digest] = b""


class Mismatch(msgspec.Struct, frozen=True):
    """A page with another content than was put where it came from (``expected`` is empty: nothing was seen put there)."""

    what: Literal["load", "write_back", "device_hit"]
    slot: int
    expected: Digest
    found: Digest


class ShadowStore:
    """Follows one cache at a time; what it knows of storage outlives the cache, for restarts on the same store.  Any thread.

    Commits must be made when the bytes are there (without ``after``).
    """

    def __init__(self) -> None:
        self.verified_pages = 0
        """Pages that came back from the host or from storage and were compared."""
        self.mismatches: list[Mismatch] = []
        self.versions: dict[bytes, set[Digest]] = {}
        """Page hash -> the contents seen under it."""
        self._lock = threading.Lock()
        self._contents: dict[Digest, bytes] = {}
        self._stored: dict[bytes, Digest] = {}
        self._device: dict[int, Digest] = {}
        self._host: dict[int, Digest] = {}
        self._kv: KVTensors | None = None

    def watch(self, kv: KVTensors) -> Callable[[Observation], None]:
        """Start over with an empty device and an empty host -> the function to observe the cache over ``kv`` with."""
        with self._lock:
            self._kv = kv
            self._device.clear()
            self._host.clear()
        return self._observe

    @property
    def page_versions(self) -> int:
        """Distinct (page hash, content) pairs; as many as page hashes if none has a second version."""
        return sum(map(len, self.versions.values()))

    @property
    def page_hashes(self) -> int:
        return len(self.versions)

    def name(self, hashes: Iterable[bytes], slots: Iterable[int]) -> list[Digest]:
        """Say which page hashes the device ``slots`` hold, after their commit -> the digests of their contents."""
        with self._lock:
            digests = [self._device.get(slot, UNKNOWN) for slot in slots]
            for page_hash, digest in zip(hashes, digests, strict=True):
                self.versions.setdefault(page_hash, set()).add(digest)
        return digests

    def check_device(self, slots: Iterable[int]) -> list[Digest]:
        """Compare device pages, while a lease holds them, with what was put there -> the digests of their contents."""
        with self._lock:
            return [self._compare("device_hit", slot, self._device.get(slot, UNKNOWN)) for slot in slots]

    def dense_prefix(self, digests: Sequence[Digest]) -> list[tuple[torch.Tensor, ...]]:
        """Contents from the shadow, laid out for a plain cache: per layer (K, V), each [1, heads, tokens, head_dim]."""
        assert self._kv is not None
        shape = self._kv.shape
        size = (shape.layers, shape.kv, shape.page_size, shape.heads, shape.head_dim)
        pages = [
            torch.frombuffer(bytearray(self._contents[digest]), dtype=torch_dtype(shape.dtype)).view(size)
            for digest in digests
        ]
        layers = torch.cat(pages, dim=2).transpose(2, 3)  # [layers, kv, heads, tokens, head_dim]
        return [tuple(tensor[None] for tensor in layer) for layer in layers.contiguous()]

    def _observe(self, what: Observation) -> None:
        with self._lock:
            if not isinstance(what, BatchEnd):
                for slot in unpack_slots(what.slots):
                    self._device[slot] = self._keep(slot)
            elif what.kind == "write_back":
                for source, target in _pairs(what.source, what.target):
                    self._host[target] = self._compare("write_back", source, self._device.get(source, UNKNOWN))
            elif what.kind == "backup":
                assert what.source is not None
                assert what.hashes is not None
                assert what.outcomes is not None
                for slot, page_hash, outcome in zip(unpack_slots(what.source), what.hashes, what.outcomes, strict=True):
                    digest = self._host.get(slot, UNKNOWN)
                    self.versions.setdefault(page_hash, set()).add(digest)
                    if outcome is Stored.WRITTEN:
                        self._stored[page_hash] = digest
            elif what.kind == "prefetch":
                assert what.target is not None
                assert what.hashes is not None
                for slot, page_hash in zip(unpack_slots(what.target), what.hashes, strict=True):
                    self._host[slot] = self._stored.get(page_hash, UNKNOWN)
            else:
                for source, target in _pairs(what.source, what.target):
                    self._device[target] = self._compare("load", target, self._host.get(source, UNKNOWN))
                    self.verified_pages += 1

    def _compare(self, what: Literal["load", "write_back", "device_hit"], slot: int, expected: Digest) -> Digest:
        found = xxhash.xxh3_128_digest(self._read(slot))
        if found != expected:
            self.mismatches.append(Mismatch(what, slot, expected, found))
        return found

    def _keep(self, slot: int) -> Digest:
        content = self._read(slot)
        digest = xxhash.xxh3_128_digest(content)
        self._contents.setdefault(digest, content)
        return digest

    def _read(self, slot: int) -> bytes:
        assert self._kv is not None
        tensors = [tensor[slot] for index in range(self._kv.shape.layers) for tensor in self._kv.layer(index)]
        return b"".join(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in tensors)


def _pairs(source: Slots | None, target: Slots | None) -> Iterable[tuple[int, int]]:
    assert source is not None
    assert target is not None
    return zip(unpack_slots(source), unpack_slots(target), strict=True)
