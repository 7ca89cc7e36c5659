"""The recorded schedule of an engine: enough to compute every token again without a cache.

The bytes of KV depend on how tokens were cut into passes and on who shared a pass, so texts can be compared bit for bit only with a
run of the same passes.  The record says which tokens each pass computed, and, for each admission, where its cached prefix had been
computed first: by which admission, which page.  That is followed through all tiers by the public observer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeAlias

import msgspec
import torch
import xxhash

from hicache_actors.backends.backend import Stored
from hicache_actors.cache.api import HiCache
from hicache_actors.core.words import Slots, unpack_slots
from hicache_actors.integrations.serving.step import Piece
from hicache_actors.pipelines.observer import BatchEnd, Observation

Origin: TypeAlias = tuple[int, int]
"""(admission, page of it): where a page was computed."""


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """Admission ``attempt`` of request ``rid`` starts on cached pages that came from ``origins``, in prompt order."""

    attempt: int
    rid: str
    origins: tuple[Origin, ...]


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """One pass: per part its admission, first position and tokens, the token that it gave the request (None: the part ended
    inside the prompt, or its request had lost its pages meanwhile), and a digest of its logits."""

    attempts: tuple[int, ...]
    starts: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    sampled: tuple[int | None, ...]
    logits: tuple[int, ...]


Record: TypeAlias = Admitted | Stepped


def logits_digest(row: torch.Tensor) -> int:
    """xxh3-64 of the bits of one row, without its sign bit (JSON readers differ beyond 63 bits)."""
    return xxhash.xxh3_64_intdigest(row.contiguous().view(torch.uint8).cpu().numpy().tobytes()) >> 1


class ScheduleRecorder:
    """Give it to a `ServingEngine`.  Records go to ``path``, one JSON object a line, so that long runs take no memory.

    One engine at a time; what it knows of storage outlives the cache, for restarts on the same store.  A page whose origin it has
    not seen is an error at replay.  Any thread.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("wb")
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        self._attempts: dict[str, int] = {}
        self._before = self._last = 0  # admissions of the engines before, and in all
        self._device: dict[int, Origin] = {}
        self._host: dict[int, Origin] = {}
        self._stored: dict[bytes, Origin] = {}

    def watch(self, cache: HiCache) -> None:
        """Follow pages through ``cache``'s tiers, which hold nothing yet but what is stored.  The engine calls it."""
        with self._lock:
            self._before = self._last
            for known in (self._attempts, self._device, self._host):
                known.clear()
        cache.observe(self._observe)

    def admitted(self, attempt: int, rid: str, pages: Iterable[int]) -> None:
        """An admission whose cached prefix stands in these device ``pages``, proven."""
        with self._lock:
            self._last = max(self._last, self._before + attempt)
            self._attempts[rid] = attempt = self._before + attempt
            self._write(Admitted(attempt, rid, tuple(self._device.get(page, (0, 0)) for page in pages)))

    def ended(self, rid: str) -> None:
        """The request has given its pages back."""
        with self._lock:
            self._attempts.pop(rid, None)

    def stepped(
        self,
        attempts: Sequence[int],
        pieces: Sequence[Piece],
        sampled: Sequence[int | None],
        logits: torch.Tensor | None,
    ) -> None:
        """A pass has been computed; ``logits`` has one row a piece."""
        assert logits is not None
        rows = tuple(map(logits_digest, logits))
        starts, tokens = tuple(piece.start for piece in pieces), tuple(tuple(piece.tokens) for piece in pieces)
        with self._lock:
            numbers = tuple([self._before + attempt for attempt in attempts])
            self._write(Stepped(numbers, starts, tokens, tuple(sampled), rows))

    def close(self) -> None:
        """Write what is buffered.  Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, record: Record) -> None:
        if not self._file.closed:
            self._file.write(self._encoder.encode(record) + b"\n")

    def _observe(self, what: Observation) -> None:
        with self._lock:
            if not isinstance(what, BatchEnd):
                attempt = self._attempts.get(what.rid, 0)
                for page, slot in enumerate(unpack_slots(what.slots), what.first_page):
                    self._device[slot] = (attempt, page)
            elif what.kind == "write_back":
                self._move(what.source, self._device, what.target, self._host)
            elif what.kind == "load":
                self._move(what.source, self._host, what.target, self._device)
            elif what.kind == "backup":
                assert what.source is not None
                assert what.hashes is not None
                assert what.outcomes is not None
                for slot, page_hash, outcome in zip(unpack_slots(what.source), what.hashes, what.outcomes, strict=True):
                    if outcome is Stored.WRITTEN:
                        self._stored[page_hash] = self._host.get(slot, (0, 0))
            else:
                assert what.target is not None
                assert what.hashes is not None
                for slot, page_hash in zip(unpack_slots(what.target), what.hashes, strict=True):
                    self._host[slot] = self._stored.get(page_hash, (0, 0))

    @staticmethod
    def _move(
        source: Slots | None, from_origins: dict[int, Origin], target: Slots | None, to_origins: dict[int, Origin]
    ) -> None:
        assert source is not None
        assert target is not None
        for here, there in zip(unpack_slots(source), unpack_slots(target), strict=True):
            to_origins[there] = from_origins.get(here, (0, 0))


def read_schedule(path: Path) -> Iterator[Record]:
    """The records of a closed recorder, in order."""
    decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
    with path.open("rb") as file:
        for line in file:
            yield decoder.decode(line)
