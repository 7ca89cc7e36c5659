"""Load: host pages of a lease become device pages, all of the asked part or nothing.

The verdict belongs to the load, not to the lease: it is filed here until everybody who waits for it has dropped it.
"""

from __future__ import annotations

from hicache_actors.core.jobs import Job
from hicache_actors.core.lease import CoreLease
from hicache_actors.core.news import LoadEnd
from hicache_actors.core.node import Node
from hicache_actors.core.room import Rooms
from hicache_actors.core.state import Note, State
from hicache_actors.core.words import (
    DEVICE,
    FILLING,
    HOST,
    READY,
    SLOT_BYTES,
    LoadResult,
    Phase,
    Settled,
    Shortfall,
    Slots,
    StartLoad,
    unpack_slots,
)


class LoadJob(Job):
    """Pins: host source [start, end), device target (to the root)."""

    kind = "load"

    def __init__(self, loads: Loads, start: int, pages: int) -> None:
        super().__init__(Phase.RUN, loads.state.epoch)
        self.loads, self.start, self.pages = loads, start, pages
        self.target: Slots = b""

    def on_result(self, pages: int, sound: bool) -> None:
        self.loads.settle(self, min(pages, self.pages), sound)

    def on_degrade(self) -> None:
        self.loads.verdict(self, LoadResult(0, "degraded"))


class _Verdict:
    __slots__ = ("holders", "result")

    def __init__(self) -> None:
        self.holders: set[int] = set()
        self.result: LoadResult | None = None


class Loads:
    """Opens loads, applies their RESULT, answers for them."""

    def __init__(self, state: State, rooms: Rooms) -> None:
        self.state, self.rooms = state, rooms
        self.verdicts: dict[int, _Verdict] = {}

    def open(self, lease: CoreLease, nodes: list[Node], start: int) -> int | Shortfall:
        """Load ``nodes`` (host ready, absent on the device, a path that starts at page ``start``, its parents pinned there)."""
        state, tree, pins = self.state, self.state.tree, self.state.pins
        tail = nodes[-1]
        need = tail.end - start
        source = pins.pin(HOST, tail, start)  # first: making room must not take the source
        slots = self.rooms.take(lease, need)
        if slots is None:
            pins.unpin([source])
            return state.evictor.shortfall(need, self.rooms.within_reach(lease))
        job = LoadJob(self, start, need)
        state.jobs.add(job)
        for node in nodes:
            begin = tree.start(node) - start
            state.residents.put(node, DEVICE, slots[4 * begin : 4 * (node.end - start)], FILLING, job.id)
        job.pins = [source, pins.pin(DEVICE, tail)]
        job.target = slots
        self.expect(job.id)
        state.effects.append(StartLoad(job.id, lease.rid, b"".join([node.at[HOST].slots for node in nodes]), slots))
        state.note(Note.LOAD, job.id, start, need)
        return job.id

    def settle(self, job: LoadJob, pages: int, sound: bool) -> None:
        """RESULT: the first ``pages`` pages are ready, what follows is absent and fails the leases that read or hang below it."""
        state, tree = self.state, self.state.tree
        if job.epoch != state.epoch:
            self.verdict(job, LoadResult(0, "reset"))
            state.effects.append(Settled(job.id, 0, "reset"))
            state.to_limbo(job)
            return
        pin = job.pins[1]
        good, bad = tree.cut_at(pin.tail, job.start, job.start + pages)
        for node in good:
            state.residents.filled(node, DEVICE)
        if bad:
            self._fail(bad[0], sound)
        whole = pin.tail.end >= job.start + job.pages
        valid = min(pin.tail.end, job.start + pages) * state.page
        self.verdict(job, LoadResult(valid, None if whole else "load_failed"))
        state.effects.append(Settled(job.id, pages, None if whole else "load_failed"))
        state.to_limbo(job)
        if good and good[0].at[DEVICE].state:
            self._save_below(good[0])

    def _fail(self, top: Node, sound: bool) -> None:
        """``top`` and what follows were not read: device residency from there on goes, on the host too if the source is bad."""
        state, tree, pins = self.state, self.state.tree, self.state.pins
        state.count("loads_failed")
        lost = tree.start(top)
        shrunk = pins.lose(DEVICE, tree.subtree(top))
        if not sound:
            state.count("bad_sources")
            if top.tag:
                pins.lose(HOST, tree.subtree(top))
        state.lose_pages(shrunk, lost)

    def _save_below(self, top: Node) -> None:
        """Pages that were unproven until now, below any page that was loaded: the write policy runs over them."""
        state = self.state
        prompts = {id(lease.pin.tail): lease.tokens for lease in state.leases.values()}
        for node in state.tree.subtree(top):
            # making room for one may have taken others, that are on the host only, out of the tree
            if node.tag and node.at[DEVICE].state == READY and not node.at[DEVICE].kids:
                state.saving.passed(node, prompts.get(id(node)))

    # -- verdicts -----------------------------------------------------------------------------------------------------------

    def verdict(self, job: LoadJob, result: LoadResult) -> None:
        self.answer(job.id, result)
        waiting = [lease for lease in self.state.leases.values() if job.id in lease.loads]
        for lease in waiting:
            if lease.failed is None and all(map(self.settled, lease.loads)):
                lease.ready_tokens = lease.usable_tokens
        good = max(0, result.valid_tokens // self.state.page - job.start) if result.failed else job.pages
        rids = tuple(lease.rid for lease in waiting)
        failed_pages = tuple(unpack_slots(job.target[good * SLOT_BYTES :]))
        self.state.news.loads.append(LoadEnd(f"load-{job.id}", rids, result, failed_pages))

    def expect(self, job_id: int) -> None:
        """A load that has been opened will have a verdict."""
        self.verdicts[job_id] = _Verdict()

    def answer(self, job_id: int, result: LoadResult) -> None:
        verdict = self.verdicts.get(job_id)
        if verdict is not None:
            verdict.result = result
            self._drop_unasked(job_id, verdict)

    def hold(self, job_id: int, holder: int = 0) -> None:
        """A lease (by its number), or the one engine that owns the blocks, waits for this load."""
        self.verdicts[job_id].holders.add(holder)

    def forget(self, job_id: int, holder: int = 0) -> None:
        """It will not ask any more.  Any thread; idempotent, since a lease may be taken back that has a handle already."""
        verdict = self.verdicts.get(job_id)
        if verdict is not None:
            verdict.holders.discard(holder)
            self._drop_unasked(job_id, verdict)

    def _drop_unasked(self, job_id: int, verdict: _Verdict) -> None:
        """An open load keeps its verdict even if nobody holds it: the next lease may join its fill."""
        if not verdict.holders and verdict.result is not None:
            self.verdicts.pop(job_id, None)

    def settled(self, job_id: int) -> bool:
        verdict = self.verdicts.get(job_id)
        return verdict is None or verdict.result is not None

    def result(self, job_id: int) -> LoadResult | None:
        """None until agreed, or after everybody has dropped it."""
        verdict = self.verdicts.get(job_id)
        return None if verdict is None else verdict.result
