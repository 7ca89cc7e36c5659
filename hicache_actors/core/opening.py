"""Host memory that opens chunk by chunk.

To touch and register hundreds of GB takes a minute, and a cache is of use with the first of them.  So Core begins with one chunk;
each further one is a job, one after the other, whose RESULT (MIN over the ranks) says that it is ready everywhere.  A chunk that
cannot be had on some rank stays closed, and so do those behind it: a smaller cache, on all ranks alike.
"""

from __future__ import annotations

from hicache_actors.core.jobs import Job
from hicache_actors.core.state import Note, State
from hicache_actors.core.words import HOST, Phase, Settled, StartOpen


class OpenJob(Job):
    kind = "open"
    place = HOST

    def __init__(self, opening: Opening, pages: int) -> None:
        super().__init__(Phase.RUN, opening.state.epoch)
        self.opening, self.pages = opening, pages

    def on_result(self, pages: int, sound: bool) -> None:
        self.opening.settle(self, pages)

    def on_degrade(self) -> None:
        """The rest stays closed."""


class Opening:
    """``idle``: a chunk is closed, and nobody makes it ready yet."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.idle = state.pools[HOST].closed > 0

    def go_on(self) -> None:
        """Open the next chunk, if there is one."""
        state, pool = self.state, self.state.pools[HOST]
        self.idle = False
        pages = min(state.config.host_chunk_pages, pool.closed)
        if not pages or state.degraded:
            return
        job = OpenJob(self, pages)
        state.jobs.add(job)
        state.effects.append(StartOpen(job.id, pool.opened, pages))
        state.note(Note.OPEN, job.id, pool.opened, pages)

    def settle(self, job: OpenJob, pages: int) -> None:
        """All ranks have answered."""
        state = self.state
        ready = pages >= job.pages
        state.effects.append(Settled(job.id, job.pages if ready else 0))
        state.to_limbo(job)
        if ready:
            state.pools[HOST].open_more(job.pages)
            self.go_on()
