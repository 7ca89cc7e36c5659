"""The facts that must match before two caches may share bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Final

import msgspec

from hicache_actors.errors import ConfigError

NAMESPACE_BYTES: Final = 16
FAMILY_BYTES: Final = 6
SCHEMA_VERSION: Final = 2
GRID_FACTS: Final = ("layout", "total_kv_heads", "head_group", "layer_partition")
"""What follows from how a deployment divides the model: those who differ in nothing else could share, if they divided it alike."""

_DTYPE: Final = re.compile(r"[a-z][a-z0-9_]*")


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Every fact that makes the bytes of a page interchangeable, or not.  Its digest is part of each key and each object.

    No fact has a default worth having: a missing one raises `ConfigError` at start, since a wrong guess would serve the
    bytes of another model.
    """

    model_id: str = ""  #: the name under which the model is known to everybody who shares this store
    weights: str = ""  #: fingerprint of the weights, or an epoch that changes with them ("sha256:...", "epoch-7")
    dtype: str = ""  #: logical dtype of K and V: "bfloat16", "float16", "float8_e4m3fn", ...
    page_size: int = 0  #: tokens
    layout: str = ""  #: order of bytes within an object: "page_first_direct", "page_first", ...
    total_kv_heads: int = 0  #: KV heads of the whole model, over all ranks; 1 for MLA
    head_group: int = 0  #: KV heads in one object
    layer_partition: int = 0  #: layers in one object
    replicated: bool | None = None  #: True when every tensor-parallel rank holds the same bytes (MLA)

    def __post_init__(self) -> None:
        self._require_text("model_id", "a non-empty name", "the model's name or path on its hub")
        self._require_text(
            "weights",
            "a fingerprint or an epoch",
            "a digest of the weight files, or 'epoch-N', N raised by each update",
        )
        self._require_text("dtype", "a dtype's name without a prefix", "e.g. 'bfloat16'")
        if not _DTYPE.fullmatch(self.dtype):
            raise ConfigError(
                "namespace.dtype", self.dtype, "not a dtype's name", allowed="lower-case letters, digits and '_'",
                fix="e.g. 'bfloat16', not 'torch.bfloat16'",
            )  # fmt: skip
        self._require_text("layout", "the layout's name", "take it from the host memory's layout")
        self._require_count("page_size", "tokens in a page, as the cache was opened with")
        self._require_count("total_kv_heads", "KV heads of the whole model (num_key_value_heads); 1 for MLA")
        self._require_count("head_group", "KV heads in one object; this rank's heads when objects hold whole pages")
        self._require_count("layer_partition", "layers in one object; this rank's layers when objects hold whole pages")
        if self.total_kv_heads % self.head_group:
            raise ConfigError(
                "namespace.head_group", self.head_group, f"does not divide total_kv_heads = {self.total_kv_heads}",
                allowed="a divisor of total_kv_heads", fix="take the number of KV heads of one rank",
            )  # fmt: skip
        if not isinstance(self.replicated, bool):
            raise ConfigError(
                "namespace.replicated", self.replicated, "missing", allowed="True, False",
                fix="True when every tensor-parallel rank holds the same bytes (MLA), else False",
            )  # fmt: skip

    @property
    def digest(self) -> bytes:
        """16 bytes; any other value of any fact gives another digest.  The first 6 are the `family`."""
        return self.family + self._sha256(self.__struct_fields__)[: NAMESPACE_BYTES - FAMILY_BYTES]

    @property
    def family(self) -> bytes:
        """6 bytes, of all facts but `GRID_FACTS`: so the names in a store tell who has stored the same model there, divided in
        another way.
        """
        return self._sha256([fact for fact in self.__struct_fields__ if fact not in GRID_FACTS])[:FAMILY_BYTES]

    def _sha256(self, facts: Iterable[str]) -> bytes:
        return sha256(msgspec.msgpack.encode((SCHEMA_VERSION, *(getattr(self, fact) for fact in facts)))).digest()

    def _require_text(self, field: str, allowed: str, fix: str) -> None:
        value = getattr(self, field)
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"namespace.{field}", value, "missing", allowed=allowed, fix=fix)

    def _require_count(self, field: str, fix: str) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problem = "missing" if value == 0 else "not a positive integer"
            raise ConfigError(f"namespace.{field}", value, problem, allowed="an integer >= 1", fix=fix)


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """Where this process stands among the ranks of one engine: which shard of a page it holds."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 1 <= size < 2**16:
                raise ConfigError(f"rank.{axis}_size", size, "not a number of ranks", allowed="1 to 65535")
            if not 0 <= rank < size:
                raise ConfigError(f"rank.{axis}_rank", rank, "no such rank", allowed=f"0 to {size - 1}")


SINGLE_RANK: Final = Rank()
