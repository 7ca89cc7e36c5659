"""Where this process stands among the ranks of its engine, and who of them does what."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias, get_args

import msgspec

from hicache_actors.errors import ConfigError
from hicache_actors.keys.namespace import Rank

TransportKind: TypeAlias = Literal["gloo", "tcp"]

_SIZES = ("tp", "pp", "cp", "dp")


class RankGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that must see the same cache: all tensor, pipeline and context ranks of one replica of the engine.

    Data-parallel replicas (``dp``) schedule for themselves, so each has a group of its own.  With DP attention ``tp`` is the tensor
    size within one replica's attention.  No two ranks need to share a host.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    address: str | None = None
    """``host:port``.  gloo: of a `torch.distributed` store; tcp: where rank 0 of this group listens.  Default for gloo: the
    launcher's store (``MASTER_ADDR``, ``MASTER_PORT``), which torchrun and ``init_process_group`` keep; required for tcp."""

    hosts_store: bool = False
    """gloo: rank 0 of the first replica makes the store at ``address``, and keeps it until its process ends.  Default: it is there
    already."""

    transport: TransportKind = "gloo"

    epoch: int = 0
    """Raised by everybody when a group is formed again after a peer was lost: messages of an older one cannot reach it."""

    deadline_s: float = 4.0
    """How long a round may take from the moment it is issued.  Then its peers are lost, for good, and the cache degrades."""

    start_deadline_s: float = 30.0
    """How long the ranks wait for one another when they open."""

    def __post_init__(self) -> None:
        for axis in _SIZES:
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if type(size) is not int or not 1 <= size < 2**16:
                raise ConfigError(f"ranks.{axis}_size", size, "not a number of ranks", allowed="1 to 65535")
            if type(rank) is not int or not 0 <= rank < size:
                raise ConfigError(f"ranks.{axis}_rank", rank, "no such rank", allowed=f"0 to {size - 1}")
        if self.transport not in get_args(TransportKind):
            raise ConfigError("ranks.transport", self.transport, "unknown", allowed=get_args(TransportKind))
        for field in ("deadline_s", "start_deadline_s"):
            if getattr(self, field) <= 0:
                raise ConfigError(f"ranks.{field}", getattr(self, field), "must be positive, in seconds")
        if self.size > 1:
            self.endpoint()

    @property
    def size(self) -> int:
        """Ranks that agree."""
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def rank(self) -> int:
        """This one's number among them; 0 is the leader."""
        return (self.pp_rank * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank

    @property
    def leads(self) -> bool:
        """Whether async verbs are called here."""
        return self.rank == 0

    @property
    def lag(self) -> int:
        """Steps from a round to its apply: the stages of the pipeline, for as many steps are under way at once."""
        return self.pp_size

    @property
    def name(self) -> str:
        """Of this group in its store; another epoch or replica has another."""
        return f"hicache/epoch{self.epoch}/dp{self.dp_rank}of{self.dp_size}"

    @property
    def key_rank(self) -> Rank:
        """Which shard of a page this rank holds."""
        return Rank(
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            pp_rank=self.pp_rank,
            pp_size=self.pp_size,
            cp_rank=self.cp_rank,
            cp_size=self.cp_size,
        )

    def endpoint(self) -> tuple[str, int]:
        """-> host, port.  Raises `ConfigError` if nothing names them."""
        address = self.address
        if address is None and self.transport == "gloo":
            host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
            address = f"{host}:{port}" if host and port else None
        if address is None:
            raise ConfigError(
                "ranks.address", None, "missing: the ranks cannot find one another", allowed="host:port",
                fix="set it, or start the engine with torchrun (gloo)",
            )  # fmt: skip
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError("ranks.address", address, "not an address", allowed="host:port, e.g. '10.0.0.1:29555'")
        return host.strip("[]"), int(port)
