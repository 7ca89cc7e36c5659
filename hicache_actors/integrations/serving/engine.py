"""A serving engine on a cache: many requests at once, their tokens streamed as they come.

::

    served = ServedModel(model, kv)                                     # once: checks the model, takes over its attention
    async with HiCache.open(config, kv) as cache, ServingEngine.open(cache, served) as engine:
        async for token in engine.generate(token_ids, max_new_tokens=64):
            ...

With driver="auto" steps are decided on the cache's loop, with driver="step" by a thread of the engine's own, which then owns the
cache's decisions.  Passes are computed by one more thread in both cases.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from hicache_actors.cache.api import HiCache
from hicache_actors.cache.arguments import check_rid
from hicache_actors.errors import StoppedError, UsageError
from hicache_actors.integrations.serving.generation import Generation, Stream
from hicache_actors.integrations.serving.model import ServedModel
from hicache_actors.integrations.serving.request import Request
from hicache_actors.integrations.serving.schedule import ScheduleRecorder
from hicache_actors.integrations.serving.scheduler import Scheduler
from hicache_actors.integrations.serving.turns import LoopTurns, News, StepTurns, Turns
from hicache_actors.integrations.serving.words import (
    EngineSnapshot,
    Refused,
    RequestRefused,
    Sampler,
    ServingConfig,
    greedy,
)
from hicache_actors.keys.prompt import Prompt
from hicache_actors.keys.scope import NO_SCOPE, Scope
from hicache_actors.ranks import StepDriver
from hicache_actors.runtime import see_through

_DEFAULTS = ServingConfig()


class ServingEngine:
    """Continuous batching over one cache.  Open it with `ServingEngine.open`; all methods belong to the loop's thread.

    Each step serves decoding sequences (one token each) and, with what is left of its token budget, chunks of prompts, first come
    first served.  Pages grow as sequences do; when the pool is full the youngest sequence gives its pages back, and computes later
    what is not cached then.  Whole pages of prompts and answers are committed as they are computed, so the next turn of a chat,
    and other requests with the same prefix, find them.
    """

    def __init__(
        self, cache: HiCache, served: ServedModel, config: ServingConfig, recorder: ScheduleRecorder | None
    ) -> None:
        self.cache, self.served, self.config = cache, served, config
        self._live: dict[str, Request] = {}
        self._numbers = itertools.count(1)
        self._refused = 0
        self._closing = False
        driver = cache.driver
        self._turns: Turns
        if isinstance(driver, StepDriver):
            scheduler = Scheduler(cache, config, lambda what: None, recorder)  # each step looks for itself
            self._turns = StepTurns(scheduler, served, self._deliver, driver)
        else:
            scheduler = Scheduler(cache, config, lambda what: turns.watch(what), recorder)
            self._turns = turns = LoopTurns(scheduler, served, self._deliver, driver)
        self._scheduler = scheduler

    @staticmethod
    @asynccontextmanager
    async def open(
        cache: HiCache,
        served: ServedModel,
        config: ServingConfig = _DEFAULTS,
        *,
        recorder: ScheduleRecorder | None = None,
        close_timeout_s: float = 5.0,
    ) -> AsyncIterator[ServingEngine]:
        """An engine on ``cache``, which must be over the KV tensors of ``served``; the only user of its decisions with
        driver="step".

        When the block ends, requests that still run are aborted; a pass that is being computed is waited for, at most
        ``close_timeout_s``, and its pages stay taken until it has ended.  What broke the engine meanwhile is raised then, unless
        the block itself raised.
        """
        if cache.kv is not served.kv:
            raise UsageError("the cache is over other KV tensors than the model: give both the same KVTensors")
        engine = ServingEngine(cache, served, config, recorder)
        if recorder is not None:
            recorder.watch(cache)
        running = asyncio.get_running_loop().create_task(engine._turns.run(), name="serving-engine")
        try:
            yield engine
        finally:
            await see_through(engine._close(running, close_timeout_s))
        running.result()

    async def _close(self, running: asyncio.Task[None], timeout_s: float) -> None:
        self._closing = True
        self._turns.close(timeout_s)
        await asyncio.wait({running})
        await self._turns.aclose(timeout_s)

    def submit(
        self,
        tokens: object,
        *,
        max_new_tokens: int,
        rid: str | None = None,
        scope: Scope = NO_SCOPE,
        stop_tokens: Iterable[int] = (),
        sampler: Sampler = greedy,
    ) -> Generation | Refused:
        """Ask for at most ``max_new_tokens`` after ``tokens`` (a sequence of ids; copied).  Never waits.

        A token of ``stop_tokens`` ends the answer and is its last one.  ``rid`` names the request, once at a time.  Raises
        ``TypeError`` or ``ValueError`` for what are no token ids of this model, `UsageError` for counts and names out of place,
        and `StoppedError` if the engine has failed.
        """
        prompt = Prompt(tokens, scope)
        self._check(prompt, max_new_tokens)
        name = f"serving-{next(self._numbers)}" if rid is None else rid
        check_rid(name)
        if name in self._live:
            raise UsageError(f"request {name!r} is running already")
        refused = self._refusal(len(prompt) + max_new_tokens)
        if refused is not None:
            self._refused += 1
            return refused
        stream = Stream()
        request = Request(name, next(self._numbers), prompt, max_new_tokens, frozenset(stop_tokens), sampler, stream)
        self._live[name] = request
        turns = self._turns
        turns.post(lambda scheduler: scheduler.admission.enqueue(request))
        return Generation(name, stream, lambda: turns.post(lambda scheduler: scheduler.end(request, "aborted")))

    async def generate(
        self,
        tokens: object,
        *,
        max_new_tokens: int,
        rid: str | None = None,
        scope: Scope = NO_SCOPE,
        stop_tokens: Iterable[int] = (),
        sampler: Sampler = greedy,
    ) -> AsyncIterator[int]:
        """`submit`, as an async iterator of tokens.  Leaving it, by cancellation too, aborts the request.

        Raises `RequestRefused` in place of a refusal.
        """
        generation = self.submit(
            tokens, max_new_tokens=max_new_tokens, rid=rid, scope=scope, stop_tokens=stop_tokens, sampler=sampler
        )
        if isinstance(generation, Refused):
            raise RequestRefused(generation)
        async with generation:
            async for token in generation:
                yield token

    def snapshot(self) -> EngineSnapshot:
        """Figures at this instant; with driver="step" those of a step that may be under way."""
        counts: Counter[str] = self._scheduler.counts
        return EngineSnapshot(
            waiting=len(self._scheduler.admission.waiting),
            running=len(self._scheduler.running),
            steps_in_flight=len(self._turns.under_way),
            steps=counts["steps"],
            computed_tokens=counts["computed_tokens"],
            generated_tokens=counts["generated_tokens"],
            finished=counts["finished"],
            aborted=counts["aborted"],
            refused=self._refused,
            preemptions=counts["preemptions"],
            retries=counts["retries"],
        )

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _check(self, prompt: Prompt, max_new_tokens: int) -> None:
        if self._turns.failure is not None:
            raise StoppedError("the engine has failed") from self._turns.failure
        if not len(prompt):
            raise UsageError("an empty prompt: a model needs a token to continue from")
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens = {max_new_tokens}: at least 1")
        top = max(prompt.packed.cast("q"))
        if top >= self.served.vocabulary:
            raise ValueError(f"token {top} is none of the model's {self.served.vocabulary}")

    def _refusal(self, n_tokens: int) -> Refused | None:
        if self._closing:
            return Refused("closing")
        if n_tokens > self.served.max_tokens:
            return Refused("too_long", n_tokens, self.served.max_tokens)
        waiting = len(self._live) - len(self._scheduler.running)
        if waiting >= self.config.max_waiting:
            return Refused("queue_full", waiting + 1, self.config.max_waiting)
        return None

    def _deliver(self, news: News) -> None:
        for request, tokens, ending in news:
            if ending is not None:
                del self._live[request.rid]
            request.stream.deliver(tokens, ending)
