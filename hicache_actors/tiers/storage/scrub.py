"""The scrubber: reads stored objects in the background, within a budget of bytes, and puts bad ones away before they are needed.

    list a few names -> those of this rank -> read them, while nobody else reads -> compare the checksums -> quarantine

It looks at the objects that this rank would read and has to write; the ranks of a deployment so look at each object once.  One pass
follows the other, with a rest between them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import anyio

from hicache_actors.backends.objects import Verdict, verify
from hicache_actors.keys.hashes import HASH_BYTES
from hicache_actors.keys.scheme import KeyScheme
from hicache_actors.runtime import Workers
from hicache_actors.tiers.storage.call import Call
from hicache_actors.tiers.storage.store import Store
from hicache_actors.tiers.storage.words import Counted, Note

REST_S: Final = 60.0
_BATCH_BYTES: Final = 4 << 20
_NAMES_AT_ONCE: Final = 256
_POLL_S: Final = 0.1
_LAST: Final = -(2**31)  # priority: everybody else reads first


class Names:
    """Recognises the objects of one rank by their names."""

    def __init__(self, keys: KeyScheme) -> None:
        self._keys = keys
        any_page = bytes(HASH_BYTES)
        self._chunks = {name[2 * HASH_BYTES :]: number for number, name in enumerate(keys.keys([any_page]))}

    def find(self, name: str) -> tuple[bytes, int] | None:
        """-> (page hash, number of the chunk in its page), or None for what is not ours."""
        number = self._chunks.get(name[2 * HASH_BYTES :])
        if number is None:
            return None
        try:
            page_hash = bytes.fromhex(name[: 2 * HASH_BYTES])
        except ValueError:
            return None
        return (page_hash, number) if len(page_hash) == HASH_BYTES else None


class Scrubber:
    """Runs on the loop until it is cancelled.  ``store`` tells which is attached, ``workers`` compare, ``note`` counts."""

    def __init__(self, store: Callable[[], Store | None], bytes_a_second: float, workers: Workers, note: Note) -> None:
        self._store, self._bytes_a_second, self._workers, self._note = store, bytes_a_second, workers, note

    async def run(self) -> None:
        while True:
            store = self._store()
            if store is not None and store.keys.writes and store.chunk_bytes:
                await self._pass(store)
            await anyio.sleep(REST_S)

    async def _pass(self, store: Store) -> None:
        """Look at every object once.  Ends early when the store is detached, does not list, or gets other names."""
        keys = store.keys
        names = Names(keys)
        async for some in listing(store):
            if some is None:
                return
            found = [(name, *place) for name in some if (place := names.find(name)) is not None]
            while found:
                batch: list[tuple[str, bytes, int]] = []
                n_bytes = 0
                while found and (not batch or n_bytes < _BATCH_BYTES):
                    batch.append(found.pop())
                    n_bytes += store.chunk_bytes[batch[-1][2]]
                if not await self._turn(store, keys):
                    return
                await self._look_at(store, keys, batch)
                await anyio.sleep(n_bytes / self._bytes_a_second)

    async def _turn(self, store: Store, keys: KeyScheme) -> bool:
        """Wait until nobody else reads -> False if there is nothing to be done any more."""
        while self._store() is store and store.keys is keys:
            if store.calls.lanes["read"].idle:
                return True
            await anyio.sleep(_POLL_S)
        return False

    async def _look_at(self, store: Store, keys: KeyScheme, batch: Sequence[tuple[str, bytes, int]]) -> None:
        objects = [memoryview(bytearray(store.chunk_bytes[number])) for _, _, number in batch]

        async def read() -> list[bool]:
            return list(await store.backend.peek([name for name, _, _ in batch], objects))

        async def compare(found: list[bool]) -> list[Verdict | None]:
            return await self._workers.run(judge, found)

        def judge(found: list[bool]) -> list[Verdict | None]:
            return [
                verify(object, keys.namespace_digest, page_hash, keys.chunks[number]) if here else None
                for here, object, (_, page_hash, number) in zip(found, objects, batch, strict=False)
            ]

        nothing: list[Verdict | None] = []
        call = Call("scrub", nothing, nbytes=sum(map(len, objects)), priority=_LAST)
        verdicts = await store.calls.start(call, "read", read, compare).answer()
        seen = [len(object) for object, verdict in zip(objects, verdicts, strict=False) if verdict is not None]
        self._note(Counted("scrubbed_objects", len(seen)))
        self._note(Counted("scrubbed_bytes", sum(seen)))
        for (name, _, _), verdict in zip(batch, verdicts, strict=False):
            if verdict in (Verdict.CORRUPT, Verdict.EMPTY):
                self._note(Counted("scrubbed_bad_objects", 1))
                store.quarantine(name)


async def listing(store: Store) -> AsyncIterator[list[str] | None]:
    """The names in a store, a few at a time; each few are one call, with its deadline.  None, and no more, if one fails."""
    names = store.backend.keys()
    more: bool | None = True
    while more:
        some: list[str] = []

        async def take(some: list[str] = some) -> bool:
            async for name in names:
                some.append(name)
                if len(some) >= _NAMES_AT_ONCE:
                    return True
            return False

        async def tell(more: bool) -> bool:
            return more

        failed: bool | None = None
        more = await store.calls.start(Call("list", failed), "query", take, tell).answer()
        yield list(some)
    if more is None:
        yield None
