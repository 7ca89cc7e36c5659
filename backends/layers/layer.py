"""One store of several: what keeps it from harming the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from hicache_actors.backends.backend import Backend
from hicache_actors.errors import BackendError
from hicache_actors.runtime.breaker import Breaker

T = TypeVar("T")

_FAILURES: Final = 2
_DELAY_S, _MAX_DELAY_S = 1.0, 30.0


class Layer:
    """A call that fails has no answer; one that is slow is noted while it is still under way.

    The slow call itself is waited for, since it works on buffers of the caller; later ones are spared.
    """

    def __init__(self, name: str, backend: Backend, patience_s: float) -> None:
        self.name, self.backend = name, backend
        self.counts: Counter[str] = Counter()
        self._patience_s = patience_s
        self._breaker: Breaker | None = None

    async def ask(self, what: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """What ``call`` answers; None if it fails, and while this store is being left alone."""
        loop = asyncio.get_running_loop()
        if self._breaker is None:
            self._breaker = Breaker(
                failures=_FAILURES, delay_s=_DELAY_S, max_delay_s=_MAX_DELAY_S, now_s=loop.time(), changed=self._changed
            )
        breaker = self._breaker
        if breaker.refuses(loop.time()):
            self.counts["spared"] += 1
            return None
        probe = breaker.begin(loop.time())
        late = False

        def grow_impatient() -> None:
            nonlocal late
            late = True
            self.counts["slow"] += 1
            breaker.failed(loop.time(), f"{what}: no answer within {self._patience_s:g} s", probe=probe)

        timer = loop.call_later(self._patience_s, grow_impatient)
        try:
            answer = await call()
        except BackendError as error:
            self.counts["failed"] += 1
            if not late:
                breaker.failed(loop.time(), str(error), probe=probe)
            return None
        except BaseException:
            if not late:
                breaker.dropped(probe=probe)
            raise
        else:
            if not late:
                breaker.succeeded(loop.time(), probe=probe)
            return answer
        finally:
            timer.cancel()

    @property
    def state(self) -> str:
        return "closed" if self._breaker is None else self._breaker.state

    def _changed(self, _: str, new: str) -> None:
        self.counts[f"breaker_{new}"] += 1
