"""Chat with a model that is split over two processes: ``python examples/tp_chat.py``.

Each rank has half of the heads, and a cache of its own for them: device pool, host pool, and its objects in one storage folder.
The engine makes the same calls on both ranks in every step; the caches agree once per step, so both reuse the same prefix, from
the same tier, whatever their copies and reads are doing.  Some clients leave before they have been answered; half-way the caches
are closed and opened again on the same folder.

Proved at the end, or the exit status is 1: both ranks have served the same tokens from the same tiers in every step; every page
that was used again had, on each rank, the bytes that were computed for it; a run in which nothing is ever evicted gives the same
texts.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import argparse
import asyncio
import multiprocessing
import random
import socket
import sys
import tempfile
import traceback
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from tp_model import Shard, random_llama

from hicache_actors import (
    Config,
    HiCache,
    HostConfig,
    KVTensors,
    Lease,
    Load,
    ModelFacts,
    Prefetch,
    Prompt,
    Shortfall,
    StorageConfig,
)
from hicache_actors.ranks.group import RankGroup

RANKS = 2
PAGE_SIZE = 16
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
    left: int = 0
    verified_pages: int = 0
    wrong_pages: int = 0
    other_texts: int = 0
    states: list[str] = field(default_factory=list)


class Sessions:
    """Users who share a system prompt and bring a long text each; every turn repeats all that was said before."""

    def __init__(self, turns: int) -> None:
        draw = random.Random(1)
        self.draw = draw
        system = [draw.randrange(512) for _ in range(60)]
        self.history = [system + [draw.randrange(512) for _ in range(100)] for _ in range(6)]
        self.order = [draw.randrange(len(self.history)) for _ in range(turns)]

    def request(self, number: int) -> Request:
        session = self.order[number]
        question = [self.draw.randrange(512) for _ in range(20)]
        leaves_after = self.draw.choice((None, None, None, None, 0, 3))
        return Request(f"r{number}", session, self.history[session] + question, leaves_after)

    def answered(self, request: Request) -> None:
        self.history[request.session] = request.ids + request.answer


class Engine:
    """One rank's engine.  Everything that it decides follows from what both ranks know."""

    def __init__(self, cache: HiCache, pool: KVTensors, shard: Shard, record: Record, new_tokens: int) -> None:
        self.cache, self.pool, self.shard, self.record, self.new_tokens = cache, pool, shard, record, new_tokens
        self.contents: dict[bytes, bytes] = {}  # page hash -> digest of what was computed for it

    async def run(self, requests: Iterable[Request], sessions: Sessions | None = None) -> None:
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

    def advance(self, request: Request, sessions: Sessions | None) -> bool:
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
        if not left and len(request.answer) < self.new_tokens:
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
        n_pages = len(request.ids) // PAGE_SIZE
        for at, page_hash in enumerate(Prompt(request.ids).page_hashes(PAGE_SIZE, n_pages)):
            page = request.lease.pages[at]
            digest = xxhash.xxh3_128()
            for layer in range(self.pool.shape.layers):
                for tensor in self.pool.layer(layer):
                    digest.update(tensor[page].numpy().tobytes())
            found = digest.digest()
            wrong = self.contents.setdefault(page_hash, found) != found
            self.record.wrong_pages += wrong
            self.record.verified_pages += at < request.start // PAGE_SIZE and not wrong


async def live(rank: int, shard: Shard, args: argparse.Namespace, storage: str) -> Record:
    record = Record()
    sessions = Sessions(args.requests)
    contents: dict[bytes, bytes] = {}
    half = args.requests // 2
    for life, numbers in enumerate((range(half), range(half, args.requests))):
        async with opened(rank, life, shard, args.device_pages, args.host_pages, storage) as cache:
            engine = Engine(cache, cache.kv, shard, record, args.new_tokens)
            engine.contents = contents
            for first in range(
                numbers.start, numbers.stop, BATCH
            ):  # what a session says next depends on its last answer
                batch = range(first, min(first + BATCH, numbers.stop))
                await engine.run([sessions.request(number) for number in batch], sessions)
            record.states.append(cache.state)
            await cache.drain(PATIENCE_S, stepping=True)
    return record


async def replay(rank: int, shard: Shard, args: argparse.Namespace, record: Record) -> None:
    """The same prompts in the same order, on a pool that holds them all: nothing is evicted, loaded or fetched."""
    pages = sum((len(ids) + args.new_tokens) // PAGE_SIZE + 2 for ids, _ in record.served)
    again = Record()
    async with opened(rank, 2, shard, pages, 1, None) as cache:
        engine = Engine(cache, cache.kv, shard, again, args.new_tokens)
        for number, (ids, _) in enumerate(record.served):
            await engine.run([Request(f"again{number}", number, ids, None)])
        assert cache.snapshot().counts.get("evicted_device_pages", 0) == 0
    record.other_texts = sum(one != other for one, other in zip(record.served, again.served, strict=True))


def opened(rank: int, epoch: int, shard: Shard, device_pages: int, host_pages: int, storage: str | None) -> Any:
    config = Config(
        page_size=PAGE_SIZE,
        host=HostConfig(pages=host_pages),
        model=ModelFacts(model_id="random-llama", weights="seed 0", total_kv_heads=shard.kv_heads * RANKS),
        storage=StorageConfig(url=storage, prefetch_threshold_tokens=2 * PAGE_SIZE),
    )
    group = RankGroup(tp_rank=rank, tp_size=RANKS, epoch=epoch, deadline_s=PATIENCE_S)
    return HiCache.open(config, shard.new_pool(PAGE_SIZE, device_pages), driver="step", ranks=group)


def check_shard(model: Any, shard: Shard) -> float:
    """-> the largest difference between the split model's logits and those of the whole one."""
    ids = list(range(7, 7 + 3 * PAGE_SIZE + 5))
    whole = model(torch.tensor([ids])).logits[0, -1].detach()
    split, _ = shard.prefill(ids, shard.new_pool(PAGE_SIZE, 4), range(4), 0, None)
    return float((whole - split).abs().max())


def run_rank(rank: int, port: int, args: argparse.Namespace, storage: str, pipe: Connection) -> None:
    """One process."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)  # the engine's own; the cache makes one of its own
        model = random_llama()
        shard = Shard(model, rank, RANKS, lambda part: dist.all_reduce(part) and None)
        error = check_shard(model, shard)
        if error > 1e-3:
            raise ValueError(f"the split model is not the whole one: logits differ by {error}")
        record = asyncio.run(live(rank, shard, args, storage))
        asyncio.run(replay(rank, shard, args, record))
        dist.destroy_process_group()
        pipe.send(record)
    except BaseException:
        pipe.send(f"rank {rank}: {traceback.format_exc()}")
    pipe.close()


def judge(records: list[Record]) -> list[str]:
    """-> what is wrong."""
    first, problems = records[0], list[str]()
    for rank, record in enumerate(records):
        if record.steps != first.steps or record.served != first.served:
            problems.append(f"rank {rank} has reused or said something else than rank 0")
        if record.wrong_pages or record.other_texts:
            problems.append(f"rank {rank}: {record.wrong_pages} wrong pages, {record.other_texts} other texts")
        if set(record.states) != {"open"}:
            problems.append(f"rank {rank}: the cache was {record.states}")
        problems += [f"rank {rank}: nothing came from {tier}" for tier in TIERS if not record.tokens[tier]]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=36, help="turns, over six sessions (%(default)s)")
    parser.add_argument("--device-pages", type=int, default=40, metavar="N", help="of each rank (%(default)s)")
    parser.add_argument("--host-pages", type=int, default=72, metavar="N", help="of each rank (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=8, metavar="N", help="in each answer (%(default)s)")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers: list[Record | str] = []
    with tempfile.TemporaryDirectory(prefix="hicache-tp-") as folder:
        ranks = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_rank, args=(rank, port, args, Path(folder).as_uri(), theirs))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        for rank, (_, pipe) in enumerate(ranks):
            try:
                answers.append(pipe.recv() if pipe.poll(600.0) else f"rank {rank} does not answer")
            except EOFError:
                answers.append(f"rank {rank} has died")
        for process, _ in ranks:
            process.join(30.0)
            process.kill()
            process.join()
        codes = [process.exitcode for process, _ in ranks]
    records = [answer for answer in answers if isinstance(answer, Record)]
    problems = [answer for answer in answers if isinstance(answer, str)] or judge(records)
    problems += [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
    for record in records[:1]:
        print(f"{len(record.served)} turns answered, {record.left} clients left before")
        print("prompt tokens on each rank: " + " + ".join(f"{record.tokens[tier]} {tier}" for tier in TIERS))
        print(f"{sum(each.verified_pages for each in records)} reused pages bit-equal, over {RANKS} ranks")
    print("\n".join(problems) if problems else "both ranks alike in every step; texts as without eviction")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
