"""Shadow mode: the cache works, and nobody is served by it.

Each request gets two leases.  The one that the engine holds takes nothing that is cached, so the engine computes the whole prompt
into pages of its own.  The other one pins, fetches and loads what the cache has.  When the engine commits, the pages of both are
compared, byte by byte and off the loop, and only the count of it is kept.  The computed pages are published as usual, so the cache
fills as it would.

A page that differs need not be wrong: its bytes also depend on where the prefill was cut into chunks and on the number of threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
import torch

from hicache_actors.cache.admission import Admission
from hicache_actors.cache.handles import Inside, Lease, Load
from hicache_actors.core import Core, CoreLease
from hicache_actors.core.words import Committed, Shortfall
from hicache_actors.cuda_ext.device import Event
from hicache_actors.errors import BackendError, HiCacheError, StoppedError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.memory.kv import KVTensors
from hicache_actors.runtime import System, Workers, bind_log
from hicache_actors.transfer.completions import Completion, fired

_NAMED: Final = 10_000  #: pages that are named in the log, once each


class ShadowSnapshot(msgspec.Struct, frozen=True):
    """Pages that the cache had when a request computed them again.  ``unchecked_pages``: given up for want of room, or not
    loaded."""

    equal_pages: int
    different_pages: int
    unchecked_pages: int


class Comparison(msgspec.Struct, frozen=True):
    """Device pages ``cached`` and ``computed`` hold pages [first_page, ...) of ``prompt``, until ``done``."""

    prompt: Prompt
    first_page: int
    cached: Sequence[int]
    computed: Sequence[int]
    load: Load | None
    after: Event | None
    done: Completion


class Shadow:
    """Compares and counts.  Made on the loop; `compare` may be called on any thread."""

    def __init__(self, system: System, workers: Workers, kv: KVTensors) -> None:
        self._system, self._workers, self._kv = system, workers, kv
        self._loop = asyncio.get_running_loop()
        self._equal = self._different = self._unchecked = 0
        self._named: set[bytes] = set()
        self._log = bind_log(part="shadow")

    def usage(self) -> ShadowSnapshot:
        return ShadowSnapshot(self._equal, self._different, self._unchecked)

    def compare(self, what: Comparison) -> None:
        """Start it; ``what.done`` ends with it, whatever happens."""
        if self._loop.is_closed():
            what.done.finish()
        else:
            self._loop.call_soon_threadsafe(self._start, what)

    def skip(self, pages: int) -> None:
        """Any thread: so many pages will not be compared."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._count, 0, 0, pages)

    def _start(self, what: Comparison) -> None:
        try:
            self._system.spawn("shadow", self._compare, what)
        except StoppedError:
            what.done.finish()

    async def _compare(self, what: Comparison) -> None:
        try:
            asked, pages = len(what.cached), len(what.cached)
            if what.load is not None:
                verdict = await what.load.verdict()
                valid = verdict.valid_tokens // self._kv.shape.page_size
                pages = max(0, min(valid - what.first_page, asked))
            if what.after is not None:
                await fired(what.after)
            different: list[bytes] = []
            try:
                different = await self._workers.run(self._look, what, pages)
            except (BackendError, StoppedError):  # no thread to be had
                pages = 0
            self._count(pages - len(different), len(different), asked - pages)
            self._name(different)
        finally:
            what.done.finish()

    def _look(self, what: Comparison, pages: int) -> list[bytes]:
        """-> page hashes of the pages that differ.  Worker thread."""
        cached, computed = torch.tensor(what.cached[:pages]), torch.tensor(what.computed[:pages])
        equal = torch.ones(pages, dtype=torch.bool)
        for layer in range(self._kv.shape.layers if pages else 0):
            for tensor in self._kv.layer(layer):
                ours, theirs = (tensor[at].view(torch.uint8).flatten(1) for at in (cached, computed))
                equal &= (ours == theirs).all(1).cpu()
        bad = [what.first_page + int(at) for at in (~equal).nonzero().flatten()]
        if not bad:
            return []
        hashes = what.prompt.page_hashes(self._kv.shape.page_size, bad[-1] + 1)
        return [hashes[page] for page in bad]

    def _count(self, equal: int, different: int, unchecked: int) -> None:
        self._equal += equal
        self._different += different
        self._unchecked += unchecked

    def _name(self, different: list[bytes]) -> None:
        for page_hash in different:
            if page_hash not in self._named and len(self._named) < _NAMED:
                self._named.add(page_hash)
                self._log.info("shadow_page_differs", page_hash=page_hash.hex())


class ShadowLease(Lease):
    """What the engine holds: no reused tokens.  ``cached`` is the lease on what the cache has."""

    def __init__(self, inside: Inside, blank: CoreLease, cached: CoreLease, prompt: Prompt, shadow: Shadow) -> None:
        super().__init__(inside, blank, prompt)
        self._cached: Lease | None = Lease(inside, cached, prompt)
        self._cached_core, self._shadow = cached, shadow
        self._compared_pages = self._given_up_pages = 0

    def load(self, max_tokens: int | None = None) -> Load | Shortfall:
        """Loads for the comparison; the engine waits for nothing."""
        if self._cached is not None:
            self._cached.load(max_tokens)
        return self._follow(())

    def allocate(self, n_tokens: int) -> Sequence[int] | Shortfall:
        room = super().allocate(n_tokens)
        if isinstance(room, Shortfall) and self._cached is not None:
            # Nobody is refused for the sake of a comparison.
            self._given_up_pages = len(self._cached.pages) - self._compared_pages
            self._cached.release()
            self._cached = None
            room = super().allocate(n_tokens)
        return room

    def commit(self, n_tokens: int, *, after: Event | None = None) -> Committed:
        committed = super().commit(n_tokens, after=after)
        cached = self._cached
        if self._given_up_pages:
            self._shadow.skip(self._given_up_pages)
            self._given_up_pages = 0
        if cached is None or committed.failed is not None:
            return committed
        first, stop = self._compared_pages, min(n_tokens // self._inside.core.page_size, len(cached.pages))
        if stop > first:
            self._compared_pages = stop
            done = Completion()

            def hold(core: Core) -> None:
                core.hold(self._lease, done)
                core.hold(self._cached_core, done)

            self._inside.driver.decide(hold)
            pages = cached.pages[first:stop], self._lease.pages[first:stop]
            self._shadow.compare(Comparison(self.prompt, first, *pages, cached.loading, after, done))
        return committed

    def release(self, *, after: Event | None = None) -> None:
        super().release(after=after)
        if self._cached is not None:
            self._cached.release()


class ShadowAdmission(Admission):
    """Both leases of a request; the engine's holds nothing while the other one's fetch is under way."""

    def __init__(
        self, inside: Inside, prompt: Prompt, rid: str, priority: int, room: int, used_tokens: int, shadow: Shadow
    ) -> None:
        super().__init__(inside, prompt, rid, priority, room, used_tokens)
        self._shadow = shadow

    def lease(self, core: Core) -> Lease:
        with self._beside_a_blank(core) as rid:
            cached = core.lease(self.prompt, rid, self.priority, used_tokens=self.used_tokens)
        return ShadowLease(self.inside, self._blank, cached, self.prompt, self._shadow)

    def ask(self, core: Core, deadline_s: float | None) -> int:
        with self._beside_a_blank(core) as rid:
            return core.acquire(self.prompt, rid, deadline_s, self.priority, used_tokens=self.used_tokens)

    @contextmanager
    def _beside_a_blank(self, core: Core) -> Iterator[str]:
        """The engine's lease, and the name for the other one; there is no first without the second."""
        self._blank = core.lease(self.prompt, self.rid, self.priority, blank=True, room=self.room)
        try:
            yield cached_rid(self.rid)
        except HiCacheError:
            core.release(self._blank)
            raise

    def answer(self, core_lease: CoreLease) -> Lease:
        return ShadowLease(self.inside, self._blank, core_lease, self.prompt, self._shadow)

    def cancel(self, core: Core, waiter: int) -> None:
        core.cancel_acquire(waiter)
        core.release(self._blank)


def cached_rid(rid: str) -> str:
    """The name of the lease that the engine does not see."""
    return f"{rid} (cached)"
