"""The engine of one rank of examples/tp_chat.py: batches of requests over a cache, the same calls on all ranks in every step."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import xxhash
from tp_model import Shard

from hicache_actors import HiCache, Lease, Load, Prefetch, Prompt, Shortfall

BATCH = 3  # requests that run at a time
TIERS = ("device", "host", "storage", "computed")
PATIENCE_S = 30.0


@dataclass
class Request:
    rid: str
    session: int
    ids: list[int]
    leaves_after: int | None  # tokens after which its client has gone; 0: while it waits
    answer: list[int] = field(default_factory=list)
    fetch: Prefetch | None = None
    lease: Lease | None = None
    load: Load | None = None
    start: int = 0
    arrived: bool = True
    logits: torch.Tensor | None = None
    judged: bool = False  # the verdict on its load is known to be good


@dataclass
class Record:
    """What one rank has seen; the parent compares."""

    steps: list[tuple[Any, ...]] = field(
        default_factory=list
    )  # of each step with an admission: who got what from which tier
    served: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompt and answer, in order of admission
    tokens: Counter[str] = field(default_factory=Counter)  # by tier
    texts: list[str] = field(default_factory=list)  # of the answers
    left: int = 0
    verified_pages: int = 0
    wrong_pages: int = 0
    other_texts: int = 0
    states: list[str] = field(default_factory=list)


class Answered(Protocol):
    """Who wants to know of each answer."""

    def answered(self, request: Request) -> None: ...


class Engine:
    """One rank's engine.  Everything that it decides follows from what both ranks know."""

    def __init__(self, cache: HiCache, shard: Shard, record: Record, new_tokens: int, end: int) -> None:
        """``end``: the token that ends an answer; else it has ``new_tokens``."""
        self.cache, self.pool, self.shard, self.record = cache, cache.kv, shard, record
        self.page_size, self.new_tokens, self.end = cache.page_size, new_tokens, end
        self.contents: dict[bytes, bytes] = {}  # page hash -> digest of what was computed for it

    async def run(self, requests: Iterable[Request], sessions: Answered | None = None) -> None:
        waiting, running = deque(requests), list[Request]()
        while waiting or running or self.cache.needs_step:
            await self.cache.begin_step_async(PATIENCE_S)
            for request in list(running):
                if self.advance(request, sessions):
                    running.remove(request)
                    if request.lease is None and not request.judged:
                        waiting.append(request)
            admitted = self.admit(waiting, running)
            self.cache.end_step()
            running += admitted
            if running:  # the model's own reductions: the same passes in the same order on all ranks
                await asyncio.to_thread(self.compute, running)

    def admit(self, waiting: deque[Request], running: list[Request]) -> list[Request]:
        """Start requests that have been fetched and fit; the turns of a session follow one another."""
        admitted: list[Request] = []
        for _ in range(len(waiting)):
            request = waiting.popleft()
            busy = any(other.session == request.session for other in (*running, *admitted))
            if busy or len(running) + len(admitted) == BATCH or not self.start(request, admitted):
                if request.leaves_after == 0 and request.fetch is not None:
                    request.fetch.stop()
                    self.record.left += 1
                else:
                    waiting.append(request)
        if admitted:
            accounts = [
                (each.rid, *(getattr(each.lease.account, tier) for tier in TIERS)) for each in admitted if each.lease
            ]
            self.record.steps.append(tuple(accounts))
        return admitted

    def start(self, request: Request, admitted: list[Request]) -> bool:
        prompt = Prompt(request.ids)
        if request.fetch is None:
            request.fetch = self.cache.prefetch(prompt, request.rid, deadline_s=5.0)
        if not request.fetch.settled:
            return False
        lease = self.cache.lease(prompt, request.rid)
        load = lease.load()
        room = lease.allocate(len(request.ids) + self.new_tokens - lease.usable_tokens)
        if isinstance(room, Shortfall):
            lease.release()
            return False
        request.lease, request.load = lease, None if isinstance(load, Shortfall) else load
        request.start, request.judged, request.logits = lease.usable_tokens, False, None
        admitted.append(request)
        return True

    def advance(self, request: Request, sessions: Answered | None) -> bool:
        """After a pass: judge the load, emit a token -> whether the request has left the batch."""
        lease = request.lease
        assert lease is not None
        assert request.logits is not None
        if not request.judged:
            verdict = None if request.load is None else request.load.result()
            if request.load is not None and verdict is None:
                return False
            if verdict is not None and verdict.failed is not None:  # no token may come of it: once more
                lease.release()
                request.lease = request.fetch = None
                return True
            request.judged = True
            lease.commit(len(request.ids))
            self.verify(request)
            for tier in TIERS:
                self.record.tokens[tier] += getattr(lease.account, tier)
        request.answer.append(int(request.logits.argmax()))
        left = request.leaves_after is not None and len(request.answer) >= request.leaves_after > 0
        if not left and request.answer[-1] != self.end and len(request.answer) < self.new_tokens:
            return False
        lease.release()
        request.lease = None
        if left:
            self.record.left += 1
        else:
            self.record.served.append((request.ids, request.answer))
            if sessions is not None:
                sessions.answered(request)
        return True

    def compute(self, running: list[Request]) -> None:
        """In a thread, between two steps: prefill what is new, one token of what was judged."""
        for request in running:
            assert request.lease is not None
            pages = list(request.lease.pages)
            if request.logits is None:
                request.logits, request.arrived = self.shard.prefill(
                    request.ids, self.pool, pages, request.start, request.load
                )
            elif request.judged:
                at = len(request.ids) + len(request.answer) - 1
                request.logits, _ = self.shard.forward(request.answer[-1:], self.pool, pages, at)

    def verify(self, request: Request) -> None:
        """A page's bytes follow from its tokens alone here, so whatever comes back must be what was computed first."""
        assert request.lease is not None
        n_pages = len(request.ids) // self.page_size
        for at, page_hash in enumerate(Prompt(request.ids).page_hashes(self.page_size, n_pages)):
            page = request.lease.pages[at]
            digest = xxhash.xxh3_128()
            for layer in range(self.pool.shape.layers):
                for tensor in self.pool.layer(layer):
                    digest.update(tensor[page].numpy().tobytes())
            found = digest.digest()
            wrong = self.contents.setdefault(page_hash, found) != found
            self.record.wrong_pages += wrong
            self.record.verified_pages += at < request.start // self.page_size and not wrong
