"""The backlog: what is on the host and not stored, when a store is attached or cleared, when all is to be stored as it comes from
now on, or when somebody waits until everything is stored.

It is backed up by the jobs that save what is computed, paths from their roots, at most one job of the backlog at a time, and none
while a failed backup is not made good.
"""

from __future__ import annotations

from typing import Final, get_args

from hicache_actors.core.config import StoreOn, check_name
from hicache_actors.core.node import SAVING, UNSTORED
from hicache_actors.core.saving import Saving
from hicache_actors.core.state import Note, State
from hicache_actors.core.words import HOST, READY, Phase, PolicyRefused, UseStorage

JOB_PAGES: Final = 512
"""Two batches, as many as are written at once by default, or more of long pages."""

_APPLY_NODES = 4096


class Backlog:
    """The nodes are in ``state.backlog``; those that have left the tree or been saved meanwhile are passed over."""

    def __init__(self, state: State, saving: Saving) -> None:
        self.state, self.saving = state, saving
        self._job = 0  # that saves the last pages

    def set_storage(self, use: UseStorage) -> None:
        """See `Core.set_storage`.  What this section wanted saved goes to the old store still."""
        state = self.state
        self.saving.end_backup()
        state.storage = use.attached
        self._forget_stored()
        state.effects.append(use)
        self.work_off()

    def forget_stored(self) -> None:
        """See `Core.clear_storage`.  The store has been cleared: what is being saved may have gone again, and does not count."""
        self.saving.end_backup()
        self._forget_stored()
        self.work_off()

    def _forget_stored(self) -> None:
        state, tree = self.state, self.state.tree
        self.saving.retries.clear()
        for node in tree.table.values():
            node.stored = UNSTORED
        tree.stored_pages = 0
        if state.residents.changes is not None:
            state.residents.changes.cleared("storage")
        tree.hints.clear()
        state.storage_epoch += 1
        state.residents.recall()
        state.backlog.clear()
        if self.saving.ahead.stores_at_once:
            self.take_in()
        state.changed = True
        state.note(Note.STORAGE, state.storage_epoch, state.storage)

    def set_store_on(self, store_on: StoreOn) -> PolicyRefused | None:
        """See `Core.set_store_on`."""
        state = self.state
        check_name("store_on", store_on, get_args(StoreOn))
        if store_on == state.policies.store_on:
            return None
        if state.degraded:
            return PolicyRefused("degraded")
        state.policies.store_on = store_on
        self.saving.ahead.look_again()
        if self.saving.ahead.stores_at_once:
            self.take_in()
        else:
            state.backlog.clear()  # it goes on when its turn comes
        state.changed = True
        self.work_off()
        return None

    def take_in(self) -> None:
        """All that is on the host is to be looked at, O(nodes)."""
        state = self.state
        state.backlog.clear()
        if state.storage and not state.degraded:
            nodes = state.tree.table.values()
            on_host = (node for node in nodes if node.at[HOST].state == READY and node.stored == UNSTORED)
            state.backlog.extend(sorted(on_host, key=lambda node: node.end))  # what most prompts share comes first

    def work_off(self) -> None:
        """In apply: back up the next pages."""
        state = self.state
        if not self.ready:
            return
        pages = 0
        for _ in range(_APPLY_NODES):
            if not state.backlog or pages >= JOB_PAGES:
                break
            node = state.backlog.popleft()
            if node.tag and node.stored == UNSTORED and node.at[HOST].state == READY:
                self._job = self.saving.want_stored(node, None) or self._job
                pages += (node.stored == SAVING) * (node.end - state.tree.start(node))
        state.changed = True

    @property
    def ready(self) -> bool:
        """There is work for the next apply, and the end of no job will bring it."""
        state = self.state
        if not state.backlog or state.degraded or self.saving.troubled:
            return False
        job = state.jobs.open.get(self._job)
        return job is None or job.phase is Phase.LIMBO
