"""What `HiCache.snapshot` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from hicache_actors.cache.shadow_mode import ShadowSnapshot
from hicache_actors.core import Usage
from hicache_actors.events import EventsSnapshot
from hicache_actors.pipelines.flows import FlowSnapshot
from hicache_actors.pipelines.observer import BatchKind
from hicache_actors.runtime import HistogramSnapshot, SystemSnapshot, WorkersSnapshot
from hicache_actors.tiers.device import DeviceSnapshot
from hicache_actors.tiers.host import HostSnapshot
from hicache_actors.tiers.storage import StorageSnapshot

State: TypeAlias = Literal["open", "degraded", "disabled", "closing", "closed"]


class Snapshot(msgspec.Struct, frozen=True):
    """What the cache is doing, at one instant.

    ``counts``: decisions of Core by name, ``flows``: what has moved, by direction; both since the cache was opened.  ``loop_lag``:
    how late the event loop has woken a sampler.  ``shadow``: None unless the cache runs in shadow mode.  ``events``: those who
    listen to `HiCache.events`.
    """

    state: State
    failure: str | None
    page_size: int
    core: Usage
    counts: Mapping[str, int]
    device: DeviceSnapshot
    host: HostSnapshot
    storage: StorageSnapshot | None
    flows: Mapping[BatchKind, FlowSnapshot]
    loop_lag: HistogramSnapshot
    system: SystemSnapshot
    workers: tuple[WorkersSnapshot, ...]
    open_jobs: int
    shadow: ShadowSnapshot | None
    events: EventsSnapshot
