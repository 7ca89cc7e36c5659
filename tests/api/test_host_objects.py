"""What an observer reads of host slots is what the store gets."""

from __future__ import annotations

from hicache_actors.backends.backend import Stored
from hicache_actors.backends.memory import MemoryBackend
from hicache_actors.pipelines.observer import BatchEnd, CommitEnd
from hicache_actors.testing.small import open_small, prompt


async def test_an_observer_sees_the_objects_that_are_stored() -> None:
    backend = MemoryBackend()
    seen: list[bytes] = []
    async with open_small(backend=backend) as small:

        def observe(what: BatchEnd | CommitEnd) -> None:
            if isinstance(what, BatchEnd) and what.kind == "backup":
                assert what.source is not None
                assert what.outcomes == (Stored.WRITTEN,) * 5
                seen.extend(bytes(view) for view in small.cache.host_objects(what.source))

        small.cache.observe(observe)
        await small.engine.answer(prompt(5))
        await small.cache.drain(5.0)
    stored = backend.keys()
    keys = [key async for key in stored]
    buffers = [memoryview(bytearray(len(seen[0]))) for _ in keys]
    assert list(await backend.read(keys, buffers)) == [True] * 5
    assert sorted(seen) == sorted(map(bytes, buffers))
