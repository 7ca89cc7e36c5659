"""What a ``mooncake://`` URL may say."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from hicache_actors.backends.urls import FIELD, number, parse_url
from hicache_actors.errors import ConfigError

_GB: Final = 10**9
_NAMES: Final = (
    "metadata", "local", "protocol", "device", "segment_gb", "buffer_gb", "replicas", "prefix", "ssd", "tenant",
)  # fmt: skip
_PREFIX: Final = re.compile(r"[A-Za-z0-9_.:=-]*")


class MooncakeOptions(NamedTuple):
    """``mooncake://MASTER_HOST:PORT``; all else has a default that suits a test on one host with TCP."""

    master: str
    metadata: str  #: of the transfer engine: ``P2PHANDSHAKE``, or the address of its metadata server
    local: str  #: this host's name, as others reach it
    protocol: str  #: ``tcp`` or ``rdma``
    device: str  #: names of the RDMA devices, with commas; empty for tcp
    segment_bytes: int  #: memory of this process that is lent to the cluster
    buffer_bytes: int  #: of the client's own
    replicas: int  #: copies that are asked for; a cluster with fewer segments makes fewer
    prefix: str
    ssd: str  #: a folder that the lent memory overflows into, if the master allows it
    tenant: str

    @classmethod
    def parse(cls, url: str) -> MooncakeOptions:
        """`ConfigError` for what cannot be honoured."""
        parts = parse_url(url, "mooncake", path=False, options=_NAMES)
        given = parts.options
        if not re.fullmatch(r"[^:]+:\d{1,5}", parts.host):
            raise ConfigError(FIELD, url, f"{parts.host!r} is no address of a master", allowed="mooncake://HOST:PORT")
        protocol = given.get("protocol", "tcp")
        if protocol not in ("tcp", "rdma"):
            raise ConfigError(FIELD, url, f"protocol={protocol!r}", allowed=["tcp", "rdma"])
        prefix = given.get("prefix", "hicache:")
        if not _PREFIX.fullmatch(prefix):
            raise ConfigError(FIELD, url, f"prefix={prefix!r}", allowed="letters, digits and '_.:=-'")
        ssd = given.get("ssd", "")
        segment_bytes = round(number(url, "segment_gb", given.get("segment_gb", "0")) * _GB)
        if ssd and not segment_bytes:
            raise ConfigError(
                FIELD, url, "ssd without segment_gb: it is lent memory that overflows to a disk",
                allowed="segment_gb more than 0 beside ssd", fix="add segment_gb, or leave ssd out",
            )  # fmt: skip
        return cls(
            parts.host,
            given.get("metadata", "P2PHANDSHAKE"),
            given.get("local", "127.0.0.1"),
            protocol,
            given.get("device", ""),
            segment_bytes,
            round(number(url, "buffer_gb", given.get("buffer_gb", "0.25"), least=0.001) * _GB),
            int(number(url, "replicas", given.get("replicas", "1"), whole=True, least=1)),
            prefix,
            ssd,
            given.get("tenant", "default"),
        )
