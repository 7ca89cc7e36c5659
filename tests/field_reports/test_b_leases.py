"""Field reports, section B: stores that lend their objects for a time only."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.backends.wrappers import Wrapper
from hicache_actors.testing.small import prompt

from .kit import PAGE, VIRTUAL, opened, quiet, store

LEASE_S = 0.5


class _Lending(Wrapper):
    """A lookup lends what it finds for `LEASE_S`; afterwards the store uses that memory for something else.

    Reads come ``late_s`` after they were asked for, and say that they have found the key whatever lies there by then.
    """

    def __init__(self, inner: MemoryBackend, late_s: float) -> None:
        super().__init__(inner)
        self.late_s = late_s
        self.expired = 0
        self._until_s: dict[str, float] = {}

    async def exists(self, keys: Sequence[str]) -> int:
        found = await super().exists(keys)
        self._until_s |= dict.fromkeys(keys[:found], anyio.current_time() + LEASE_S)
        return found

    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        await anyio.sleep(self.late_s)
        found = list(await super().read(keys, buffers))
        for at, key in enumerate(keys):
            if self._until_s[key] < anyio.current_time():
                self.expired += 1
                other = buffers[at - 1] if at else bytes(len(buffers[at]))
                buffers[at][:] = other  # another object's bytes, whole, or nothing at all
        return found


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "as a batch"])
@VIRTUAL
async def test_b033_what_was_lent_no_longer_is_a_miss(anyio_backend: object, at_once: bool) -> None:
    """Given a store that lends objects for half a second and then puts others in their place.
    When pages are looked up and read 0.6 seconds later, one by one or as a batch, and then in time.
    Then what has expired is a miss, nobody sees other bytes, and what comes in time is a hit."""
    memory = MemoryBackend()
    prompts = [prompt(8)] if at_once else [prompt(1, family=family) for family in range(8)]
    references = await store(memory, *prompts)
    lending = _Lending(memory, late_s=0.6)
    async with opened(device_pages=24, host_pages=32, backend=lending, prefetch_policy="wait_complete") as small:
        for asked, reference in zip(prompts, references, strict=True):
            answer = await small.engine.answer(asked)
            assert (answer.account.storage, answer.tokens) == (0, reference.tokens)
        assert lending.expired == 8
        snapshot = small.cache.snapshot().storage
        assert snapshot is not None
        assert snapshot.corrupt_pages > 0
        lending.late_s = 0.1
        assert await small.cache.drain(60.0) == 0
        await quiet(small)
        await small.cache.reset()
        for asked, reference in zip(prompts, references, strict=True):
            answer = await small.engine.answer(asked)
            assert (answer.account.storage, answer.tokens) == ((8 if at_once else 1) * PAGE, reference.tokens)
