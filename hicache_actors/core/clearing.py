"""Clearing the store: a job, so that all ranks take what is stored for gone in the same step.

Each rank removes the objects that it has to write.  Whatever becomes of that, nothing counts as stored from the apply of the
agreed RESULT on: some of it has gone, and no rank may believe what another one has removed.
"""

from __future__ import annotations

from hicache_actors.core.backlog import Backlog
from hicache_actors.core.jobs import Job
from hicache_actors.core.state import Note, State
from hicache_actors.core.words import Cleared, Phase, Settled, StartClear, StopJob, Wake, cleared


class ClearJob(Job):
    kind = "clear"

    def __init__(self, clearing: Clearing, waiter: int) -> None:
        super().__init__(Phase.RUN, clearing.state.epoch)
        self.clearing, self.waiter = clearing, waiter
        self.wanted = True  # somebody waits for it

    def on_result(self, pages: int, sound: bool) -> None:
        self.clearing.settle(self, cleared(pages, self.id))

    def on_degrade(self) -> None:
        self.clearing.answer(self, Cleared("degraded"))


class Clearing:
    """Several may be under way."""

    def __init__(self, state: State, backlog: Backlog) -> None:
        self.state, self.backlog = state, backlog

    def open(self, waiter: int, deadline_s: float) -> None:
        state = self.state
        if state.degraded or not state.storage:
            state.effects.append(Wake(waiter, Cleared("degraded" if state.degraded else "no_storage")))
            return
        job = ClearJob(self, waiter)
        state.jobs.add(job)
        state.effects.append(StartClear(job.id, deadline_s))
        state.note(Note.CLEAR, job.id)

    def cancel(self, waiter: int) -> Cleared | None:
        """-> the answer for who waited; None if that is none of this."""
        for job in self.state.jobs.open.values():
            if isinstance(job, ClearJob) and job.waiter == waiter and job.wanted:
                job.wanted = False
                self.state.effects.append(StopJob(job.id))
                self.state.note(Note.STOP, job.id)
                return Cleared("stopped")
        return None

    def settle(self, job: ClearJob, outcome: Cleared) -> None:
        """All ranks have answered."""
        self.backlog.forget_stored()
        self.state.effects.append(Settled(job.id, int(outcome.refused is None), outcome.refused))
        self.answer(job, outcome)
        self.state.to_limbo(job)

    def answer(self, job: ClearJob, outcome: Cleared) -> None:
        if job.wanted:
            job.wanted = False
            self.state.effects.append(Wake(job.waiter, outcome))
