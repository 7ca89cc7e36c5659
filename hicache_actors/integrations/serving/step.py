"""One engine step as a model sees it: tokens of several sequences, packed behind each other, and where their KV stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch


class Piece(msgspec.Struct, frozen=True):
    """What one sequence computes in one step: ``tokens``, the first of which stands at position ``start``.

    ``pages`` are the device pages of tokens [0, ``start`` + len(``tokens``)), in order.  A decoding sequence brings one token.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


class Segment(msgspec.Struct, frozen=True):
    """Where one piece stands in the packed queries (``first``, ``count``) and in the gathered KV (``kv_first``, ``kv_count``)."""

    first: int
    count: int
    kv_first: int
    kv_count: int


class LayerWait(Protocol):
    """What a forward pass waits for before it reads a layer: `Load` is one."""

    def wait(self, layer: int, timeout_s: float) -> bool: ...


class Step:
    """The pieces of one forward pass as tensors.  Made by the thread that computes.

    ``ids`` and ``positions`` are [1, tokens]; ``write_pages`` and ``write_rows`` [tokens] say where each token's KV goes;
    ``table`` [pages] names the pages of all pieces, one piece behind the other, so that a piece's KV is one run of rows;
    ``last`` [pieces] is the place of each piece's last token.
    """

    def __init__(
        self, pieces: Sequence[Piece], page_size: int, device: torch.device, load: LayerWait | None = None
    ) -> None:
        ids: list[int] = []
        positions: list[int] = []
        write_pages: list[int] = []
        table: list[int] = []
        segments: list[Segment] = []
        for piece in pieces:
            end = piece.start + len(piece.tokens)
            n_pages = -(-end // page_size)
            if not piece.tokens or n_pages > len(piece.pages):
                raise ValueError(f"{len(piece.tokens)} tokens from {piece.start} on {len(piece.pages)} pages")
            segments.append(Segment(len(ids), len(piece.tokens), len(table) * page_size, end))
            ids += piece.tokens
            positions += range(piece.start, end)
            write_pages += [piece.pages[at // page_size] for at in range(piece.start, end)]
            table += piece.pages[:n_pages]
        self.segments = tuple(segments)
        self.load = load
        self.n_pages = len(table)
        self.ids = torch.tensor([ids], device=device)
        self.positions = torch.tensor([positions], device=device)
        self.write_pages = torch.tensor(write_pages, device=device)
        self.write_rows = self.positions[0] % page_size
        self.table = torch.tensor(table, device=device)
        self.last = torch.tensor([segment.first + segment.count - 1 for segment in segments], device=device)
