"""A tier of your own: what the cache stores is also mirrored, compressed, into a folder.

``python examples/custom_tier.py``.  docs/custom-tier.md explains it.  The tier is an actor: it alone writes its counters, and its
handlers are plain functions.  What must wait, compressing and writing, is a pipeline of two stages with a bounded channel between
them; it reports its end as a message.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import zlib
from pathlib import Path

import anyio
import msgspec

from hicache_actors import (
    BatchEnd,
    CommitEnd,
    Config,
    HiCache,
    HostConfig,
    KVShape,
    KVTensors,
    ModelFacts,
    Prompt,
    StorageConfig,
)
from hicache_actors.runtime import Actor, Control, Message, Receiver, Sender, System, Workers, channel, handles
from hicache_actors.testing.engines import LoopEngine
from hicache_actors.testing.toy_model import ToyModel

PAGE_SIZE = 16


class Stored(Message, frozen=True):
    """The cache has stored these pages: a copy of each, header and KV."""

    names: tuple[str, ...]
    objects: tuple[bytes, ...]


class Mirrored(Control, frozen=True):
    """The pipeline has ended.  A control message: it frees room, so it must never be refused."""

    pages: int
    packed_bytes: int


class MirrorSnapshot(msgspec.Struct, frozen=True):
    """``stored_pages = mirrored_pages + waiting_pages + skipped_pages``."""

    stored_pages: int
    mirrored_pages: int
    waiting_pages: int
    skipped_pages: int
    packed_bytes: int


class MirrorTier(Actor):
    """Mirrors at most ``room_pages`` at a time; a page that finds no room is skipped, for a mirror must not slow the cache."""

    def __init__(self, folder: Path, cache: HiCache, workers: Workers, room_pages: int = 256) -> None:
        super().__init__("mirror")
        self._folder, self._cache, self._workers, self._room_pages = folder, cache, workers, room_pages
        self._stored = self._mirrored = self._waiting = self._skipped = self._packed_bytes = 0

    def observe(self, what: BatchEnd | CommitEnd) -> None:
        """For `HiCache.observe`.  The slots are the job's until this returns, so their bytes are copied here."""
        if isinstance(what, BatchEnd) and what.kind == "backup":
            assert what.source is not None
            assert what.hashes is not None
            objects = tuple(bytes(view) for view in self._cache.host_objects(what.source))
            self.tell(Stored(tuple(page_hash.hex() for page_hash in what.hashes), objects))

    def usage(self) -> MirrorSnapshot:
        return MirrorSnapshot(self._stored, self._mirrored, self._waiting, self._skipped, self._packed_bytes)

    @handles(Stored)
    def _on_stored(self, message: Stored) -> None:
        pages = len(message.names)
        self._stored += pages
        if self._waiting + pages > self._room_pages:
            self._skipped += pages
        else:
            self._waiting += pages
            self.spawn("mirror", self._mirror, message)

    @handles(Mirrored)
    def _on_mirrored(self, message: Mirrored) -> None:
        self._waiting -= message.pages
        self._mirrored += message.pages
        self._packed_bytes += message.packed_bytes

    # -- the pipeline: coroutines that never touch the tier's own state ------------------------------------------------

    async def _mirror(self, message: Stored) -> None:
        sender, receiver = channel(2, tuple[str, bytes])
        async with anyio.create_task_group() as stages:
            stages.start_soon(self._pack, message, sender)
            stages.start_soon(self._write, receiver)

    async def _pack(self, message: Stored, sender: Sender[tuple[str, bytes]]) -> None:
        async with sender:
            for name, data in zip(message.names, message.objects, strict=True):
                packed = await self._workers.run(zlib.compress, data)
                await sender.send((name, packed))  # waits while the writer is behind

    async def _write(self, receiver: Receiver[tuple[str, bytes]]) -> None:
        pages = packed_bytes = 0
        async with receiver:
            async for name, packed in receiver:
                packed_bytes += await self._workers.run((self._folder / name).write_bytes, packed)
                pages += 1
        self.tell(Mirrored(pages, packed_bytes))


async def serve(prompts: int, folder: Path) -> MirrorSnapshot:
    kv = KVTensors.make(KVShape(layers=4, kv=2, heads=2, head_dim=16, dtype="float32", page_size=PAGE_SIZE), pages=64)
    config = Config(
        page_size=PAGE_SIZE,
        host=HostConfig(pages=256),
        model=ModelFacts(model_id="toy", weights="v1"),
        storage=StorageConfig(url="memory://"),
    )
    workers = Workers("mirror", 2)
    # The system ends after the cache: it mirrors what is still to be mirrored.
    async with System("mirror") as system, HiCache.open(config, kv) as cache:
        tier = MirrorTier(folder, cache, workers)
        await system.start(tier)
        cache.observe(tier.observe)
        engine = LoopEngine(cache, ToyModel(kv))
        for number in range(prompts):
            await engine.answer(Prompt([*range(100), *range(1000 * number, 1000 * number + 200)]))
        await cache.drain(deadline_s=10.0)
        print(f"while it works: {tier.usage()}")
    workers.close(timeout_s=5.0)
    print(f"at the end:     {tier.usage()}")
    for actor in system.snapshot().actors:
        print(f"its mailbox:    {actor.handled} messages handled, at most {actor.data_high_water} waiting")
    return tier.usage()


def main(prompts: int, folder: Path) -> int:
    at = asyncio.run(serve(prompts, folder))
    object_bytes = {len(zlib.decompress(file.read_bytes())) for file in folder.iterdir()}
    whole = at.mirrored_pages == at.stored_pages == sum(1 for _ in folder.iterdir())
    print(f"mirrored {at.mirrored_pages} of {at.stored_pages} pages, each an object of {max(object_bytes)} bytes")
    return 0 if whole and len(object_bytes) == 1 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A tier of your own that mirrors what the cache stores.")
    parser.add_argument("--prompts", type=int, default=8, help="prompts to answer (default: 8)")
    options = parser.parse_args()
    if options.prompts < 1:
        parser.error("--prompts: at least 1")
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(options.prompts, Path(temporary)))
