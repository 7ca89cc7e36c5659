"""The backend: each call goes to the nearest store first, and what is missing there to the next one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from hicache_actors.backends.backend import Backend, Stored
from hicache_actors.backends.layers.judging import read_judged, whole
from hicache_actors.backends.layers.layer import Layer
from hicache_actors.backends.layers.options import LayerOptions
from hicache_actors.backends.objects import Expected, Verdict, seal_many
from hicache_actors.errors import BackendError

if TYPE_CHECKING:
    from hicache_actors.runtime.workers import Workers

T = TypeVar("T")

_TURNS: Final = 8  #: of `exists`, from one store to another: a prefix that is scattered more finely ends there


class LayeredBackend(Backend):
    """Reads ask the first store that has an object; writes go where ``write`` says; what a farther store had is promoted.

    A store that fails or hangs costs what only it has: the others go on, and it is left alone for a while (see `Layer`).  A write
    is acknowledged when one of the stores that it goes to has the object.  What is removed is removed from all of them.

    Objects are verified store by store: one that is bad is put away where it is bad, and the next store is asked.  So what is
    promoted is whole, and takes the place of what was not.
    """

    checks = True

    def __init__(self, url: str, workers: Workers, *, open_one: Callable[[str, Workers], Backend]) -> None:
        self.url = url
        self.options = LayerOptions.parse(url)
        self._layers = [
            Layer(f"{at}:{one.partition(':')[0]}", open_one(one, workers), self.options.patience_s)
            for at, one in enumerate(self.options.urls)
        ]
        self.scope = self._layers[-1].backend.scope
        self.batch_pages = min(layer.backend.batch_pages for layer in self._layers)
        self._workers = workers
        self._targets = {"all": self._layers, "nearest": self._layers[:1], "farthest": self._layers[-1:]}[
            self.options.write
        ]
        self._promotions: dict[asyncio.Task[None], frozenset[str]] = {}
        self._removed: dict[str, int] = {}  # while reads or promotions are under way: key to the number of its removal
        self._removals = self._reads = 0
        self._promoting_bytes = 0
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        """All of them, or none."""
        opened: list[Backend] = []
        try:
            for layer in self._layers:
                await layer.backend.open()
                opened.append(layer.backend)
        except BaseException:
            for backend in opened:
                await backend.close()
            raise

    async def register_memory(self, memory: memoryview) -> None:
        for layer in self._layers:
            await layer.backend.register_memory(memory)

    async def close(self) -> None:
        for promotion in self._promotions:
            promotion.cancel()
        if self._promotions:
            await asyncio.wait(list(self._promotions))
        for layer in self._layers:
            await layer.backend.close()

    async def exists(self, keys: Sequence[str]) -> int:
        here, stuck, answered = 0, 0, False
        for turn in range(_TURNS * len(self._layers)):
            layer = self._layers[turn % len(self._layers)]
            left = keys[here:]
            found = await layer.ask("exists", partial(layer.backend.exists, left))
            answered |= found is not None
            here += found or 0
            stuck = 0 if found else stuck + 1
            if here == len(keys) or stuck == len(self._layers):
                break
        self._raise_unless(answered, "exists")
        return here

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        return [verdict is Verdict.OK for verdict in await self._read(keys, buffers, None)]

    async def read_checked(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> list[Verdict | None]:
        return await self._read(keys, buffers, expected)

    async def peek(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """Of the nearest copy of each; nothing is promoted."""
        found, answered = [False] * len(keys), not keys
        for layer in self._layers:
            left = [at for at, here in enumerate(found) if not here]
            if not left:
                break
            some_keys, some_buffers = [keys[at] for at in left], [buffers[at] for at in left]
            answer = await layer.ask("read", partial(layer.backend.peek, some_keys, some_buffers))
            answered |= answer is not None
            for at, here in zip(left, answer or [False] * len(left), strict=True):
                found[at] = here
        self._raise_unless(answered, "read")
        return found

    async def _read(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected | None
    ) -> list[Verdict | None]:
        self._reads += 1
        try:
            return await self._read_on(keys, buffers, expected, self._removals)
        finally:
            self._reads -= 1
            self._forget_removals()

    async def _read_on(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected | None, removals: int
    ) -> list[Verdict | None]:
        verdicts: list[Verdict | None] = [None] * len(keys)
        missing, answered = list(range(len(keys))), not keys
        for depth, layer in enumerate(self._layers):
            if not missing:
                break
            some_keys, some_buffers = [keys[at] for at in missing], [buffers[at] for at in missing]
            ask = partial(read_judged, layer.backend, self._workers, some_keys, some_buffers, expected, tuple(missing))
            answer = await layer.ask("read", ask)
            if answer is None:
                continue
            answered = True
            judged = dict(zip(missing, answer, strict=True))
            verdicts = [judged.get(at) or verdict for at, verdict in enumerate(verdicts)]
            hits = [at for at, verdict in judged.items() if verdict is Verdict.OK]
            layer.counts["hits"] += len(hits)
            for at, verdict in judged.items():
                if verdict in (Verdict.CORRUPT, Verdict.EMPTY):
                    layer.counts["bad"] += 1
                    await layer.ask("quarantine", partial(layer.backend.quarantine, keys[at]))
            if depth and hits:
                # What somebody has removed meanwhile must not come back.
                kept = [at for at in hits if self._removed.get(keys[at], 0) <= removals]
                self._promote(depth, [keys[at] for at in kept], [buffers[at] for at in kept])
            missing = [at for at, verdict in judged.items() if verdict is not Verdict.OK]
        self._counts["misses"] += len(missing)
        self._raise_unless(answered, "read")
        return verdicts

    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[Stored]:
        calls = [partial(layer.backend.write, keys, buffers) for layer in self._targets]
        return await self._write(keys, calls)

    async def write_sealed(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> list[Stored]:
        if len(self._targets) == 1 and self._targets[0].backend.checks:
            return await self._write(keys, [partial(self._targets[0].backend.write_sealed, keys, buffers, expected)])
        await self._workers.run(seal_many, buffers, *expected[:3])  # once, before anybody reads the buffers
        return await self.write(keys, buffers)

    async def _write(
        self, keys: Sequence[str], calls: Sequence[Callable[[], Awaitable[Sequence[Stored]]]]
    ) -> list[Stored]:
        """``calls``: of each store that shall have it."""
        answers = await asyncio.gather(
            *(layer.ask("write", call) for layer, call in zip(self._targets, calls, strict=True))
        )
        outcomes = [Stored.FAILED] * len(keys)
        for layer, answer in zip(self._targets, answers, strict=True):
            if answer is None:
                continue
            layer.counts["written"] += list(answer).count(Stored.WRITTEN)
            # WRITTEN somewhere is more than PRESENT elsewhere, which is more than FAILED.
            outcomes = [max(one, other, key=_RANK.index) for one, other in zip(outcomes, answer, strict=True)]
        self._raise_unless(not keys or any(answer is not None for answer in answers), "write")
        return outcomes

    async def delete(self, keys: Sequence[str]) -> int:
        await self._stop_promoting(keys)
        return max(await _all(layer.backend.delete(keys) for layer in self._layers))

    async def quarantine(self, key: str) -> bool:
        """Where its copy is bad; of copies that are whole by themselves all, for the caller knows why."""
        await self._stop_promoting([key])
        found = [await self._whole(layer, key) for layer in self._layers]
        spare = False in found
        chosen = [layer for layer, whole in zip(self._layers, found, strict=True) if not (spare and whole)]
        removed = await _all(layer.backend.quarantine(key) for layer in chosen)
        self._counts["quarantined"] += any(removed)
        return any(removed)

    async def _whole(self, layer: Layer, key: str) -> bool | None:
        """Whether its copy is; None if it has none, or cannot tell how long it is."""
        lengths = await layer.ask("lengths", partial(layer.backend.lengths, [key]))
        if not lengths or not lengths[0]:
            return None
        buffer = memoryview(bytearray(lengths[0]))
        found = await layer.ask("read", partial(layer.backend.peek, [key], [buffer]))
        return await self._workers.run(whole, key, buffer) if found and found[0] else None

    async def lengths(self, keys: Sequence[str]) -> list[int | None]:
        answers = [await layer.backend.lengths(keys) for layer in self._layers]
        return [
            next((length for length in lengths if length is not None), None) for lengths in zip(*answers, strict=True)
        ]

    def longest_bytes(self) -> int | None:
        """That all of them take."""
        limits = [layer.backend.longest_bytes() for layer in self._layers]
        return min((limit for limit in limits if limit is not None), default=None)

    async def clear(self) -> None:
        for layer in self._layers:
            await layer.backend.clear()

    async def keys(self) -> AsyncIterator[str]:
        seen: set[str] = set()
        for layer in self._layers:
            listed = layer.backend.keys()
            async for key in listed:
                if key not in seen:
                    seen.add(key)
                    yield key

    def stats(self) -> Mapping[str, int | float | str]:
        """Of each store under its place and scheme, such as ``0:slab.hits``."""
        stats: dict[str, int | float | str] = {**self._counts, "promoting_bytes": self._promoting_bytes}
        for layer in self._layers:
            stats[f"{layer.name}.breaker"] = layer.state
            stats |= {f"{layer.name}.{name}": value for name, value in layer.backend.stats().items()}
            stats |= {f"{layer.name}.{name}": value for name, value in layer.counts.items()}
        return stats

    def _promote(self, depth: int, keys: list[str], buffers: list[memoryview]) -> None:
        """Write copies to the nearer stores, beside everything else: the buffers are the caller's again when the read ends."""
        nbytes = sum(map(len, buffers))
        if not keys:
            return
        if self._promoting_bytes + nbytes > self.options.promote_bytes:
            self._counts["not_promoted"] += len(keys)
            return
        self._promoting_bytes += nbytes
        copies = [memoryview(bytes(buffer)) for buffer in buffers]
        promotion = asyncio.ensure_future(self._promoted(depth, keys, copies))
        self._promotions[promotion] = frozenset(keys)

        def ended(task: asyncio.Task[None]) -> None:
            del self._promotions[task]
            self._promoting_bytes -= nbytes
            self._forget_removals()

        promotion.add_done_callback(ended)

    async def _promoted(self, depth: int, keys: list[str], copies: list[memoryview]) -> None:
        for layer in self._layers[:depth]:
            answer = await layer.ask("write", partial(layer.backend.write, keys, copies))
            self._counts["promoted"] += list(answer or ()).count(Stored.WRITTEN)

    async def _stop_promoting(self, keys: Sequence[str]) -> None:
        """Before ``keys`` are removed: what brings them nearer has ended, and no read that has begun will."""
        self._removals += 1
        if self._reads or self._promotions:
            self._removed |= dict.fromkeys(keys, self._removals)
        gone = set(keys)
        under_way = [promotion for promotion, promoted in self._promotions.items() if not gone.isdisjoint(promoted)]
        if under_way:
            await asyncio.wait(under_way)

    def _forget_removals(self) -> None:
        if not self._reads and not self._promotions:
            self._removed.clear()

    def _raise_unless(self, answered: bool, what: str) -> None:
        if not answered:
            raise BackendError(f"{what}: none of the stores answers")


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Of every store, also when one fails; then its error."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


_RANK: Final = (Stored.FAILED, Stored.PRESENT, Stored.WRITTEN)
