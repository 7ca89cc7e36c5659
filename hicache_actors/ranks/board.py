"""Local answers on their way to Core."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

from hicache_actors.core.words import Phase

Value: TypeAlias = tuple[int, Phase, int]
"""Job, phase, and its HIT (pages) or RESULT (`encode_result`)."""

SPOILT: Final = 1
RELEASED: Final = 2
"""Elements of a round for a job that has ended; `SPOILT`: it waited for a forward pass that failed.  0: not yet."""

_NOTHING: Final[Mapping[Phase, int]] = {}


def ended(job: int, element: int) -> int:
    """A released job as Core takes it: negative if it is spoilt."""
    return -job if element == SPOILT else job


class WireMap(Protocol):
    """Which job owns which element of a round; `core.Wire` is one."""

    @property
    def slots(self) -> Sequence[tuple[int, Phase]]: ...

    @property
    def rows(self) -> Sequence[int]: ...


class Board:
    """The local answers of this rank's open jobs, until they have been agreed.  Any thread may file.

    A job is on the board from the effect that starts it to its `Forget`; an answer for a job that is not (it was closed
    by a degrade, or declined) is dropped.  ``on_news`` is called, without a lock held, by the thread that filed the
    answer.
    """

    def __init__(self) -> None:
        self.on_news: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._values: dict[int, dict[Phase, int]] = {}
        self._released: dict[int, int] = {}

    def open(self, job: int) -> None:
        """Driver only: the job's start effect has been taken from Core."""
        with self._lock:
            self._values.setdefault(job, {})

    def done(self, job: int, phase: Phase, value: int) -> None:
        """File HIT (pages) or RESULT (`encode_result`).  The first answer of a phase stands: it may be travelling."""
        with self._lock:
            answers = self._values.get(job)
            if answers is None or phase in answers:
                return
            answers[phase] = value
        self.tell()

    def released(self, job: int, *, sound: bool = True) -> None:
        """File that every copy or read on the job's slots has really ended on this rank; not ``sound``: a pass has failed."""
        with self._lock:
            if job not in self._values or job in self._released:
                return
            self._released[job] = RELEASED if sound else SPOILT
        self.tell()

    def forget(self, job: int) -> None:
        """Driver only: the job has left Core."""
        with self._lock:
            self._values.pop(job, None)
            self._released.pop(job, None)

    def value(self, job: int, phase: Phase) -> int | None:
        answers = self._values.get(job)
        return None if answers is None else answers.get(phase)

    def is_released(self, job: int) -> bool:
        return job in self._released

    def answers(self, wire: WireMap) -> tuple[list[Value], list[int]]:
        """What is filed for the entries of a map: values and released jobs (`Core.apply`)."""
        with self._lock:
            values = [
                (job, phase, value)
                for job, phase in wire.slots
                if (value := self._values.get(job, {}).get(phase)) is not None
            ]
            return values, [ended(job, self._released[job]) for job in wire.rows if job in self._released]

    def fill(self, wire: WireMap, vector: array[int], first_slot: int, first_row: int) -> bool:
        """Write into a round's vector what is filed for the entries of a map -> whether anything is."""
        filed = False
        with self._lock:
            for at, (job, phase) in enumerate(wire.slots, first_slot):
                value = self._values.get(job, _NOTHING).get(phase)
                if value is not None:
                    vector[at] = value
                    filed = True
            if self._released:
                for at, job in enumerate(wire.rows, first_row):
                    if job in self._released:
                        vector[at] = self._released[job]
                        filed = True
        return filed

    def read_news(self) -> None:
        """What has been filed so far is about to be sent: `wait_news` waits for more."""
        self._news.clear()

    def wait_news(self, timeout_s: float) -> bool:
        """Block the calling thread until something has been filed since `read_news`; -> whether it was."""
        return self._news.wait(timeout_s)

    def __len__(self) -> int:
        """Jobs on the board."""
        return len(self._values)

    def tell(self) -> None:
        """Drivers only: something new waits (an answer, or an intent)."""
        self._news.set()
        if self.on_news is not None:
            self.on_news()
