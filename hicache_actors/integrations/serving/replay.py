"""Compute a recorded schedule again, without pages, tiers or eviction.

Each admission has dense tensors of its own.  A cached prefix is copied from the admission that computed it first.  Passes are the
recorded ones, fed with the recorded tokens; each yields logits that must be equal to the recorded ones bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from hicache_actors.errors import HiCacheError
from hicache_actors.integrations.serving.model import ServedModel
from hicache_actors.integrations.serving.schedule import Admitted, Stepped, logits_digest, read_schedule
from hicache_actors.integrations.serving.step import Piece, Step
from hicache_actors.integrations.serving.words import Sampler, greedy
from hicache_actors.memory.kv import KVTensors, torch_dtype


class Replayed(msgspec.Struct):
    """One request's tokens, computed again.

    ``different``: passes whose token or logits are not what was recorded.  ``reused_pages`` were cached at its admissions.
    """

    tokens: list[int] = msgspec.field(default_factory=list)
    different: int = 0
    reused_pages: int = 0


class DenseRows:
    """`Rows` in one run of memory a sequence, layer and tensor: [layers][tensors][rows, heads, dim], by admission."""

    def __init__(self, kv: KVTensors) -> None:
        self.shape = kv.shape
        self.device = kv.device
        self.sequences: dict[int, list[list[torch.Tensor]]] = {}
        self.step_attempts: Sequence[int] = ()

    def reserve(self, attempt: int, pages: int) -> None:
        """Room for ``pages`` pages of an admission; what it holds stays."""
        shape = self.shape
        layers = self.sequences.setdefault(attempt, [[] for _ in range(shape.layers)])
        held_rows = len(layers[0][0]) if layers[0] else 0
        if pages * shape.page_size <= held_rows:
            return
        size = (max(pages * shape.page_size, 2 * held_rows), shape.heads, shape.head_dim)
        for tensors in layers:
            grown = [torch.zeros(size, dtype=torch_dtype(shape.dtype), device=self.device) for _ in range(shape.kv)]
            for new, old in zip(grown, tensors, strict=False):
                new[:held_rows] = old
            tensors[:] = grown

    def copy_page(self, source: int, source_page: int, target: int, target_page: int) -> None:
        size = self.shape.page_size
        here, there = slice(source_page * size, (source_page + 1) * size), target_page * size
        for from_tensors, to_tensors in zip(self.sequences[source], self.sequences[target], strict=True):
            for old, new in zip(from_tensors, to_tensors, strict=True):
                new[there : there + size] = old[here]

    def exchange(self, step: Step, layer: int, new: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        found = []
        for index, rows in enumerate(new):
            runs = []
            for attempt, segment in zip(self.step_attempts, step.segments, strict=True):
                held = self.sequences[attempt][layer][index]
                start = segment.kv_count - segment.count
                held[start : segment.kv_count] = rows[segment.first : segment.first + segment.count]
                runs.append(held[: -(-segment.kv_count // self.shape.page_size) * self.shape.page_size])
            found.append(torch.cat(runs))
        return tuple(found)


def replay(path: Path, served: ServedModel, *, sampler: Sampler = greedy) -> dict[str, Replayed]:
    """Replay the schedule at ``path`` with the model of ``served``, whose pool takes no part -> requests by rid.

    ``sampler`` chooses tokens again; it must be that of the requests.  Takes the memory of what later admissions still need.
    Blocks; run it with as many torch threads as the engine had.  Raises `HiCacheError` if a page's origin was not recorded.
    """
    rows = DenseRows(served.kv)
    last_use = _last_uses(path)
    found: dict[str, Replayed] = defaultdict(Replayed)
    rids: dict[int, str] = {}
    for number, record in enumerate(read_schedule(path)):
        if isinstance(record, Admitted):
            rids[record.attempt] = record.rid
            _admit(record, rows)
            found[record.rid].reused_pages += len(record.origins)
            used = [record.attempt, *(attempt for attempt, _ in record.origins)]
        else:
            _step(record, rows, served, sampler, found, rids)
            used = list(record.attempts)
        for attempt in set(used):
            if last_use[attempt] == number:
                del rows.sequences[attempt]
    return dict(found)


def _last_uses(path: Path) -> dict[int, int]:
    """Admission -> number of the last record that needs its KV."""
    last: dict[int, int] = {}
    for number, record in enumerate(read_schedule(path)):
        if isinstance(record, Admitted):
            last.update({attempt: number for attempt, _ in record.origins})
            last[record.attempt] = number
        else:
            last.update(dict.fromkeys(record.attempts, number))
    return last


def _admit(record: Admitted, rows: DenseRows) -> None:
    rows.reserve(record.attempt, max(1, len(record.origins)))
    for page, (source, source_page) in enumerate(record.origins):
        if not source:
            raise HiCacheError(f"page {page} of {record.rid} came from before the record began")
        rows.copy_page(source, source_page, record.attempt, page)


def _step(
    record: Stepped,
    rows: DenseRows,
    served: ServedModel,
    sampler: Sampler,
    found: dict[str, Replayed],
    rids: dict[int, str],
) -> None:
    pieces = []
    for attempt, start, tokens in zip(record.attempts, record.starts, record.tokens, strict=True):
        pages = -(-(start + len(tokens)) // rows.shape.page_size)
        rows.reserve(attempt, pages)
        pieces.append(Piece(tokens, start, range(pages)))
    rows.step_attempts = record.attempts
    logits = served.forward(pieces, rows=rows)
    for at, (attempt, recorded) in enumerate(zip(record.attempts, record.sampled, strict=True)):
        request = found[rids[attempt]]
        request.different += logits_digest(logits[at]) != record.logits[at]
        if recorded is not None:
            token = sampler(logits[at], record.starts[at] + len(record.tokens[at]))
            request.different += token != recorded
            request.tokens.append(token)
