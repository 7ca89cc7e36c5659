"""What has been agreed since the last apply: the answer of `begin_step`."""

from __future__ import annotations

import msgspec

from hicache_actors.core.words import LoadResult


class LoadEnd(msgspec.Struct, frozen=True):
    """The verdict of a load.  ``rids``: the requests that wait for it; ``failed_pages``: the device pages (blocks) it was to fill
    and that hold nothing to be read.  Copies may still write there until ``id`` is named ended.
    """

    id: str
    rids: tuple[str, ...]
    result: LoadResult
    failed_pages: tuple[int, ...] = ()


class SaveEnd(msgspec.Struct, frozen=True):
    """The result of a `save_from`: ``saved_pages`` came to the host by it, ``present_pages`` of those given were there, or on
    their way, before.  ``reason``: why not the rest ("gap", "host_capacity", "save_failed", "reset", "degraded", "disabled").
    """

    id: str
    rid: str
    saved_pages: int
    present_pages: int = 0
    reason: str | None = None


class StepNews(msgspec.Struct, frozen=True):
    """What `begin_step` names, each thing once.

    ``ended``: ids of loads and saves whose last copy has really ended on every rank; only now are the blocks that were given to
    `save_from` or `load_into` the engine's again, also if the request has been aborted.
    """

    loads: tuple[LoadEnd, ...] = ()
    saves: tuple[SaveEnd, ...] = ()
    ended: tuple[str, ...] = ()

    @property
    def failed_loads(self) -> tuple[LoadEnd, ...]:
        return tuple(end for end in self.loads if end.result.failed is not None)


NOTHING_NEW = StepNews()


class News:
    """Collects them during a section and hands them out at the end of the next apply."""

    def __init__(self) -> None:
        self.loads: list[LoadEnd] = []
        self.saves: list[SaveEnd] = []
        self.ended: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves or self.ended)

    def take(self) -> StepNews:
        if not (self.loads or self.saves or self.ended):
            return NOTHING_NEW
        news = StepNews(tuple(self.loads), tuple(self.saves), tuple(self.ended))
        self.loads.clear()
        self.saves.clear()
        self.ended.clear()
        return news
