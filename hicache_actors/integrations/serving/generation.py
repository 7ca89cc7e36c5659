"""What a caller holds while its tokens are generated."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import Self

from hicache_actors.integrations.serving.words import Ending


class Stream:
    """Tokens on their way from an engine to its caller.  All on the loop's thread."""

    def __init__(self) -> None:
        self.tokens: deque[int] = deque()
        self.ending: Ending | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def deliver(self, tokens: list[int], ending: Ending | None) -> None:
        self.tokens += tokens
        self.ending = ending
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def news(self) -> None:
        """Wait for the next delivery."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


class Generation:
    """One request under way: ``async for token in generation``, on the loop; each token goes to one reader.

    Cancelling a reader loses no token and ends nothing; `abort` does, and so does dropping the last reference.  As an async
    context manager it is aborted when the block ends.
    """

    def __init__(self, rid: str, stream: Stream, abort: Callable[[], None]) -> None:
        self.rid = rid
        self._stream = stream
        self._abort = weakref.finalize(self, abort)
        self._abort.atexit = False

    @property
    def ending(self) -> Ending | None:
        """How it ended; None while tokens may come."""
        return self._stream.ending

    def abort(self) -> None:
        """Stop generating.  Any thread, idempotent; pages are given back before the next step is decided."""
        self._abort()

    async def finished(self) -> Ending:
        """Wait for the end; tokens that were not read stay readable.  Raises what a failed engine raised."""
        while self._stream.ending is None:
            await self._stream.news()
        return self._checked(self._stream.ending)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        """The next token.  Raises what a failed engine raised, after the tokens that came before."""
        stream = self._stream
        while not stream.tokens:
            if stream.ending is not None:
                self._checked(stream.ending)
                raise StopAsyncIteration
            await stream.news()
        return stream.tokens.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.abort()

    @staticmethod
    def _checked(ending: Ending) -> Ending:
        if ending.error is not None:
            raise ending.error
        return ending
