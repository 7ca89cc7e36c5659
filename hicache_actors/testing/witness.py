"""A witness of all jobs of a cache: both ends must come once, whatever happens."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from hicache_actors.cache.api import HiCache
from hicache_actors.core.words import (
    Effect,
    Forget,
    Phase,
    Settled,
    StartBackup,
    StartDrain,
    StartLoad,
    StartPrefetch,
    StartWriteBack,
)


class Patch(Protocol):
    """``pytest.MonkeyPatch`` is one."""

    def setattr(self, target: object, name: str, value: object) -> None: ...


class Witness:
    """Counts, from the outside, what each job was told and told: both ends must come once, whatever happens."""

    def __init__(self, cache: HiCache, patch: Patch) -> None:
        self.started: dict[int, str] = {}
        self.settled: Counter[int] = Counter()
        self.forgotten: Counter[int] = Counter()
        self.answers: Counter[tuple[int, Phase]] = Counter()
        self.released: Counter[int] = Counter()
        board, driver = cache.driver.board, cache.driver
        done, released, execute = board.done, board.released, cache.pipelines.execute

        def count_done(job: int, phase: Phase, value: int) -> None:
            self.answers[job, phase] += 1
            done(job, phase, value)

        def count_released(job: int, *, sound: bool = True) -> None:
            self.released[job] += 1
            released(job, sound=sound)

        def count_effects(effects: list[Effect]) -> None:
            for effect in effects:
                self._see(effect)
            execute(effects)

        patch.setattr(board, "done", count_done)
        patch.setattr(board, "released", count_released)
        patch.setattr(driver, "_execute", count_effects)

    def _see(self, effect: Effect) -> None:
        if isinstance(effect, (StartPrefetch, StartLoad, StartWriteBack, StartBackup, StartDrain)):
            self.started[effect.job] = type(effect).__name__
        elif isinstance(effect, Settled):
            self.settled[effect.job] += 1
        elif isinstance(effect, Forget):
            self.forgotten[effect.job] += 1

    def check(self, *, core_broke: bool = False) -> None:
        """All jobs have ended: RESULT and RELEASED came once, on both sides.

        A Core that broke while it applied a result settles that job once more when it is degraded.
        """
        assert self.started
        for job, kind in self.started.items():
            assert self.forgotten[job] == self.released[job] == 1, f"{kind} {job}: RELEASED {self.released[job]} times"
            if kind == StartDrain.__name__:
                assert not self.settled[job], f"{kind} {job} has no RESULT"
                continue
            assert self.settled[job] == 1 or (core_broke and self.settled[job]), (
                f"{kind} {job}: {self.settled[job]} times"
            )
            assert self.answers[job, Phase.RUN] == 1, f"{kind} {job}: {self.answers}"
            assert self.answers[job, Phase.HIT] <= 1
        assert set(self.forgotten) == set(self.started)

    def check_closed(self) -> None:
        """The cache was closed meanwhile: nothing came twice, and whoever answered let go of the slots as well."""
        assert self.started
        for counts in (self.settled, self.forgotten, self.answers, self.released):
            assert all(times == 1 for times in counts.values()), counts
        running = {job for job, kind in self.started.items() if kind != StartDrain.__name__}
        assert {job for job, phase in self.answers if phase is Phase.RUN} == running
        assert set(self.released) >= running
