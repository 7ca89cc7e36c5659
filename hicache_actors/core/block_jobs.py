"""The jobs of blocks that the engine owns: loads into them, saves from them.  See `blocks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_actors.core.jobs import Job
from hicache_actors.core.news import SaveEnd
from hicache_actors.core.node import Node
from hicache_actors.core.pins import Pin
from hicache_actors.core.saving_jobs import Range, WriteBackJob
from hicache_actors.core.words import LoadResult, Phase, Tokens

if TYPE_CHECKING:
    from hicache_actors.core.blocks import Blocks


class BlockLoadJob(Job):
    """Host pages [start, start + pages) into ``blocks``.  Pins: host source."""

    kind = "load"

    def __init__(self, owner: Blocks, load_id: str, rid: str, start: int, blocks: tuple[int, ...]) -> None:
        super().__init__(Phase.RUN, owner.state.epoch)
        self.owner, self.load_id, self.rid = owner, load_id, rid
        self.start, self.blocks, self.pages = start, blocks, len(blocks)
        self.valid_pages: int | None = None  # agreed

    def on_result(self, pages: int, sound: bool) -> None:
        self.owner.loaded(self, min(pages, self.pages), sound)

    def on_released(self) -> None:
        self.owner.state.news.ended.append(self.load_id)

    def on_degrade(self) -> None:
        self.owner.verdict(self, LoadResult(0, "degraded"))


class SaveRange(Range):
    """The part of one `save_from` that its section's job writes; ``present_pages`` of what was given need not be written."""

    __slots__ = ("present_pages", "reason", "rid", "save_id")

    def __init__(self, pin: Pin, start: int, tokens: Tokens, save_id: str, rid: str) -> None:
        super().__init__(pin, start, tokens)
        self.save_id, self.rid = save_id, rid
        self.present_pages = 0
        self.reason: str | None = None


class SaveJob(WriteBackJob):
    """All `save_from` of one section.  Pins, for each range: host target [start, end)."""

    def __init__(self, owner: Blocks) -> None:
        super().__init__(owner.saving)
        self.owner = owner
        self.saves: list[SaveRange] = []

    def settle(self, part: Range, good: list[Node], bad: list[Node]) -> None:
        assert isinstance(part, SaveRange)
        self.owner.saved(self, part, good, bad)

    def on_released(self) -> None:
        self.owner.state.news.ended += [part.save_id for part in self.saves]

    def on_degrade(self) -> None:
        for part in self.saves:
            self.owner.state.news.saves.append(SaveEnd(part.save_id, part.rid, 0, part.present_pages, "degraded"))
