"""Open jobs, and their places on the wire.

A job may first agree a HIT, then its RESULT, then RELEASED (every copy or read on its slots has ended on every rank).  Each kind
is a small class near the verbs that open it: `fetch.PrefetchJob`, `loads.LoadJob`, `saving_jobs.WriteBackJob` and `BackupJob`,
`leases.DrainJob`.  `Core.apply` knows no kind.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from hicache_actors.core.pins import Pin
from hicache_actors.core.words import DEVICE, SLOT_BYTES, JobKind, Phase, Slots


class Job:
    """Base of all kinds.  ``slots`` belong to the job itself (not to nodes) and are freed with it, ``pins`` end with it."""

    kind: ClassVar[JobKind]
    place: ClassVar[int] = DEVICE  #: whose slots
    storage: ClassVar[bool] = False  #: takes places of the storage half

    def __init__(self, phase: Phase, epoch: int) -> None:
        self.id = 0  # given by `Jobs.add`
        self.phase = phase
        self.started = True  #: its effect has been given; nobody can answer before
        self.epoch = epoch
        self.pins: list[Pin] = []
        self.slots: Slots = b""

    def on_hit(self, pages: int) -> None:
        """The agreed HIT.  Grants slots, or declines and closes the job."""
        raise NotImplementedError(f"a {self.kind} job has no HIT")

    def on_result(self, pages: int, sound: bool) -> None:
        """The agreed RESULT: the first ``pages`` pages are good; ``sound`` is False if the source was bad at the next one."""
        raise NotImplementedError(f"a {self.kind} job has no RESULT")

    def on_spoilt(self) -> None:
        """Just before `on_released`: a forward pass that it waited for has failed."""
        raise NotImplementedError(f"a {self.kind} job waits for no forward pass")

    def on_released(self) -> None:
        """Just before its pins end and its slots are freed."""

    def on_degrade(self) -> None:
        """The cache has degraded before the RESULT: answer 0 to whoever waits."""


class Wire(msgspec.Struct, frozen=True):
    """Which job answers at which place of the round vector; kept with the round, as it was when it was issued."""

    slots: tuple[tuple[int, Phase], ...]
    rows: tuple[int, ...]


class Jobs:
    """Open jobs in job order (ids ascend)."""

    def __init__(self, table_slots: int, table_rows: int) -> None:
        self._table_slots, self._table_rows = table_slots, table_rows
        self.open: dict[int, Job] = {}
        self.last = 0  # the newest job's id

    def add(self, job: Job) -> None:
        self.last += 1
        job.id = self.last
        self.open[job.id] = job

    def wire(self) -> Wire:
        """Places go to the oldest open jobs; storage jobs take at most half of each table, so the others always pass."""
        slots: list[tuple[int, Phase]] = []
        rows: list[int] = []
        storage_slots, storage_rows = self._table_slots // 2, self._table_rows // 2
        for job in self.open.values():
            if not job.started:
                continue
            if job.phase is Phase.LIMBO:
                if len(rows) < self._table_rows and (not job.storage or storage_rows):
                    rows.append(job.id)
                    storage_rows -= job.storage
            elif len(slots) < self._table_slots and (not job.storage or storage_slots):
                slots.append((job.id, job.phase))
                storage_slots -= job.storage
        return Wire(tuple(slots), tuple(rows))

    def own_pages(self, place: int, *, limbo: bool) -> int:
        """Pages of jobs' own slots: of those in limbo, or of those before their RESULT (grants of running prefetches)."""
        return (
            sum(
                len(job.slots)
                for job in self.open.values()
                if job.place == place and (job.phase is Phase.LIMBO) == limbo
            )
            // SLOT_BYTES
        )
