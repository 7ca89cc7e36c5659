"""Toy engines on the public face, as an embedder would write them: one on the loop, one in a thread of its own.

Both compute with a `ToyModel`, so a wrong byte ends in `WrongBytes`, and both keep the rules of a real engine: nobody waits while
holding pins, no token leaves before the verdict of its load, a failed load is recomputed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait

import msgspec

from hicache_actors.cache.api import HiCache
from hicache_actors.cache.handles import Lease, Load, Prefetch
from hicache_actors.cache.rooms import Room
from hicache_actors.core.words import Account, Shortfall
from hicache_actors.errors import TransferError
from hicache_actors.keys.prompt import Prompt
from hicache_actors.runtime import Workers
from hicache_actors.testing.toy_model import ToyModel
from hicache_actors.transfer.completions import Completion

ROOM_S = 10.0  #: how long a request waits for room


class Answer(msgspec.Struct, frozen=True):
    """``tokens`` were generated; ``retries``: forward passes whose load failed; ``account`` of the last try."""

    tokens: tuple[int, ...]
    account: Account
    retries: int = 0


class NoRoom(Exception):
    """The device pool cannot hold this request now; the lease has been given back."""

    def __init__(self, refused: Shortfall) -> None:
        super().__init__(f"{refused.missing_pages} pages missing ({refused.reason})")
        self.refused = refused


class LoopEngine:
    """driver="auto": requests are coroutines on the cache's loop; forward passes run in its worker threads.

    Where threads do not run (virtual time), layers are awaited before the forward pass starts.
    """

    def __init__(self, cache: HiCache, model: ToyModel, *, threads: bool = True) -> None:
        self.cache, self.model = cache, model
        self._threads = threads

    async def answer(
        self,
        prompt: Prompt,
        new_tokens: int = 1,
        *,
        deadline_s: float | None = 5.0,
        room_s: float = ROOM_S,
        max_retries: int = 3,
    ) -> Answer:
        """Prefill ``prompt`` and generate.

        Raises `NoRoom` if the pool is smaller than the request or has had no room for it for ``room_s``, and `TransferError` after
        ``max_retries`` failed loads.
        """
        retries = 0
        while retries <= max_retries:
            served = await self._serve(prompt, new_tokens, deadline_s, retries)
            if isinstance(served, Shortfall):
                # Outside the lease: who waits for room holds nothing.
                async with self.cache.room(len(prompt) + new_tokens - 1, deadline_s=room_s) as room:
                    if isinstance(room, Shortfall):
                        raise NoRoom(room)
                    served = await self._serve(prompt, new_tokens, deadline_s, retries, room)
                if isinstance(served, Shortfall):
                    raise NoRoom(served)  # the cache has been reset or has failed under it
            if served is not None:
                return served
            retries += 1
        raise TransferError(f"{retries} loads failed")

    async def _serve(
        self, prompt: Prompt, new_tokens: int, deadline_s: float | None, retries: int, room: Room | None = None
    ) -> Answer | Shortfall | None:
        """One try: None if its load has failed."""
        async with self.cache.acquire(prompt, deadline_s=deadline_s, room=room) as lease:
            refused = lease.allocate(len(prompt) + new_tokens - 1 - lease.usable_tokens)
            if isinstance(refused, Shortfall):
                return refused
            token = await self._prefill(prompt, lease)
            if token is None:
                return None
            lease.commit(len(prompt))
            tokens = await self._decode(prompt, lease, token, new_tokens)
            return Answer(tokens, lease.account, retries)

    async def _prefill(self, prompt: Prompt, lease: Lease) -> int | None:
        """-> the first token, or None if it must not be emitted because the load failed."""
        load = lease.loading
        waits = load if self._threads else None
        try:
            if load is not None and not self._threads:
                for layer in range(self.model.kv.shape.layers):
                    await load.ready(layer)
            token = await lease.run(self.model.forward, prompt, lease.pages, lease.usable_tokens, len(prompt), waits)
        except TransferError:
            if load is None:
                raise
            await load.verdict()  # before it is agreed, the next try would join the failed load
            return None
        return token if load is None or (await load.verdict()).failed is None else None

    async def _decode(self, prompt: Prompt, lease: Lease, token: int, new_tokens: int) -> tuple[int, ...]:
        tokens = [token]
        whole = Prompt(prompt.tolist(), prompt.scope)
        for _ in range(new_tokens - 1):
            whole.append([tokens[-1]])
            end = len(whole)
            tokens.append(await lease.run(self.model.forward, whole, lease.pages, end - 1, end, None))
        return tuple(tokens)


class StepEngine:
    """driver="step": one engine thread, which calls `run`, and one compute thread, its "GPU": two steps are in flight.

    The forward of step s runs while step s + 1 is decided, so its pages are committed, and its lease is released, with an event.

    ``lockstep``: for one of several ranks.  A forward that was launched two steps ago is waited for, as the collectives of a real
    model would have it, so that nothing is decided by how fast this rank is.
    """

    def __init__(self, cache: HiCache, model: ToyModel, *, batch: int = 2, lockstep: bool = False) -> None:
        self.cache, self.model = cache, model
        self.answers: dict[str, Answer] = {}
        self._batch, self._lockstep = batch, lockstep
        self._stream = Workers("toy-gpu", 1)

    def run(self, prompts: Sequence[tuple[str, Prompt]], *, deadline_s: float = 5.0) -> dict[str, Answer]:
        """Serve all prompts to their first token, then make empty steps until nothing is open -> rid to answer."""
        cache = self.cache
        waiting = deque(_Request(rid, prompt) for rid, prompt in prompts)
        running: list[_Request] = []
        launched: list[_Request] = []
        while waiting or running or cache.needs_step:
            cache.begin_step()
            if self._lockstep:
                wait(
                    [request.forward for request in running if request.forward is not None and request not in launched]
                )
            for request in launched:
                request.commit()
            flying = launched if self._lockstep else ()
            for request in [request for request in running if request not in flying and request.finished]:
                running.remove(request)
                if not self._settle(request):
                    waiting.append(request)
            launched = self._schedule(waiting, deadline_s)
            running += launched
            cache.end_step()
            for request in launched:
                request.launch(self._stream, self.model)
        return self.answers

    def close(self) -> None:
        """End the compute thread."""
        self._stream.close(1.0)

    def _schedule(self, waiting: deque[_Request], deadline_s: float) -> list[_Request]:
        """Start what has been fetched and fits; nobody waits while holding pins."""
        batch: list[_Request] = []
        for _ in range(len(waiting)):
            request = waiting.popleft()
            if len(batch) < self._batch and request.start(self.cache, deadline_s):
                batch.append(request)
            else:
                waiting.append(request)
        return batch

    def _settle(self, request: _Request) -> bool:
        """Emit the token, unless the load that it rests on has failed."""
        assert request.lease is not None
        assert request.forward is not None
        failed = request.forward.exception()
        if failed is not None and not isinstance(failed, TransferError):
            raise failed
        sound = failed is None and (request.load is None or request.verdict_failed is None)
        if sound:
            self.answers[request.rid] = Answer((request.forward.result(),), request.lease.account, request.retries)
        request.give_back()
        return sound


class _Request:
    def __init__(self, rid: str, prompt: Prompt) -> None:
        self.rid, self.prompt, self.retries = rid, prompt, 0
        self.prefetch: Prefetch | None = None
        self.lease: Lease | None = None
        self.load: Load | None = None
        self.forward: Future[int] | None = None
        self.computed = Completion()

    def start(self, cache: HiCache, deadline_s: float) -> bool:
        """-> whether its forward can be launched in this step."""
        if self.prefetch is None:
            self.prefetch = cache.prefetch(self.prompt, self.rid, deadline_s=deadline_s)
        if not self.prefetch.settled:
            return False
        lease = cache.lease(self.prompt, self.rid)
        load = lease.load()
        if isinstance(lease.allocate(len(self.prompt) - lease.usable_tokens), Shortfall):
            lease.release()
            return False
        self.lease, self.load = lease, None if isinstance(load, Shortfall) else load
        self.computed = Completion()
        return True

    def launch(self, stream: Workers, model: ToyModel) -> None:
        assert self.lease is not None
        pages, start = tuple(self.lease.pages), self.lease.usable_tokens
        self.forward = stream.submit(model.forward, self.prompt, pages, start, len(self.prompt), self.load)
        computed = self.computed
        self.forward.add_done_callback(lambda _: computed.finish())

    def commit(self) -> None:
        assert self.lease is not None
        self.lease.commit(len(self.prompt), after=self.computed)

    @property
    def finished(self) -> bool:
        """The forward has ended, and the verdict of its load is agreed."""
        ended = self.forward is not None and self.forward.done()
        return ended and (self.load is None or self.load.result() is not None)

    @property
    def verdict_failed(self) -> str | None:
        result = None if self.load is None else self.load.result()
        return None if result is None else result.failed

    def give_back(self) -> None:
        assert self.lease is not None
        self.lease.release(after=self.computed)
        self.lease = self.load = self.forward = self.prefetch = None
        self.retries += 1
