"""Saving: device pages become host pages (write-back), host pages become objects of the storage (backup).

One section opens at most one job of each kind; its ranges come in the order in which they were wanted.  Pages are reserved and
pinned when they are wanted, the job's effect follows at the section's end.  Under write_through (and, for pages that have been used
often enough, write_through_selective) write-back is asked for by commit, lease and an agreed load; a refused or failed one by the
next of these that passes the node.  Under write_back `cleaning` asks.  Under each of them, what is put on the host below a
device-only node asks for that one, and so does eviction that passes it over.

A backup opens when its write-back is agreed, or under store_on = "host_evict" when `ahead` asks for it; what it could not store is
tried again by the agreed clock.  What only has come to the host starts a little later, as one job with what comes to it meanwhile
(``gather_s``): each job costs the process time that running passes feel.
"""

from __future__ import annotations

from typing import Final

from hicache_actors.core.ahead import Ahead
from hicache_actors.core.cleaning import Cleaner
from hicache_actors.core.evictions import Cause
from hicache_actors.core.node import SAVING, STORED, UNSTORED, WAITING, Node
from hicache_actors.core.saving_jobs import BackupJob, Range, SavingJob, WriteBackJob
from hicache_actors.core.state import Note, State
from hicache_actors.core.words import ABSENT, DEVICE, FILLING, HOST, READY, SLOT_BYTES, Gather, Path, Phase, Tokens
from hicache_actors.keys.scope import Scope

_RETRIES_PER_APPLY = 8
_GATHERED_PAGES: Final = 256  # a batch at least: more gain nothing by waiting
_GATHERED_SHARE: Final = 8  # nor may more of the host than one page in so many wait: they are pinned
_WRITE_BACK: Final = Cause("write_back")


class Retry:
    """Pages [start, stop) of a path whose backup failed; tried again if they are still on the host and wait.

    Nothing pins them meanwhile, so the path is found again by its tokens.
    """

    __slots__ = ("due_ms", "key", "scope", "start", "stop", "tokens", "tries")

    def __init__(
        self,
        due_ms: int,
        scope: Scope,
        key: memoryview,
        pages: tuple[int, int],
        tokens: Tokens | None,
        tries: int,
    ) -> None:
        self.due_ms, self.scope, self.key, self.tokens, self.tries = due_ms, scope, key, tokens, tries
        self.start, self.stop = pages


class Saving:
    def __init__(self, state: State) -> None:
        self.state = state
        self.retries: list[Retry] = []
        self._write_back: WriteBackJob | None = None  # of the open section
        self._backup: BackupJob | None = None  # of the open section, or one that still gathers
        self._gather_ms = round(state.config.gather_s * 1000)
        self._gather_pages = min(_GATHERED_PAGES, state.config.host_pages // _GATHERED_SHARE)
        self.in_flight_pages = 0  # of open write-backs; they hold them until RELEASED
        self.backup_pages = 0  # of open backups, in the same way
        self.cleaner = Cleaner(self)
        self.ahead = Ahead(self)
        state.saving = self

    # -- device to host -----------------------------------------------------------------------------------------------------

    def passed(self, tail: Node, tokens: Tokens | None) -> None:
        """The path to ``tail`` has been used, or proven: save what the write policy wants saved then."""
        policies = self.state.policies
        if policies.write != "write_back":
            self.want_host(tail, tokens, least_hits=policies.least_hits)

    def want_host(self, tail: Node, tokens: Tokens | None, *, least_hits: int = 0) -> bool:
        """Write back what the path to ``tail`` lacks on the host, ancestors first, down to the first node of fewer hits.

        Unproven pages (below a fill) are left out.  False: the host has no room for all of it.
        """
        state = self.state
        if state.degraded or not state.policies.saves:
            return True
        at, missing = tail, 0
        while at.end:
            if not at.at[HOST].state and at.hits >= least_hits:
                missing += len(at.at[DEVICE].slots) // SLOT_BYTES
            at = at.parent
        if not missing:
            return True
        path = state.tree.path(tail, 0)
        # making room must not take the path's own pages
        held = state.pins.lock_path(path) if missing > state.pools[HOST].free else []
        runs: list[list[Node]] = []
        run: list[Node] = []
        for node in path:
            device, host = node.at
            if device.state != READY or (not host.state and node.hits < least_hits):
                break
            if host.state:
                run = []
            else:
                if not run:
                    runs.append(run)
                run.append(node)
        whole = all(self._write_back_run(run, tokens) for run in runs)
        state.pins.unlock_path(held)
        return whole

    def can_write_back(self, node: Node) -> bool:
        """Is there room on the host for the node's pages?"""
        state = self.state
        pages = node.end - state.tree.start(node)
        return not state.degraded and state.policies.saves and state.evictor.available(HOST) >= pages

    def _write_back_run(self, run: list[Node], tokens: Tokens | None) -> bool:
        """Reserve host slots for consecutive nodes, or for the first pages of them -> True if it was all."""
        state, tree, pins = self.state, self.state.tree, self.state.pins
        start, end = tree.start(run[0]), run[-1].end
        state.cause = _WRITE_BACK
        state.evictor.host_room(end - start, run[-1], draining=self.cleaner.draining)
        room = state.pools[HOST].free
        whole = room >= end - start
        if not whole:
            if not state.policies.protects_dirty:  # else it is tried in every section
                state.count("write_back_refused_pages", end - start - room)
            run, _ = tree.cut_at(run[-1], start, start + room)
            if not run:
                return False
            end = run[-1].end
        job = self._write_back
        if job is None:
            job = self._write_back = WriteBackJob(self)
            state.jobs.add(job)
        slots = state.pools[HOST].take(end - start)
        for node in run:
            begin = tree.start(node) - start
            state.residents.put(
                node, HOST, slots[begin * SLOT_BYTES : (node.end - start) * SLOT_BYTES], FILLING, job.id
            )
            job.sources.append(node.at[DEVICE].slots)
            job.events.update((id(event), event) for event in node.events)
        state.residents.enlist(run[-1], HOST)  # now, where it is as recent as its pages; jobs do not move it
        self.in_flight_pages += end - start
        job.targets.append(slots)
        pin = pins.pin(HOST, run[-1], start)
        job.pins += (pin, pins.pin(DEVICE, run[-1]))
        job.ranges.append(Range(pin, start, tokens))
        state.note(Note.WRITE_BACK, job.id, start, end)
        return whole

    def written(self, part: Range, good: list[Node], bad: list[Node]) -> None:
        """A write-back is agreed: good pages are on the host, the others are not and may be asked for again."""
        state = self.state
        for node in good:
            state.residents.filled(node, HOST)
            node.events = ()
        if bad:
            state.count("write_back_failed_pages", bad[-1].end - state.tree.start(bad[0]))
            state.pins.lose(HOST, bad)
            for node in bad:
                state.residents.give_up(node)
        if good and state.storage and self.ahead.stores_at_once:
            self.want_stored(good[-1], part.tokens, gathers=True)
        self.ahead.written(good)

    def not_computed(self, nodes: list[Node]) -> None:
        """Nobody has written the pages of ``nodes``, a path: they leave the device, with all that hangs below."""
        state, tree = self.state, self.state.tree
        if not nodes[0].tag or nodes[0].at[DEVICE].state == ABSENT:
            return  # gone already, with what was above them
        lost = tree.start(nodes[0])
        state.count("uncomputed_pages", nodes[-1].end - lost)
        state.lose_pages(state.pins.lose(DEVICE, tree.subtree(nodes[0])), lost)

    # -- host to storage ----------------------------------------------------------------------------------------------------

    def want_stored(self, tail: Node, tokens: Tokens | None, *, gathers: bool = False) -> int:
        """Back up the path to ``tail`` from its first page that is on the host and not stored, so that no hole is left.

        ``gathers``: it may wait for others.  -> the job that saves what this section wants saved, 0 if that is nothing.
        """
        run: list[Node] = []
        for node in self.state.tree.path(tail, 0):
            if node.stored in (STORED, SAVING):
                self._back_up(run, tokens, 0, gathers)
                run = []
            elif node.at[HOST].state == READY:
                run.append(node)
            else:
                break
        self._back_up(run, tokens, 0, gathers)
        return 0 if self._backup is None else self._backup.id

    def _back_up(self, run: list[Node], tokens: Tokens | None, tries: int, gathers: bool = False) -> None:
        if not run:
            return
        state, tree = self.state, self.state.tree
        job = self._backup
        due_ms = state.now_ms + (self._gather_ms if gathers else 0)
        if job is None:
            job = self._backup = BackupJob(self, due_ms)
            state.jobs.add(job)
        job.due_ms = min(job.due_ms, due_ms)
        start, tail = tree.start(run[0]), run[-1]
        for node in run:
            tree.set_stored(node, SAVING)
            job.sources.append(node.at[HOST].slots)
        pin = state.pins.pin(HOST, tail, start)
        job.pins.append(pin)
        job.ranges.append(Range(pin, start, tokens, tries))
        self.backup_pages += tail.end - start
        key = tree.path_tokens(tail) if tokens is None else tokens.packed[: tail.end * tree.page_bytes]
        job.paths.append(Path(tree.scope_of(tail), key, start, tail.end - start, tokens))
        state.note(Note.BACKUP, job.id, start, tail.end)

    def stored(self, part: Range, good: list[Node], bad: list[Node]) -> None:
        """A backup is agreed: good pages are stored, the others wait for a retry or are given up."""
        state, tree = self.state, self.state.tree
        for node in good:
            tree.set_stored(node, STORED)
        if good:
            self.ahead.stored()
        if not bad:
            return
        pages = bad[-1].end - tree.start(bad[0])
        state.count("backup_failed_pages", pages)
        delays = state.config.retry_delays_s
        if part.tries < len(delays):
            for node in bad:
                tree.set_stored(node, WAITING)
            tail = bad[-1]
            due_ms = state.now_ms + round(delays[part.tries] * 1000)
            key = memoryview(tree.path_tokens(tail)) if part.tokens is None else part.tokens.packed
            span = tree.start(bad[0]), tail.end
            self.retries.append(Retry(due_ms, tree.scope_of(tail), key, span, part.tokens, part.tries + 1))
        else:
            state.count("backup_given_up_pages", pages)
            for node in bad:
                tree.set_stored(node, UNSTORED)
            self.ahead.gave_up()

    def retry_due(self) -> None:
        """Open a backup for the oldest due retries, at most a few per apply."""
        due = [retry for retry in self.retries if retry.due_ms <= self.state.now_ms][:_RETRIES_PER_APPLY]
        for retry in due:
            self.retries.remove(retry)
            self.state.changed = True
            self.state.note(Note.RETRY, retry.start, retry.stop, retry.tries)
            self._retry(retry)

    def _retry(self, retry: Retry) -> None:
        tree = self.state.tree
        node, page = tree.root(retry.scope), 0
        run: list[Node] = []
        while page < retry.stop:
            child = tree.child(node, retry.key, page)
            if child is None or tree.shared(child, retry.key, page, retry.stop) < child.end:
                break
            if child.stored == WAITING and page >= retry.start:
                run.append(child)
            else:
                self._back_up(run, retry.tokens, retry.tries)
                run = []
            node, page = child, child.end
        self._back_up(run, retry.tokens, retry.tries)

    @property
    def has_dues(self) -> bool:
        return self._backup is not None or bool(self.retries)

    @property
    def next_due_ms(self) -> int | None:
        due = [retry.due_ms for retry in self.retries]
        if self._backup is not None:
            due.append(self._backup.due_ms)
        return min(due, default=None)

    @property
    def gathers_until_ms(self) -> int:
        """When the backup that is being made up starts at the latest; 0: there is none."""
        return 0 if self._backup is None else self._backup.due_ms

    def hurry(self) -> None:
        """From here on no backup waits for others."""
        self._gather_ms = 0
        self.end_backup()

    # -- section ------------------------------------------------------------------------------------------------------------

    def end_section(self, *, awaited: bool) -> None:
        """``awaited``: somebody waits for pages to be stored."""
        if self.state.policies.protects_dirty and not self.state.degraded:
            self.cleaner.ahead()
            if self.ahead.draining:
                self.cleaner.drain()
        if not self.state.policies.stores_on_publish:
            self.ahead.advance()
        if self._write_back is not None:
            self.state.effects.append(self._write_back.effect())
            self._write_back = None
        backup = self._backup
        if backup is None:
            return
        if awaited or backup.due_ms <= self.state.now_ms or self.section_backup_pages >= self._gather_pages:
            self.end_backup()
        elif not backup.announced:
            backup.announced = True
            self.state.effects.append(Gather(backup.id))

    def end_backup(self) -> None:
        """Nothing more is added to the backup that is being made up: it starts."""
        if self._backup is not None:
            self.state.effects.append(self._backup.effect())
            self._backup = None

    @property
    def section_backup_pages(self) -> int:
        """Of the backup that is being made up, so far."""
        return 0 if self._backup is None else sum(part.pages for part in self._backup.ranges)

    def forget(self) -> None:
        """Reset: nothing is retried or gathered, and nothing that is on the host is left to be looked at."""
        self.end_backup()
        self.retries.clear()
        self.state.backlog.clear()

    @property
    def troubled(self) -> bool:
        """A backup has failed, and its retry has not been answered yet."""
        return bool(self.retries) or any(
            isinstance(job, BackupJob) and job.phase is not Phase.LIMBO and any(part.tries for part in job.ranges)
            for job in self.state.jobs.open.values()
        )

    @property
    def idle(self) -> bool:
        """No write-back, backup or retry is open, no backlog is left, and no host page will come free for a dirty one."""
        if self.retries or self.state.backlog:
            return False
        waits = self.state.policies.protects_dirty and self.state.residents.dirty_pages > 0
        return not any(
            isinstance(job, SavingJob) and (waits or job.phase is not Phase.LIMBO)
            for job in self.state.jobs.open.values()
        )
