"""The policies in force: as configured at first, changed while the cache runs where that is safe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hicache_actors.core.config import WRITE_POLICIES, CoreConfig, WritePolicy, check_name
from hicache_actors.core.node import Node
from hicache_actors.core.order import EVICTIONS, Eviction, Policy
from hicache_actors.core.words import PolicyRefused

if TYPE_CHECKING:
    from hicache_actors.core.state import State


class Policies:
    """What the other parts ask.  ``dirty_cap_pages``: so many may be dirty; ``clean_goal_pages``: device pages to keep free or
    evictable, while dirty ones can be saved for that.  ``ready_goal_pages``: host pages to keep free, or stored and next to go,
    unless everything is stored as it comes (``stores_on_publish``).
    """

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self.write: WritePolicy = config.write_policy
        self.eviction = Policy(config.eviction, config.slru_protected_hits)
        self.dirty_cap_pages = int(config.write_back_dirty_cap * config.device_pages)
        self.clean_goal_pages = config.device_pages - int(config.write_back_water_mark * config.device_pages)
        self.store_on = config.store_on
        self.ready_goal_pages = config.host_pages - int(config.store_water_mark * config.host_pages)

    @property
    def stores_on_publish(self) -> bool:
        return self.store_on == "publish"

    @property
    def saves(self) -> bool:
        return self.write != "none" and self._config.host_pages > 0

    @property
    def protects_dirty(self) -> bool:
        """Pages that are on the device alone are saved before they are evicted."""
        return self.write == "write_back" and self._config.host_pages > 0

    @property
    def least_hits(self) -> int:
        """Pages that fewer requests have used are not saved when they are."""
        return self._config.selective_threshold if self.write == "write_through_selective" else 0

    def traits(self, node: Node) -> object:
        """What the policies look at: nodes that differ in it are not joined."""
        least = self.least_hits
        return (self.eviction.rank(node), node.hits >= least) if least else self.eviction.rank(node)

    # -- changing -----------------------------------------------------------------------------------------------------------

    def set_write_policy(self, state: State, policy: WritePolicy) -> PolicyRefused | None:
        """See `Core.set_write_policy`."""
        check_name("write_policy", policy, WRITE_POLICIES)
        if policy == self.write:
            return None
        if refused := self._unready(state):
            return PolicyRefused(refused)
        residents = state.residents
        if self.protects_dirty:
            if residents.dirty_pages:
                return PolicyRefused("dirty_pages", residents.dirty_pages)
            if residents.gaps:
                return PolicyRefused("host_gaps")
        protected = self.protects_dirty
        self.write = policy
        if self.protects_dirty != protected:
            self._move(state)
        return None

    def set_eviction(self, state: State, eviction: Eviction) -> PolicyRefused | None:
        """See `Core.set_eviction`."""
        check_name("eviction", eviction, EVICTIONS)
        if eviction == self.eviction.name:
            return None
        if state.degraded or state.residents.moving:
            return PolicyRefused("degraded" if state.degraded else "changing")
        self.eviction = Policy(eviction, self._config.slru_protected_hits)
        self._move(state)
        return None

    def _unready(self, state: State) -> Literal["degraded", "engine_owned", "changing"] | None:
        if state.degraded:
            return "degraded"
        if state.engine_owned:
            return "engine_owned"
        return "changing" if state.residents.moving else None

    def _move(self, state: State) -> None:
        state.residents.change(state.tree.table.values(), self.eviction, protect_dirty=self.protects_dirty)
