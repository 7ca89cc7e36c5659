"""How a simulated job moves its pages: late, partly, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from hicache_actors.core.words import Phase, encode_result

if TYPE_CHECKING:
    from hicache_actors.testing.world import SimWorld


class Faults(msgspec.Struct, frozen=True):
    """How badly the movers behave.  Probabilities are per job; times in milliseconds of virtual time.

    The page that hangs or fails is drawn, or is ``page``.
    """

    hang: float = 0.06  #: a page takes one to five deadlines
    fail: float = 0.06  #: the job stops with an error
    unsound: float = 0.3  #: of failed loads: the source was bad
    deadline_ms: float = 400.0
    page: int | None = None


class Mover:
    """The pages of one job, in order, up to ``width`` at a time, as a pipeline would move them.

    RESULT is told at the end, at a failure, at a stop, or at the deadline; RELEASED when the last page under way has ended.
    ``keys`` is what the source must hold and what the target will hold.
    """

    def __init__(
        self,
        world: SimWorld,
        kind: str,
        job: int,
        keys: Sequence[int],
        mean_ms: float,
        *,
        source: tuple[list[int], Sequence[int]] | None = None,
        target: tuple[list[int], Sequence[int]] | None = None,
        width: int = 1,
        each: Callable[[int], None] | None = None,
    ) -> None:
        self.world, self.kind, self.job, self.keys, self.mean_ms = world, kind, job, keys, mean_ms
        self.source, self.target, self.width, self.each = source, target, width, each
        self.next = self.under_way = self.leading = 0
        self.moved: set[int] = set()
        self.told = self.released = False
        faults = world.faults
        self.deadline_ms = faults.deadline_ms
        self.hangs_at = self._draw(faults.hang, faults.page)
        self.fails_at = self._draw(faults.fail, faults.page)

    def _draw(self, probability: float, page: int | None) -> int | None:
        if not self.keys or self.world.rng.random() >= probability:
            return None
        return self.world.rng.randrange(len(self.keys)) if page is None else page

    def start(self) -> None:
        self.world.at(self.deadline_ms, self.tell)
        self._more()

    def tell(self, sound: bool = True) -> None:
        if not self.told:
            self.told = True
            self.world.board.done(self.job, Phase.RUN, encode_result(self.leading, sound=sound))

    def _more(self) -> None:
        while not self._over() and self.under_way < self.width:
            self._begin(self.next)
        if self._over() and not self.under_way and not self.released:
            self.released = True
            self.tell()
            self.world.board.released(self.job)
            self.world.fire((self.kind, self.job))

    def _over(self) -> bool:
        return self.told or self.world.dead or self.world.stopped(self.job) or self.next == len(self.keys)

    def _begin(self, page: int) -> None:
        world = self.world
        self.next += 1
        self.under_way += 1
        self._check_source(page, "source at start")
        mark = world.mark()
        if self.target is not None:
            cells, slots = self.target
            cells[slots[page]] = mark
        delay_ms = world.delay_ms(self.mean_ms)
        if page == self.hangs_at:
            delay_ms += self.deadline_ms * (1 + 4 * world.rng.random())
        world.at(delay_ms, lambda: self._end(page, mark, page == self.fails_at))

    def _end(self, page: int, mark: int, failed: bool) -> None:
        self.under_way -= 1
        self._check_source(page, "source at end")
        if failed:
            unsound = self.kind == "load" and self.world.rng.random() < self.world.faults.unsound
            self.tell(sound=not unsound)
        else:
            if self.target is not None:
                cells, slots = self.target
                if cells[slots[page]] != mark:
                    self.world.violate(self.kind, self.job, "target written by another", page)
                cells[slots[page]] = self.keys[page]
            if self.each is not None:
                self.each(self.keys[page])
            self.moved.add(page)
            if not self.told:
                while self.leading in self.moved:
                    self.leading += 1
        self._more()

    def _check_source(self, page: int, when: str) -> None:
        if self.source is not None:
            cells, slots = self.source
            if cells[slots[page]] != self.keys[page]:
                self.world.violate(self.kind, self.job, when, page)
