"""The jobs that save: device pages to the host (write-back), host pages to the storage (backup).  See `saving`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_actors.core.jobs import Job
from hicache_actors.core.node import Node
from hicache_actors.core.pins import Pin
from hicache_actors.core.words import HOST, Path, Phase, Settled, Slots, StartBackup, StartWriteBack, Tokens

if TYPE_CHECKING:
    from hicache_actors.core.saving import Saving


class Range:
    """Pages [start, start + pages) of a path, held by a host pin.  ``tokens`` is the engine's prompt along it, where known."""

    __slots__ = ("pages", "pin", "start", "tokens", "tries")

    def __init__(self, pin: Pin, start: int, tokens: Tokens | None, tries: int = 0) -> None:
        self.pin, self.start, self.tokens, self.tries = pin, start, tokens, tries
        self.pages = pin.tail.end - start


class SavingJob(Job):
    """Saves ranges, in order; a count of pages that were saved is split over them."""

    def __init__(self, saving: Saving) -> None:
        super().__init__(Phase.RUN, saving.state.epoch)
        self.saving = saving
        self.ranges: list[Range] = []
        self.sources: list[Slots] = []

    def on_result(self, pages: int, sound: bool) -> None:
        """Split the count over the ranges, in order; each is settled by its good and its bad nodes."""
        tree, left = self.saving.state.tree, pages
        done = 0
        for part in self.ranges:
            take = min(left, part.pages)
            left -= take
            done += take
            good, bad = tree.cut_at(part.pin.tail, part.start, part.start + take)
            self.settle(part, good, bad)
        self.saving.state.effects.append(Settled(self.id, done))
        self.saving.state.to_limbo(self)

    def settle(self, part: Range, good: list[Node], bad: list[Node]) -> None:
        raise NotImplementedError


class WriteBackJob(SavingJob):
    """Pins, for each range: host target [start, end), device source (to the root)."""

    kind = "write_back"
    place = HOST

    def __init__(self, saving: Saving) -> None:
        super().__init__(saving)
        self.targets: list[Slots] = []
        self.events: dict[int, object] = {}
        self.computed = True

    def effect(self) -> StartWriteBack:
        return StartWriteBack(self.id, b"".join(self.sources), b"".join(self.targets), tuple(self.events.values()))

    def on_result(self, pages: int, sound: bool) -> None:
        """Not ``sound``: a forward has failed that should have computed some of the pages, so none is trusted that is not saved."""
        self.computed = sound
        super().on_result(pages, sound)

    def settle(self, part: Range, good: list[Node], bad: list[Node]) -> None:
        self.saving.written(part, good, bad)
        if bad and not self.computed:
            self.saving.not_computed(bad)

    def on_released(self) -> None:
        self.saving.in_flight_pages -= sum(part.pages for part in self.ranges)


class BackupJob(SavingJob):
    """Pins, for each range: host source [start, end).  ``due_ms``: when it starts at the latest."""

    kind = "backup"
    place = HOST
    storage = True

    def __init__(self, saving: Saving, due_ms: int) -> None:
        super().__init__(saving)
        self.due_ms = due_ms
        self.started = self.announced = False
        self.paths: list[Path] = []
        self.storage_epoch = saving.state.storage_epoch

    def effect(self) -> StartBackup:
        self.started = True
        return StartBackup(self.id, b"".join(self.sources), tuple(self.paths))

    def settle(self, part: Range, good: list[Node], bad: list[Node]) -> None:
        if self.storage_epoch == self.saving.state.storage_epoch:
            self.saving.stored(part, good, bad)

    def on_released(self) -> None:
        self.saving.backup_pages -= sum(part.pages for part in self.ranges)
