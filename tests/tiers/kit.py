"""A store on its own: real calls, lanes and threads, a few pages of host memory, and no Core."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.cache.storage_switch import source_of
from hicache_actors.config import Config, HostConfig, HostLayout, ModelFacts, StorageConfig
from hicache_actors.core.words import pack_slots
from hicache_actors.memory.host import HostMemory
from hicache_actors.memory.layout import SlotLayout
from hicache_actors.memory.staging import StagingSize
from hicache_actors.runtime import Workers, bind_log
from hicache_actors.testing.small import PAGE_SIZE, SHAPE
from hicache_actors.tiers.host import HostTier
from hicache_actors.tiers.storage import Call, Store
from hicache_actors.tiers.storage.staging import Staging
from hicache_actors.tiers.storage.words import CallBegun, CallFailed, CallRefused, Counted

PAGES = 64
OBJECT_BYTES = SlotLayout(SHAPE, "page_first_direct", 4096).object_bytes


class Lone:
    """``begun``, ``failed``, ``refused``, ``pages``: what the store has told."""

    def __init__(
        self,
        backend: Backend,
        *,
        layout: HostLayout = "page_first_direct",
        staged_pages: int = PAGES,
        staging: Staging | None = None,
        **settings: Any,
    ) -> None:
        """``staged_pages``: staging slots for each direction, where ``layout`` needs any and no ``staging`` is shared."""
        self.limits = StorageConfig(**settings)
        config = Config(
            page_size=PAGE_SIZE,
            model=ModelFacts(model_id="toy", weights="v1"),
            host=HostConfig(layout=layout),
            storage=self.limits,
        )
        self.memory = HostMemory(SlotLayout(SHAPE, layout), PAGES)
        self.staging = staging
        if staging is None and not self.memory.layout.in_place:
            slot_bytes = self.memory.layout.object_layout.slot_bytes
            self.staging = Staging(self.memory.layout, StagingSize(staged_pages, staged_pages, slot_bytes))
        self.workers = Workers("hash", 2)
        self.begun: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.pages: Counter[str] = Counter()
        self.store = Store(
            source_of(config, SHAPE, backend),
            self.limits,
            HostTier(self.memory),
            self.staging,
            self.workers,
            self._note,
            bind_log(),
        )

    def read(self, page: int = 0, pages: int = 1, *, priority: int = 0) -> Call[int]:
        return self.store.read(hashes(page, pages), slots(page, pages), lambda: True, priority=priority)

    def write(self, page: int = 0, pages: int = 1) -> Call[Sequence[Stored]]:
        return self.store.write(hashes(page, pages), slots(page, pages), lambda: True)

    def query(self, page: int = 0, pages: int = 1) -> Call[int]:
        return self.store.query(hashes(page, pages))

    async def save(self, page: int = 0, pages: int = 1) -> None:
        """Pages with a right header, acknowledged."""
        assert await self.store.seal(hashes(page, pages), slots(page, pages)).answer()
        assert len(await self.write(page, pages).answer()) == pages

    async def settled(self) -> None:
        """Every call has ended."""
        while self.store.calls.open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def empty(self) -> bool:
        """No lane holds anything, and no call has staging slots."""
        staged = () if self.staging is None else self.staging.snapshot().values()
        if any(each.held_pages or each.hung_pages for each in staged):
            return False
        now_s = asyncio.get_running_loop().time()
        shown = [lane.snapshot(now_s) for lane in self.store.calls.lanes.values()]
        return not any(
            each.waiting_calls + each.running_calls + each.hung_calls + each.in_flight_bytes + each.waiting_bytes
            for each in shown
        )

    def lane(self, direction: Any) -> Any:
        return self.store.calls.lanes[direction].snapshot(asyncio.get_running_loop().time())

    async def close(self) -> None:
        await self.store.close(1.0)
        await self.workers.aclose(1.0)
        self.memory.close()
        if self.staging is not None:
            self.staging.close(keep_mapped=False)

    def _note(self, message: CallBegun | CallFailed | CallRefused | Counted) -> None:
        match message:
            case CallBegun():
                self.begun[message.kind] += 1
            case CallFailed():
                self.failed[message.kind] += 1
            case CallRefused():
                self.refused[message.direction, message.reason] += 1
            case Counted():
                self.pages[message.what] += message.pages


def hashes(page: int, pages: int) -> list[bytes]:
    return [at.to_bytes(32, "little") for at in range(page + 1, page + pages + 1)]


def slots(page: int, pages: int) -> bytes:
    return pack_slots(range(page, page + pages))
