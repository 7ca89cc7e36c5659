"""Attaching a store: a job, so that all ranks use the store from the same step on, or none does.

Each rank opens it for itself, beside what is in use, and answers in RESULT; MIN is `OPENED`, or names the first rank that could
not.  The decision is made in the apply of that RESULT.
"""

from __future__ import annotations

from hicache_actors.core.backlog import Backlog
from hicache_actors.core.jobs import Job
from hicache_actors.core.state import Note, State
from hicache_actors.core.words import Attached, Phase, Settled, StartAttach, StopJob, UseStorage, Wake, attached


class AttachJob(Job):
    kind = "attach"

    def __init__(self, attaching: Attaching, waiter: int, number: int, deadline_s: float) -> None:
        super().__init__(Phase.RUN, attaching.state.epoch)
        self.attaching, self.waiter, self.number, self.deadline_s = attaching, waiter, number, deadline_s
        self.wanted = True  # somebody waits for it, and what is opened shall be used

    def on_result(self, pages: int, sound: bool) -> None:
        self.attaching.settle(self, attached(pages))

    def on_degrade(self) -> None:
        self.attaching.answer(self, Attached("degraded"))


class Attaching:
    """Several may be under way; the one that is decided last is used."""

    def __init__(self, state: State, backlog: Backlog) -> None:
        self.state, self.backlog = state, backlog

    def open(self, waiter: int, number: int, url: str, deadline_s: float) -> None:
        state = self.state
        if state.degraded:
            state.effects.append(Wake(waiter, Attached("degraded")))
            return
        job = AttachJob(self, waiter, number, deadline_s)
        state.jobs.add(job)
        state.effects.append(StartAttach(job.id, number, url, deadline_s))
        state.note(Note.ATTACH, job.id, number, state.text(url))

    def cancel(self, waiter: int) -> Attached | None:
        """-> the answer for who waited; None if that is none of this."""
        job = self._waiting_for(waiter)
        if job is None:
            return None
        job.wanted = False
        self.state.effects.append(StopJob(job.id))
        self.state.note(Note.STOP, job.id)
        return Attached("stopped")

    def settle(self, job: AttachJob, outcome: Attached) -> None:
        """All ranks have answered."""
        if outcome.refused is None and not job.wanted:
            outcome = Attached("stopped")
        if outcome.refused is None:
            self.backlog.set_storage(UseStorage(True, job.number, job.deadline_s))
        self.state.effects.append(Settled(job.id, int(outcome.refused is None), outcome.refused))
        self.answer(job, outcome)
        self.state.to_limbo(job)

    def answer(self, job: AttachJob, outcome: Attached) -> None:
        if job.wanted:
            job.wanted = False
            self.state.effects.append(Wake(job.waiter, outcome))

    def _waiting_for(self, waiter: int) -> AttachJob | None:
        for job in self.state.jobs.open.values():
            if isinstance(job, AttachJob) and job.waiter == waiter and job.wanted:
                return job
        return None
