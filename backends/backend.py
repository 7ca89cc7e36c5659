"""The contract of a storage backend.  Importable without torch.

Three methods must be written: `exists`, `read`, `write`.  All else has a default.  Keys are opaque ASCII strings (the key
scheme of `hicache_actors.keys` makes them safe for file names); an object is one run of bytes of fixed length (header +
payload, see `hicache_actors.backends.objects`); a backend never looks inside.

Every method is a coroutine on the cache's event loop and must not block it: blocking calls go through `Workers.run`.  Methods
run concurrently.  Buffers belong to the cache and stay valid until the call has *ended* (returned or raised), however long
that takes: nobody frees them earlier, and the cache never cancels a call, since a thread that fills a buffer would not stop.
Foreign exceptions are translated to `BackendError` at this border (`map_errors`).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from hicache_actors.errors import BackendError

if TYPE_CHECKING:
    from hicache_actors.backends.objects import Expected, Verdict
    from hicache_actors.runtime.workers import Workers


KeysBefore: TypeAlias = Callable[[str], Sequence[str]]

keys_before: Final[ContextVar[KeysBefore | None]] = ContextVar("keys_before", default=None)
"""In a call about pages of prompts: the keys of all that stands before a key of that call, from the first page of its prompt on,
in order; with the key itself they are one chain.  None in calls about single objects, such as `delete`.  For backends that place
objects by what they belong to; the function may be called on any thread."""


class Stored(enum.IntEnum):
    """What became of one object of a `write`."""

    FAILED = 0
    WRITTEN = 1
    PRESENT = 2  #: an object was there under this key; it was kept


class Backend(ABC):
    """One store, opened once, used by one cache."""

    scope: Literal["instance", "host", "cluster"] = "instance"
    """Who can see what is written here: this process only, processes of this host, or the cluster."""

    batch_pages: int = 64
    """Pages that one call is given at most, besides 32 MiB.  A deadline is that of a call, and a fetch stops between calls: only a
    store that is done with a small page in microseconds gains by more, up to `hicache_actors.memory.shapes.BATCH_PAGES`."""

    checks: bool = False
    """Whether `read_checked` and `write_sealed` may be called.  A wrapper says False, unless it has them too."""

    async def open(self) -> None:
        """Called once, before any other method, on the loop that will use it.  Raises `BackendError` or `ConfigError`."""

    async def register_memory(self, memory: memoryview) -> None:
        """Called after `open` with each run of host memory that buffers will be slices of; it stays mapped until after `close`.

        For backends that move bytes by address.  The default does nothing.
        """

    async def close(self) -> None:
        """Idempotent.  No method is called afterwards; calls still running (hung ones) may be abandoned."""

    @abstractmethod
    async def exists(self, keys: Sequence[str]) -> int:
        """Length of the leading run of ``keys`` that are stored whole."""

    @abstractmethod
    async def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        """Fill ``buffers[i]`` with the object ``keys[i]``: True where it was found and has exactly the buffer's length.

        Where False, the buffer's content is undefined.
        """

    async def peek(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[bool]:
        """`read` that counts as no use, so that eviction takes no notice: for who looks after the objects.  Default: `read`."""
        return await self.read(keys, buffers)

    async def read_checked(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> Sequence[Verdict | None]:
        """`read` and `verify_many` in one go, where ``checks`` says so: a verdict for what was found, None for what was not.

        For backends that are in a worker thread anyway, with the bytes in the processor's cache.
        """
        raise NotImplementedError

    @abstractmethod
    async def write(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Stored]:
        """Store objects; after WRITTEN or PRESENT a later `read` finds a whole object, before that it finds none or a whole one."""

    async def write_sealed(
        self, keys: Sequence[str], buffers: Sequence[memoryview], expected: Expected
    ) -> Sequence[Stored]:
        """`seal_many` and `write` in one go, where ``checks`` says so.  What is stored already need not be sealed."""
        raise NotImplementedError

    async def delete(self, keys: Sequence[str]) -> int:
        """Remove objects -> how many were there.  The default removes nothing."""
        return 0

    async def quarantine(self, key: str) -> bool:
        """Take a bad object out of sight: later `exists` and `read` miss it, and `write` stores anew.  Default: `delete`."""
        return await self.delete([key]) > 0

    async def lengths(self, keys: Sequence[str]) -> Sequence[int | None]:
        """Bytes of each object, None where there is none or this store cannot tell.  For the tools of operators.  Default: None."""
        return [None] * len(keys)

    def longest_bytes(self) -> int | None:
        """Of an object that this store takes; 0: the first one that is written decides.  Default: None, any.  After `open`."""
        return None

    async def clear(self) -> None:
        """Remove every object of this store, and nothing else.  The default goes through `keys` and `delete`."""
        async for key in self.keys():
            await self.delete([key])

    async def keys(self) -> AsyncIterator[str]:
        """The stored keys, in no order.  The default knows none."""
        nothing: tuple[str, ...] = ()
        for key in nothing:
            yield key

    def stats(self) -> Mapping[str, int | float | str]:
        """Counters for `snapshot()`; any thread."""
        return {}


BackendFactory = Callable[[str, "Workers"], Backend]
"""What a URL scheme registers (entry point group ``hicache_actors.backends``): takes the whole URL, and the threads that the
cache lends for blocking calls.  A class whose constructor takes these two will do.  Raises `ConfigError` for a bad URL."""


@contextmanager
def map_errors(what: str, *foreign: type[BaseException], retryable: bool = True) -> Iterator[None]:
    """Translate foreign exceptions to `BackendError`, once, at the border."""
    try:
        yield
    except BackendError:
        raise
    except foreign as error:
        raise BackendError(f"{what}: {type(error).__name__}: {error}", retryable=retryable) from error
