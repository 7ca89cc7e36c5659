"""A model without weights whose KV can be checked: every row follows from all tokens before it, so wrong bytes cannot hide.

Row t of head h of layer l holds a digest of tokens [0, t] and (l, h, K or V).  `ToyModel.forward` reads what it reuses, layer by
layer as an engine does, compares it with what must stand there, and writes the rest; the token that it emits depends on what it
*read*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hicache_actors.errors import TransferError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.memory.kv import KVTensors

VOCABULARY = 50_000


class LayerLoad(Protocol):
    """What a forward pass waits for: `Load` is one."""

    def wait(self, layer: int, timeout_s: float) -> bool: ...


class WrongBytes(AssertionError):
    """KV was reused that is not the KV of this prefix: the worst thing that a cache can do."""


class ToyModel:
    """Works on any `KVTensors` with a 2-byte or 4-byte element; stateless, so any thread may run it.

    ``weights``: a number that every row follows from as well.  ``first_layer``, ``first_head``: where the part that this rank holds
    begins in a model that several share; each part emits tokens of its own.
    """

    def __init__(
        self, kv: KVTensors, *, wait_s: float = 10.0, weights: int = 0, first_layer: int = 0, first_head: int = 0
    ) -> None:
        self.kv, self.wait_s, self.weights = kv, wait_s, weights
        self.first_layer, self.first_head = first_layer, first_head

    def forward(self, prompt: Prompt, pages: Sequence[int], start: int, end: int, load: LayerLoad | None = None) -> int:
        """Compute tokens [start, end) of ``prompt`` on top of the reused [0, start) -> the next token.

        Raises `TransferError` if a layer does not come, `WrongBytes` if it is not right.
        """
        table = torch.tensor(list(pages), dtype=torch.int64)
        at = torch.arange(end)
        pages_of, rows = table[at // self.kv.shape.page_size], at % self.kv.shape.page_size
        digests = _prefix_digests(prompt, end, self.weights)
        read = 0
        for layer in range(self.kv.shape.layers):
            if load is not None and not load.wait(layer, self.wait_s):
                raise TransferError(f"layer {layer} did not come")
            for kind, tensor in enumerate(self.kv.layer(layer)):
                wanted = self._rows(digests, self.first_layer + layer, kind, tensor)
                found = tensor[pages_of[:start], rows[:start]]
                wrong = (found != wanted[:start]).flatten(1).any(1).nonzero().flatten()
                if wrong.numel():
                    raise WrongBytes(f"{prompt!r}: token {int(wrong[0])}, layer {layer}: {wrong.numel()} wrong rows")
                tensor[pages_of[start:], rows[start:]] = wanted[start:]
                read += int(tensor[pages_of[-1], rows[-1], 0, 0].to(torch.float64)) * (2 * layer + kind + 1)
        return read % VOCABULARY

    def _rows(self, digests: NDArray[np.uint64], layer: int, kind: int, like: torch.Tensor) -> torch.Tensor:
        # Whole numbers below 128 are exact in every dtype that a cache holds.
        values = (digests * np.uint64(2 * layer + kind + 3) >> np.uint64(40)) % np.uint64(127)
        heads = np.arange(self.first_head, self.first_head + like.shape[2], dtype=np.uint64) * np.uint64(5)
        by_head = (values[:, None] + heads) % np.uint64(127)
        rows = torch.from_numpy(by_head.astype(np.int64)).to(like.device, like.dtype)
        return rows[:, :, None].expand(-1, -1, like.shape[3])


def _prefix_digests(prompt: Prompt, end: int, weights: int) -> NDArray[np.uint64]:
    """One number a token that follows from it, its position and every token before it."""
    tokens = np.frombuffer(prompt.packed, dtype=np.uint64, count=end)
    position = np.arange(1, end + 1, dtype=np.uint64)
    scope = np.uint64(_number(prompt.scope) + weights * 0x94D049BB133111EB % 2**60)
    mixed = (tokens + np.uint64(0x9E3779B97F4A7C15) + scope) * (position * np.uint64(0xBF58476D1CE4E5B9) | np.uint64(1))
    return np.cumsum(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)


def _number(value: Any) -> int:
    return int.from_bytes(repr(value).encode()[-6:], "little")
