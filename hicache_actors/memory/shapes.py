"""The shape of a page of KV: what one rank keeps for `page_size` consecutive tokens, all layers.  No torch needed."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from hicache_actors.errors import ConfigError

ITEM_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element, by torch's name of the dtype."""


BATCH_PAGES: Final = 256
BATCH_BYTES: Final = 32 * 1024 * 1024


def batch_pages(page_bytes: int) -> int:
    """Pages of a batch, the unit in which they move: at most 256, and 32 MiB, but one at least."""
    return max(1, min(BATCH_PAGES, BATCH_BYTES // page_bytes))


class KVShape(msgspec.Struct, frozen=True):
    """This rank's shard: `layers` x `kv` x `heads` x `head_dim` elements a token.

    ``kv`` is 2 (a K and a V tensor a layer) or 1 (MLA: one latent tensor a layer, ``heads`` = 1).
    Raises `ConfigError` for counts that are not positive, an unknown dtype, or MLA with several heads.
    """

    layers: int
    kv: Literal[1, 2]
    heads: int
    head_dim: int
    dtype: str
    page_size: int

    def __post_init__(self) -> None:
        for field in ("layers", "heads", "head_dim", "page_size"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"shape.{field}",
                    value,
                    "is not a count",
                    allowed="integers >= 1",
                    fix="take it from the model's config",
                )
        if self.kv not in (1, 2):
            raise ConfigError(
                "shape.kv", self.kv, "unknown", allowed="2 (K and V), 1 (MLA)", fix="count the KV tensors of a layer"
            )
        if self.kv == 1 and self.heads != 1:
            raise ConfigError(
                "shape.heads", self.heads, "MLA keeps one latent row a token", allowed="1", fix="set heads to 1"
            )
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(
                "shape.dtype",
                self.dtype,
                "unknown",
                allowed=ITEM_BYTES,
                fix="name the element type of the KV as torch does",
            )

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        return self.layers * self.layer_token_bytes

    @property
    def layer_token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return self.kv * self.heads * self.head_dim * self.item_bytes

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    @property
    def layer_page_bytes(self) -> int:
        """K and V of one page in one layer."""
        return self.page_size * self.layer_token_bytes

    def describe(self) -> str:
        kind = "MLA" if self.kv == 1 else f"{self.heads} KV heads"
        return (
            f"{self.layers} layers, {kind} x {self.head_dim} {self.dtype}: {self.token_bytes:,} bytes a token, "
            f"{format_bytes(self.page_bytes)} a page of {self.page_size:,} tokens"
        )


def format_bytes(n_bytes: int) -> str:
    """Decimal units, as in ``size_gb``: 1 GB = 1e9 bytes."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= size:
            return f"{n_bytes / size:,.2f} {unit}"
    return f"{n_bytes} bytes"
