"""Two serving processes share one store while both run: what one has computed, the other reads.

Each instance is a process of its own, with its own model, device pool, host pool and cache; only the storage folder is shared.

    instance 1 answers about documents A and B; its pages are stored
    instance 2, started meanwhile, is asked the same: it reads from storage what instance 1 wrote
    instance 2 answers about document C, then instance 1 is asked about C: the other way round

    python examples/two_instances.py                 # SmolLM2, converted once; --model toy needs no download
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any, Self

import chat_environment  # noqa: F401 (before torch)
import torch
from chat_models import load_model
from chat_texts import Chats, Tokenizer

from hicache_actors import Config, HiCache, HostConfig, KVTensors, ModelFacts, Prompt, Shortfall, StorageConfig
from hicache_actors.integrations.transformers import PagedModel, kv_shape_of

PAGE_SIZE, DEVICE_PAGES, HOST_PAGES, CHUNK_TOKENS = 64, 36, 72, 512


class Instance:
    """The parent's end of one serving process: one JSON line per request, one per answer."""

    def __init__(self, name: str, process: Process) -> None:
        self.name, self._process = name, process

    @classmethod
    async def start(cls, name: str, args: argparse.Namespace, storage: Path) -> Self:
        command = [sys.executable, __file__, "--instance", name, "--storage", str(storage), "--model", args.model]
        command += ["--doc-tokens", str(args.doc_tokens), "--threads", str(args.threads)]
        if args.wheels is not None:
            command += ["--wheels", str(args.wheels)]
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        instance = cls(name, process)
        await instance._read()  # ready
        return instance

    async def ask(self, session: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"session": session}).encode() + b"\n")
        answer = await self._read()
        print(
            f"{self.name}  document {session}: {answer['prompt_tokens']:5} tokens = {answer['storage']:5} from storage"
            f" + {answer['device'] + answer['host']:5} own + {answer['computed']:5} computed;"
            f" first token after {answer['ttft_s']:.2f} s",
            flush=True,
        )
        return answer

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit status {await self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def orchestrate(args: argparse.Namespace, storage: Path) -> int:
    first = await Instance.start("instance 1", args, storage)
    own = {session: await first.ask(session) for session in "AB"}
    second = await Instance.start("instance 2", args, storage)
    read = {session: await second.ask(session) for session in "AB"}
    own["C"] = await second.ask("C")
    read["C"] = await first.ask("C")
    await asyncio.gather(first.stop(), second.stop())
    equal = sum(read[session]["answer"] == own[session]["answer"] for session in "ABC")
    shared = {session: read[session]["storage"] for session in "ABC"}
    print(f"tokens that one instance read and the other had written: {shared}")
    print(f"same answer from both: {equal} of 3 (not required: a reused prefix changes the chunks of a prefill)")
    if not all(shared.values()):
        print("FAILED: an instance found nothing of what the other had stored")
        return 1
    print("OK: both instances read what the other wrote, while both ran")
    return 0


async def serve(args: argparse.Namespace) -> None:
    """One instance: answers requests from stdin until it is closed."""
    torch.set_num_threads(args.threads)
    model, tokenizer, facts = load_model(args.model, args.wheels)
    kv = KVTensors.make(kv_shape_of(model, page_size=PAGE_SIZE), DEVICE_PAGES)
    engine = PagedModel(model, kv, capacity_tokens=args.doc_tokens + 512)
    async with HiCache.open(config(facts, args.storage), kv) as cache:
        chats = Chats(tokenizer, args.doc_tokens)
        print(json.dumps({"ready": args.instance}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            ids = chats.prompt(json.loads(line)["session"], 1)
            print(json.dumps(await answer(cache, engine, tokenizer, ids)), flush=True)


def config(facts: ModelFacts, storage: Path) -> Config:
    return Config(
        model=facts,
        page_size=PAGE_SIZE,
        host=HostConfig(pages=HOST_PAGES),
        storage=StorageConfig(url=storage.resolve().as_uri()),
    )


def decode(engine: PagedModel, cache: Any, first_logits: torch.Tensor, limit: int, end: int) -> list[int]:
    """Greedy decoding of at most ``limit`` tokens."""
    tokens = [int(first_logits.argmax())]
    while len(tokens) < limit and tokens[-1] != end:
        tokens.append(int(engine.forward(tokens[-1:], cache).argmax()))
    return tokens


async def answer(cache: HiCache, engine: PagedModel, tokenizer: Tokenizer, ids: list[int]) -> dict[str, Any]:
    """A short answer to one prompt, and where its KV came from."""
    started = time.perf_counter()
    prompt = Prompt(ids)
    async with cache.acquire(prompt, deadline_s=5.0) as lease:
        room = lease.allocate(len(ids) + 8 - lease.usable_tokens)
        if isinstance(room, Shortfall):
            raise SystemExit(f"no room for {len(ids)} tokens: {room}")
        pages = engine.new_cache(lease)
        logits = await lease.run(engine.prefill, ids, pages, CHUNK_TOKENS)
        if lease.loading is not None and (failed := (await lease.loading.verdict()).failed):
            raise SystemExit(f"a load failed ({failed}); a server would try again")
        ttft_s = time.perf_counter() - started
        await lease.run(pages.flush)
        lease.commit(len(ids))
        account = lease.account
        tokens = await lease.run(decode, engine, pages, logits, 8, tokenizer.end)
    # The other instance is asked next: a request answered is a request whose pages it can read.
    await cache.stored(prompt, deadline_s=30.0)
    return {
        "prompt_tokens": len(ids),
        "device": account.device,
        "host": account.host,
        "storage": account.storage,
        "computed": account.computed,
        "ttft_s": ttft_s,
        "answer": tokens,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("smollm2", "toy"), default="smollm2", help="default: %(default)s")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="where the wheel with the weights is")
    parser.add_argument("--doc-tokens", type=int, default=1400, metavar="N", help="length of a document (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch's threads, each (%(default)s)")
    parser.add_argument("--storage", type=Path, metavar="FOLDER", help="the shared folder (default: a temporary one)")
    parser.add_argument("--instance", help=argparse.SUPPRESS)  # the parent starts its instances with it
    args = parser.parse_args()
    if args.instance is not None:
        asyncio.run(serve(args))
        return 0
    with tempfile.TemporaryDirectory(prefix="hicache-two-") as scratch:
        return asyncio.run(orchestrate(args, args.storage or Path(scratch)))


if __name__ == "__main__":
    sys.exit(main())
