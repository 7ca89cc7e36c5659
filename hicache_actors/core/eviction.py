"""Making room: who leaves a full pool."""

from __future__ import annotations

from collections.abc import Callable

from hicache_actors.core.node import STORED, UNSTORED, WAITING, Node, Residency
from hicache_actors.core.state import Note, State
from hicache_actors.core.words import DEVICE, HOST, SLOT_BYTES, Shortfall, Slots


class Evictor:
    """Takes unlocked pages out of a pool in the order of the policy; it never waits."""

    def __init__(self, state: State) -> None:
        self.state = state
        state.evictor = self

    def available(self, place: int) -> int:
        """Pages that can be had now without losing one that is to be saved; exact on the device."""
        return self.state.pools[place].free + self.state.residents.evictable(place)

    def freeing(self) -> int:
        """Device pages that jobs will free by themselves: limbo, and what nobody but jobs pins."""
        state = self.state
        jobs = state.jobs.open.values()
        limbo = state.jobs.own_pages(DEVICE, limbo=True)
        return limbo + state.pins.pages_held_only_by((pin for job in jobs for pin in job.pins), DEVICE)

    def shortfall(self, pages: int, within_reach: int) -> Shortfall:
        """Why ``pages`` device pages cannot be had by one who may take so many, and how many will come free by themselves."""
        self.state.count("device_shortfalls")
        return Shortfall("device_capacity", pages - within_reach, self.freeing())

    # -- device -------------------------------------------------------------------------------------------------------------

    def device_room(self, pages: int) -> bool:
        """Evict until ``pages`` slots are free; False: it cannot be done, and nothing has been evicted.

        A victim with a host copy turns host only; another leaves the tree.  A device-only victim above host-only pages would take
        them along: it is passed over, and its write-back asked for, while that is possible (or a job is at work on them) and others
        can go instead.

        Protected dirty pages are no victims.  If it takes theirs as well, their write-back is asked for, so that they come free by
        themselves; only if that will not do they go, unsaved and counted.
        """
        state, residents = self.state, self.state.residents
        short = pages - state.pools[DEVICE].free
        if short <= 0:
            return True
        lossy = False
        if short > residents.evictable(DEVICE):
            if not residents.protects_dirty:
                return False
            cause = state.cause
            state.saving.cleaner.clean(short - residents.evictable(DEVICE) - self.freeing())
            state.cause = cause
            lossy = residents.evictable(DEVICE) + self.freeing() < short <= residents.unlocked[DEVICE]
            if not lossy:
                return False
        self._evict_device(short, lossy)
        return True

    def _evict_device(self, short: int, lossy: bool) -> None:
        state, residents = self.state, self.state.residents
        freed: list[Slots] = []
        aside: list[Node] = []
        locked: list[Node] = []
        passed = got = 0
        while got < short:
            residency = residents.device.pop()
            if residency is not None:
                node = residency.node
                if residency.locks or (node.stuck and residents.protects_dirty):
                    continue  # offered again when its last lock goes, or it is saved
                if node.kids and not node.at[HOST].state and self._worth_keeping(node):
                    aside.append(node)
                    continue
            elif passed < len(aside):
                node = aside[passed]
                passed += 1
            else:
                found = self._pop_dirty(locked) if lossy else None
                assert found is not None, "evictable is exact"
                node = found
                state.count("dropped_dirty_pages", len(node.at[DEVICE].slots) // SLOT_BYTES)
            slots = node.at[DEVICE].slots
            freed.append(slots)
            got += len(slots) // SLOT_BYTES
            self._evict(node, DEVICE)
        self._free(DEVICE, freed)
        for node in locked:
            residents.offer_dirty(node)
        for node in aside[passed:]:
            residents.offer(DEVICE, node.at[DEVICE])
            state.saving.want_host(node, None)

    def _pop_dirty(self, locked: list[Node]) -> Node | None:
        while (residency := self.state.residents.dirty.pop()) is not None:
            if not residency.node.at[DEVICE].locks:
                return residency.node
            locked.append(residency.node)
        return None

    def _worth_keeping(self, node: Node) -> bool:
        """A device-only node above host pages: can it be saved, or is somebody at work on these?"""
        state = self.state
        return state.saving.can_write_back(node) or any(below.at[HOST].locks for below in state.tree.subtree(node))

    # -- host ---------------------------------------------------------------------------------------------------------------

    def host_room(self, pages: int, saved: Node | None = None, *, draining: bool = False) -> bool:
        """Evict until ``pages`` slots are free.  False: it cannot be done, and what could be evicted has been: take what is free.

        A victim whose device twin is there stays in the tree; another leaves it.  Where dirty pages are protected, such twins go
        first, since that loses nothing: those that were used last, and not so many that dirty pages exceed their cap.  For the
        write-back of ``saved`` only what is leased and would leave the device after it: else they would change places for nothing,
        or for ever.  While ``draining``, also what the storage has.
        """
        state, residents = self.state, self.state.residents
        pool = state.pools[HOST]
        if pages <= pool.free:
            return True
        if residents.protects_dirty:
            spare = state.policies.dirty_cap_pages - residents.dirty_pages + (pages if saved is not None else 0)
            self._reclaim(pages - pool.free, lambda twin: saved is None or self._outlasts(twin, saved), spare)
            if draining:
                self._reclaim(pages - pool.free, lambda twin: twin.node.stored == STORED)
        freed: list[Slots] = []
        short = pages - pool.free
        while short > 0 and (residency := residents.pop_host()) is not None:
            if not residency.locks:
                freed.append(residency.slots)
                short -= len(residency.slots) // SLOT_BYTES
                self._evict(residency.node, HOST)
        self._free(HOST, freed)
        if saved is None and residents.protects_dirty:
            self._reclaim(short, lambda _: True)
        return pages <= pool.free

    def _outlasts(self, twin: Residency, saved: Node) -> bool:
        """``twin`` is leased, and would leave the device after ``saved``."""
        return bool(twin.node.at[DEVICE].locks) and self.state.residents.policy.before(saved.at[HOST], twin)

    def _reclaim(self, pages: int, may_go: Callable[[Residency], bool], spare: int | None = None) -> None:
        """Give up host copies of what the device has too, at most ``spare`` pages, up to the first that may not go."""
        residents = self.state.residents
        freed: list[Slots] = []
        while pages > 0 and (twin := residents.twins.pop()) is not None:
            if twin.locks:
                continue
            taken = len(twin.slots) // SLOT_BYTES
            if (spare is not None and taken > spare) or not may_go(twin):
                residents.offer(HOST, twin)
                break
            freed.append(twin.slots)
            pages -= taken
            spare = None if spare is None else spare - taken
            self._evict(twin.node, HOST)
        if freed:
            self.state.count("reclaimed_host_pages", sum(map(len, freed)) // SLOT_BYTES)
        self._free(HOST, freed)

    # -- both ---------------------------------------------------------------------------------------------------------------

    def _free(self, place: int, freed: list[Slots]) -> None:
        if freed:
            state, slots = self.state, b"".join(freed)
            pages = len(slots) // SLOT_BYTES
            state.pools[place].give(slots)
            state.note(Note.EVICT, place, pages, len(freed))
            state.count("evicted_device_pages" if place == DEVICE else "evicted_host_pages", pages)
            state.changed = True

    def _evict(self, node: Node, place: int) -> None:
        state = self.state
        pages = len(node.at[place].slots) // SLOT_BYTES
        state.evictions.remember(node, pages, place, state.now_ms, state.cause)
        saved_again = node.at[DEVICE].state and state.residents.protects_dirty
        if place == HOST and state.storage and node.stored != STORED and not saved_again:
            state.count("evicted_unstored_pages", pages)
        state.residents.vacate(node, place)
        if place == DEVICE:
            node.events = ()
        device, host = node.at
        if device.state or host.state:
            if place == HOST and node.stored == WAITING:
                node.stored = UNSTORED
        elif node.kids:
            before = state.pins.dropped_pages
            state.pins.drop(node)
            state.count("dropped_subtree_pages", state.pins.dropped_pages - before + pages)
        else:
            state.tree.remove(node)
            if place == DEVICE:
                state.count("dropped_pages", pages)
