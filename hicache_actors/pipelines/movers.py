"""What every pipeline works with: the tiers, the workers, the limits, and the observers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from hicache_actors.config import Deadlines, StorageConfig
from hicache_actors.core.words import TOKEN_BYTES, Path, Slots
from hicache_actors.cuda_ext.native.digests import digests
from hicache_actors.errors import BackendError, StoppedError
from hicache_actors.keys.hashes import page_hashes
from hicache_actors.keys.prompt import Prompt
from hicache_actors.memory.shapes import BATCH_PAGES
from hicache_actors.pipelines.flows import Flows
from hicache_actors.pipelines.observer import Observation, Observer
from hicache_actors.runtime import Workers, bind_log
from hicache_actors.tiers.device import DeviceTier
from hicache_actors.tiers.host import HostTier
from hicache_actors.tiers.storage import StorageTier
from hicache_actors.transfer.batch import Batch, cut

HASH_HERE_TOKENS: Final = 32_768
"""The native library hashes so many tokens in 0.15 ms; the answer of a thread takes longer."""


class Movers:
    """Loop thread only, except `tell`."""

    def __init__(
        self,
        device: DeviceTier,
        host: HostTier,
        storage: StorageTier,
        workers: Workers,
        *,
        deadlines: Deadlines,
        storage_config: StorageConfig,
        page_size: int,
        rank: int = 0,
        round_s: float | None = None,
    ) -> None:
        """``round_s``: how long a round of several ranks may take."""
        self.rank = rank  #: this one's number among those that agree
        self.device, self.host, self.storage = device, host, storage
        self.deadlines, self.page_size = deadlines, page_size
        self.load_limit_s = deadlines.load_limit_s(round_s)
        self._workers, self._storage_config = workers, storage_config
        self._page_bytes = host.memory.shape.page_bytes
        self.flows = Flows()
        self._observers: list[Observer] = []
        self._loop = (
            asyncio.get_running_loop()
        )  # asked itself: anyio knows none in callbacks where sniffio is installed
        self._log = bind_log(part="movers")

    def batches(self, slots: Slots, most_pages: int = BATCH_PAGES) -> list[Batch]:
        """``most_pages``: of a store, that may take fewer at once than a device."""
        return cut(slots, self._page_bytes, most_pages)

    def nbytes(self, pages: int) -> int:
        return pages * self._page_bytes

    def at(self, seconds: float) -> float:
        """A deadline ``seconds`` from now, on the loop's clock."""
        return self._loop.time() + seconds

    def prefetch_limit_s(self, pages: int, asked_s: float | None) -> float:
        """The caller's limit or the policy's, whichever is shorter; a fetch that hangs ends at the maximum under any policy."""
        config = self._storage_config
        policy_s = config.prefetch_timeout_s(pages * self.page_size)
        limits = [config.prefetch_timeout_max_s, policy_s, asked_s]
        return min(limit for limit in limits if limit is not None)

    async def hash_path(self, path: Path) -> tuple[bytes, ...]:
        """Hashes of all pages up to the end of ``path``, so its own begin at ``first_page``; what the prompt has hashed is reused.

        Off the loop, if that takes longer than the way to a thread and back.  Empty if no thread can be had: all of them hang, or
        the cache is closing.
        """
        hashed = self.hash_here(path)
        if hashed is not None:
            return hashed
        try:
            return await self._workers.run(self._hash, path)
        except (BackendError, StoppedError) as error:
            self._log.warning("path_not_hashed", pages=path.pages, exc_info=error)
            return ()

    def hash_here(self, path: Path) -> tuple[bytes, ...] | None:
        """`hash_path`, if that takes no longer than the way to a thread and back; else None."""
        prompt, new_pages = path.prompt, path.first_page + path.pages
        if isinstance(prompt, Prompt):
            new_pages -= prompt.hashed_pages(self.page_size)
        if new_pages * self.page_size > HASH_HERE_TOKENS or digests() is None:
            return None
        return self._hash(path)

    def _hash(self, path: Path) -> tuple[bytes, ...]:  # any thread
        last_page = path.first_page + path.pages
        if isinstance(path.prompt, Prompt):
            return tuple(path.prompt.page_hashes(self.page_size, last_page)[:last_page])
        tokens = path.tokens[: last_page * self.page_size * TOKEN_BYTES]
        return tuple(page_hashes(tokens, path.scope, self.page_size)[:last_page])

    # -- observers -----------------------------------------------------------------------------------------------------

    @property
    def observed(self) -> bool:
        return bool(self._observers)

    def tell(self, what: Observation) -> None:
        for observer in tuple(self._observers):
            observer(what)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """-> a function that ends it."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)
