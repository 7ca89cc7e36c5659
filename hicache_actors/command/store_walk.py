"""A store as an operator sees it: its names in groups, and its objects in batches that fit into little memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, TypeVar

import anyio

from hicache_actors.backends.backend import Backend
from hicache_actors.backends.objects import Header, Verdict, read_header, verify
from hicache_actors.backends.registry import open_backend
from hicache_actors.backends.urls import FIELD
from hicache_actors.errors import BackendError, ConfigError
from hicache_actors.keys.hashes import HASH_BYTES
from hicache_actors.memory.places import places_of
from hicache_actors.runtime.workers import Workers

T = TypeVar("T")

OPEN_S: Final = 30.0
_BATCH_BYTES: Final = 16 << 20
_BATCH_NAMES: Final = 64
_HEX: Final = 2 * HASH_BYTES


class Item(NamedTuple):
    """An object that was read.  ``data`` is a view that is used again for the next batch."""

    name: str
    data: memoryview
    header: Header | None  #: None: an object without a header, or none of ours
    verdict: (
        Verdict | None
    )  #: on itself: its checksum, and whether it lies under the name of its page; None without a header


def group_of(name: str) -> str:
    """Who shares it: what a name says behind the hash of the page, such as namespace, part and rank."""
    return name[_HEX:] if _hash_in(name) is not None else "(other names)"


def check_is_there(url: str) -> None:
    """`ConfigError` if a folder of ``url`` is not there: opening would make it, and a slip of the pen look like an empty store."""
    for place in places_of(url):
        if not place.folder.is_dir():
            raise ConfigError(
                FIELD, url, f"there is no such folder: {place.folder}", allowed="the folder of a store",
                fix="correct the URL; a cache makes the folder",
            )  # fmt: skip


def _check_lists(url: str, backend: Backend) -> None:
    """`ConfigError` if it cannot tell what is in it: what it does not name must not look like an empty store."""
    # Here, since it imports torch, which `hicache plan` need not have.
    from hicache_actors.tiers.storage.neighbours import lists_names

    if not lists_names(backend):
        raise ConfigError(
            FIELD, url, "this store cannot list its objects, so nobody can look at all of them",
            allowed="a store that lists", fix="use hicache store doctor, and the tools of the store itself",
        )  # fmt: skip


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[Backend, Workers]]:
    """The store, and threads to work on what it holds.  Raises `ConfigError` and `BackendError`."""
    workers = Workers("store", 4)
    try:
        backend = open_backend(url, workers)
        try:
            with anyio.fail_after(OPEN_S):
                await backend.open()
        except TimeoutError as error:
            raise BackendError(f"{url}: no answer within {OPEN_S:g} s: is it running, and are its keys set?") from error
        try:
            yield backend, workers
        finally:
            with anyio.move_on_after(OPEN_S):
                await backend.close()
    finally:
        workers.close()


def run_with(url: str, look: Callable[[Backend, Workers], Awaitable[T]], *, lists: bool = True) -> T:
    """Open the store, ``look``, close it.  ``lists``: it goes through all objects, which not every store can name.  Blocks."""

    async def run() -> T:
        async with opened(url) as (backend, workers):
            if lists:
                _check_lists(url, backend)
            return await look(backend, workers)

    return asyncio.run(run())


async def named(backend: Backend, most: int | None = None) -> AsyncIterator[list[str]]:
    """Its names, a few at a time; at most ``most`` of them."""
    some: list[str] = []
    count = 0
    names = backend.keys()
    async for name in names:
        if count == most:
            break
        count += 1
        some.append(name)
        if len(some) == _BATCH_NAMES:
            yield some
            some = []
    if some:
        yield some


async def objects(
    backend: Backend, workers: Workers, names: Sequence[str], object_bytes: int | None
) -> AsyncIterator[list[Item]]:
    """Read and judge them, in batches.  What is gone meanwhile is left out.

    ``object_bytes``: for stores that cannot tell lengths; raises `BackendError` if one is needed and not given.
    """
    lengths = await backend.lengths(names)
    known = [length if length is not None else object_bytes for length in lengths]
    if names and all(length is None for length in known):
        if not await backend.exists(names[:1]):
            return
        raise BackendError(
            "this store cannot tell how long its objects are: say it with --object-bytes", retryable=False
        )
    waiting = [(name, length) for name, length in zip(names, known, strict=True) if length is not None]
    while waiting:
        batch = [waiting.pop(0)]
        total = batch[0][1]
        while waiting and total + waiting[0][1] <= _BATCH_BYTES:
            batch.append(waiting.pop(0))
            total += batch[-1][1]
        memory, buffers, at = memoryview(bytearray(total)), [], 0
        for _, length in batch:
            buffers.append(memory[at : at + length])
            at += length
        found = await backend.peek([name for name, _ in batch], buffers)
        read = [(name, data) for (name, _), data, here in zip(batch, buffers, found, strict=True) if here]
        yield await workers.run(lambda read=read: [_judged(*one) for one in read])  # type: ignore[misc]


def _judged(name: str, data: memoryview) -> Item:
    header = read_header(data)
    if header is None:
        return Item(name, data, None, None)
    verdict = verify(data, header.namespace, header.page_hash, header.chunk)
    if verdict is Verdict.OK and _hash_in(name) not in (None, header.page_hash):
        verdict = Verdict.CORRUPT  # whole, but filed under another page's name
    return Item(name, data, header, verdict)


def _hash_in(name: str) -> bytes | None:
    try:
        found = bytes.fromhex(name[:_HEX])
    except ValueError:
        return None
    return found if len(found) == HASH_BYTES else None
