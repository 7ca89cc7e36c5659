"""The link of one cache to the other ranks: made when the cache opens, left when it closes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Final

import structlog

from hicache_actors.core import Core
from hicache_actors.errors import HiCacheError
from hicache_actors.ranks.divergence import explain
from hicache_actors.ranks.group import RankGroup
from hicache_actors.ranks.intake import Intake
from hicache_actors.ranks.start import Fact, agree_on_opening, agree_on_start
from hicache_actors.ranks.sync import RankSync
from hicache_actors.ranks.transport import Transport
from hicache_actors.runtime import Workers, bind_log

_BEAT, _LATE, _INTAKE = b"\0", b"\1", b"\2"
_BEATS: Final = 4  #: while all are idle, so many signs of life of the leader per deadline


class RankLink:
    """``sizes`` are the smallest of all ranks."""

    def __init__(self, group: RankGroup, sync: RankSync, sizes: Mapping[str, int]) -> None:
        self.group, self.sync, self.sizes = group, sync, sizes
        self.intake = Intake(leads=group.leads)
        self.workers = Workers("ranks", 1, max_lost=None)
        self.log: structlog.stdlib.BoundLogger = bind_log(part="ranks", rank=group.rank)

    def explain(self, core: Core) -> str:
        """For the report of a divergence, which all ranks make in the same place."""
        return explain(self.sync, core.decisions, core.decided, self.sync.deadline_s / 4)

    async def agree_on_opening(self, failure: HiCacheError | None, opening_s: float) -> None:
        """All ranks: each has opened its store, which may take ``opening_s``, or ``failure`` says why not.

        Raises, on all ranks alike, `BackendError` if one could not; `PeerError` if one does not answer.
        """
        await agree_on_opening(self.sync, failure, self.group.start_deadline_s + opening_s)

    def receive(self, timeout_s: float | None) -> bytes | None:
        """Our own channel: the leader's next intake, once there is one, on all ranks -> None after ``timeout_s`` of the leader.

        Idle ranks rest here.  Blocks.  Raises `PeerError` if the leader (or, on the leader, a peer that it tries to tell) is gone.
        """
        beat_s = self.sync.deadline_s / _BEATS
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            data = b""
            if self.group.leads:
                left_s = beat_s if until_s is None else min(beat_s, max(0.0, until_s - time.monotonic()))
                late = left_s < beat_s
                data = _INTAKE + self.intake.take_bytes() if self.intake.wait(left_s) else _LATE if late else _BEAT
            data = self.sync.broadcast(data, self.sync.deadline_s)
            if data[:1] != _BEAT:
                return data[1:] if data[:1] == _INTAKE else None

    def close(self) -> None:
        self.sync.close()
        self.workers.close()


async def join(
    group: RankGroup, sizes: Mapping[str, int], facts: Mapping[str, Fact], transport: Transport | None
) -> RankLink:
    """Meet the other ranks and compare sizes and facts.

    Raises `PeerError` if they do not all come within the start deadline; `ConfigError`, on all of them, for a fact that differs, or
    if one cannot open its cache.
    """
    sync = await _sync(group, transport)
    try:
        agreed = await agree_on_start(sync, sizes, {**_axes(group), **facts}, group.start_deadline_s)
    except BaseException:
        sync.close()
        raise
    return RankLink(group, sync, agreed)


async def tell_failure(group: RankGroup, failure: Exception, transport: Transport | None) -> None:
    """This rank cannot open its cache: meet the others and say why, so that they need not wait for it.

    Returns once they have heard of it, or after the start deadline; raises nothing but what cancels it.
    """
    bind_log(part="ranks", rank=group.rank).error("cannot_open", why=str(failure), next="the other ranks are told")
    with contextlib.suppress(HiCacheError):
        sync = await _sync(group, transport)
        try:
            await agree_on_start(sync, {}, {}, group.start_deadline_s, failure)
        finally:
            sync.close()


async def _sync(group: RankGroup, transport: Transport | None) -> RankSync:
    if transport is None:
        meeting = Workers("ranks-meet", 1, max_lost=None)
        try:
            transport = await meeting.run(_meet, group)
        finally:
            meeting.close()
    return RankSync(transport, lag=group.lag, deadline_s=group.deadline_s)


def _meet(group: RankGroup) -> Transport:
    if group.transport == "tcp":
        from hicache_actors.ranks.tcp import TcpTransport

        return TcpTransport(group)
    from hicache_actors.ranks.gloo import GlooTransport

    return GlooTransport(group)


def _axes(group: RankGroup) -> dict[str, Fact]:
    names = ("tp_size", "pp_size", "cp_size", "dp_size", "dp_rank", "epoch", "deadline_s")
    return {f"ranks.{name}": getattr(group, name) for name in names}
